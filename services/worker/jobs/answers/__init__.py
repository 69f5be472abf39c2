"""The path of outputs to a router.

`finisher.py` makes answers, `fp32_fallback.py` recomputes outputs that are not finite,
`delivery.py` returns answers under their leases, and `streamed.py` sends the text of a model that
is still generating.
"""

"""Admission control: limits of tenants (`tenants.py`), and whether a request of a given price is
admitted now (`pricing.py` estimates, `controller.py` gathers, `rules.py` decides, `splitting.py`
divides admitted requests into jobs).

`validation/` checks requests before, and `routing/` chooses the lane. Most of it is pure; `lanes/`
executes admitted requests.
"""

"""Admission control: limits of tenants (`tenants.py`), and whether a request of a given price is
admitted now (`controller.py` gathers, `control.py` decides).

`validation/` checks requests before, and `routing/` chooses the lane. Most of it is pure; `lanes/`
executes admitted requests.
"""

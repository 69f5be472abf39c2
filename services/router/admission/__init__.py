"""Admission control: validation of requests and reports (`validation.py`, `reports.py`), pricing, routing to a lane, and whether
a request is admitted. Most of it is pure; `lanes/` carries out what was admitted."""

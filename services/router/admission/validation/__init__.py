"""Validate messages of clients (`requests.py`, with the limits in `limits.py`) and of workers
(`reports.py`, with the limits in `report_limits.py`). Pure.
"""

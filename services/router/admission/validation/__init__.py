"""What may be in a message: of clients (`requests.py`, by the list in `limits.py`), and of workers
(`reports.py`, by the list in `report_limits.py`). Pure."""

"""Admission control: what a request or a report may hold (`validation.py`, `reports.py`), what it costs, which lane it takes,
and whether it is let in. Most are pure decisions; what is let in is carried out in `lanes/`."""

"""The path of jobs through lanes: from requests (`codec.py`) into Redis (`dispatch.py`), to pulls
of workers (`wakeups.py`, `pending_pulls.py`, `pull.py`), and their answers back.

Admission control is in `admission/`.
"""

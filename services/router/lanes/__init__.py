"""Jobs on their way through lanes: out of requests (`codec.py`), into Redis (`dispatch.py`), to the pulls of workers
(`bells.py`, `waiters.py`, `pull.py`), and their answers back. What may enter is decided in `admission/`."""

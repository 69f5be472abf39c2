"""The path of a job through the worker: pulled (`intake.py`, `pulls.py`), prepared (`preparing.py`), run in batches on the
device thread (`runner.py`, `ladder.py`), finished and returned (`finisher.py`, `delivery.py`). What runs next is decided in
`scheduling/`, what is in memory in `memory/`."""

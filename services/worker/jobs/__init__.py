"""The path of a job through the worker: pulled (`puller.py`, `pulls.py`), read and prepared (`intake.py`, `preparing.py`), run in
batches on the device thread (`runner.py`, `ladder.py`), finished and returned (`finisher.py`, `delivery.py`). What runs next is
decided in `scheduling/`, what is in memory in `memory/`."""

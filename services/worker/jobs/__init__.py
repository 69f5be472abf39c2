"""The path of a job through the worker: pulled, read and prepared (`pulling/`), run in batches on
the device thread (`execution/`), finished and returned (`answers/`). What all of them hold of a job
is in `held.py`. What runs next is decided in `scheduling/`, what is in memory in `memory/`."""

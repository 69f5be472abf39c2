"""The path of a job through the worker.

Jobs are pulled, read and prepared (`pulling/`), run in batches on the device thread (`execution/`),
and finished and returned (`answers/`).
`held.py` holds the state that these steps share. `scheduling/` decides what runs next, `memory/`
which models are loaded.
"""

"""`shoal simulate`: traces of requests replayed through eviction policies and fleets, on this
machine and without a mesh.

`trace.py` (past or expected requests) → `engine.py` (a fleet's reaction; pure) → `report.py`
(tables and plots). Traces are read from a file, generated (`generate.py`), or recorded from a
running mesh (`record.py`).
"""

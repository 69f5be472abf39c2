"""`shoal simulate`: traces of requests replayed through eviction policies and fleets, on this
machine and without a mesh.

`trace.py` (what was or will be asked for) → `engine.py` (what a fleet would do with it; pure) →
`report.py` (tables and plots). Traces come from a file, from `generate.py`, or from a running mesh
(`record.py`).
"""

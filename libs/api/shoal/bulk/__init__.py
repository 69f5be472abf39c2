"""Bulk jobs: all rows of a file through `encode`, `score` or `extract`, each exactly once in the
output (docs/bulk.md).

- `spec.py`: the description of a job. Pure.
- `inputs.py`: reads the input as a stream of chunks.
- `sending.py`: sends a chunk and isolates rows that fail.
- `parts.py`: makes the file of a chunk's results.
- `places.py`: commits files to a folder or an object store.
- `manifest.py`: the record of a job next to its parts.
- `flow.py`: adapts the number of chunks in flight. Pure.
- `engine.py`: runs a job.
- `export.py`: reads the parts of a job.

This package is not public yet; `shoal job` is its interface.
"""

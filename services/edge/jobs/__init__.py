"""Submitted bulk jobs (docs/bulk.md): a client names files, the edge answers at once, and one edge
runs the job in a separate process.

Jobs are claimed as batches are, by leases in the same storage, and share their slots and turns. The
process runs the engine of `shoal job run`, so the manifest in the output is the truth about a job.
The process is separate because the input decides its memory and CPU, and the edge also answers
interactive requests.

- `settings.py`: where jobs may read and write, and their limits.
- `roots.py`: checks locations that clients name. Pure, except for symbolic links.
- `objects.py`: the record of a job, and its form for clients. Pure.
- `store.py`: a tenant's jobs in the storage of batches.
- `routes.py`, `jobs.py`: the routes and their handlers.
- `runner.py`: runs one job.
- `process.py`: the process of a job, from the edge's side.
- `child.py`: this process.
"""

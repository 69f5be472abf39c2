"""OpenAI's Files and Batches (docs/bulk.md): uploads in a storage, and batches of requests that
the edge executes through its routes.

- `objects.py`: the records of files and batches, and their forms for clients. Pure.
- `lines.py`: the lines of an input, and those of an output. Pure.
- `store.py`: a tenant's records and data in a folder or an object store.
- `leases.py`: claims of batches, so that one edge runs each.
- `context.py`: the parts that handlers and runners share: threads, quotas, callers.
- `files.py`, `batches.py`: the handlers of the routes.
- `gate.py`: limits requests in flight.
- `runner.py`: runs one batch.
- `manager.py`: finds batches to run, and deletes expired files.
"""

"""The methods of the clients: `encode`, `score`, `extract` … (`inference.py`), `mesh`, `explain`,
`models.list` … (`operation.py`).

Each verb is written once, as a coroutine function or one that returns an asynchronous generator,
with the client as its first argument; `shoal.client` binds it to `AsyncClient` as it is and to
`Client` through `blocking` or `blocking_stream`. Arguments and their documentation belong here;
building and sending requests does not.
"""

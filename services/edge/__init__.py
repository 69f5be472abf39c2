"""The edge: HTTP in front of the routers, in the wire formats (dialects) that programs already
speak.

A process of its own and a gRPC client of any router: large answers in JSON hold the interpreter's
lock, and a parser of foreign bytes must not endanger gRPC callers. Credentials, tenant, request id,
trace and deadline go on to the router, which authenticates, limits and audits as for any caller.
Nothing here knows Redis or torch.

    server.py       connections: TLS, timers, limits, drain (uvicorn's protocol)
    asgi.py         one request: bounded body, dialect, call, answer; every error becomes an answer of its dialect here
    routes.py       the table of routes, over dialects/, which are pure: bytes → question for the mesh, its answer → bytes
    compression.py  bodies in gzip and deflate, within bounds; answers that shrink
    ports/          addresses that are one model's; TEI's API over gRPC, of dialects/tei_v1.py
    routers.py      the gRPC side
"""

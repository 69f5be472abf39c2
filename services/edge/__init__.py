"""The edge: HTTP in front of the routers, in the wire formats (dialects) of existing clients.

It is a separate process and a gRPC client of any router, because large JSON answers hold the GIL
and parsing untrusted bytes must not endanger gRPC callers. Credentials, tenant, request id, trace
and deadline go on to the router, which authenticates, limits and audits as for any caller. The edge
uses neither Redis nor torch.

    server.py       connections: TLS, timers, limits, drain (uvicorn's protocol)
    asgi.py         one request: bounded body, dialect, call, answer; errors become answers here
    routes.py       the table of routes over dialects/, which purely convert bytes to mesh calls
                    and replies to bytes
    compression.py  bodies in gzip and deflate, within limits
    ports/          addresses with a fixed model; TEI's gRPC API, using dialects/tei_v1.py
    routers.py      the gRPC side
"""

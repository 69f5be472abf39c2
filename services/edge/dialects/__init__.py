"""Dialects: the wire formats of vendors, one module each. Pure: no sockets, no clock, no event
loop.

A dialect converts a `Received` request to a `MeshCall`, the mesh's reply to an `Answer`, and an
`HttpError` to its form of error (types of `services/edge/messages`). `services/edge/routes.py`
lists the paths.
"""

"""Dialects: the wire formats of vendors, one module each. Pure: no sockets, no clock, no event
loop.

A dialect turns what a client sent (`Received`) into a `Question` for the mesh, the mesh's answer
into an `Answer`, and a `Problem` into its own form of error: the words of `services/edge/messages`.
`services/edge/routes.py` names the paths.
"""

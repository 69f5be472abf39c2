"""Dialects: the wire formats of vendors, one module each. Pure: no sockets, no clock, no event loop.

A dialect turns what a client sent (`base.Received`) into a `base.Question` for the mesh, the mesh's answer into an `base.Answer`,
and a `base.Problem` into its own form of error. `services/edge/routes.py` names the paths.
"""

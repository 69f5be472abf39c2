"""Imports gRPC so that it writes nothing of its own to stderr: a failed handshake has seven lines there, and one in `options.told`.

It reads the variable as it is imported, and only then; processes that a command starts do not inherit it.
"""

import os

_VARIABLE = "GRPC_VERBOSITY"

if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]

"""Imports gRPC with its own log switched off: it writes seven lines to stderr for a failed
handshake, which `failures.py` reports in one.

gRPC reads the variable only at import; it is deleted after that, so that child processes do not
inherit it.
"""

import os

_VARIABLE = "GRPC_VERBOSITY"

if _VARIABLE not in os.environ:
    os.environ[_VARIABLE] = "NONE"
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_VARIABLE]

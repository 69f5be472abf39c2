"""gRPC serving for every Shoal process: one server, one interceptor, health checks that never wait,
and graceful shutdown.
"""

import os

# gRPC reads this variable on import. Its log lines are not JSON, and a line for each failed TLS
# handshake or compressed request would let any peer fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from libs.serving.calls.call import Call, current_call
from libs.serving.calls.deadline import Deadline
from libs.serving.calls.multiplex import StreamCall
from libs.serving.security.identity import Identity
from libs.serving.security.settings import Security
from libs.serving.server import LIVENESS, GrpcServer, Service, serving

__all__ = [
    "LIVENESS",
    "Call",
    "Deadline",
    "GrpcServer",
    "Identity",
    "Security",
    "Service",
    "StreamCall",
    "current_call",
    "serving",
]

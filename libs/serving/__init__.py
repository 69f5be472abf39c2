"""How every process of Shoal serves gRPC: one server, one interceptor, health checks that never wait, graceful shutdown."""

import os

# gRPC reads this variable when it is imported. Its own log lines are not JSON, and a line for each failed TLS handshake or each
# compressed request would let anybody who can connect fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from libs.serving.call import Call, current_call
from libs.serving.deadline import Deadline
from libs.serving.identity import Identity
from libs.serving.security import Security
from libs.serving.server import LIVENESS, Server, Service, serving

__all__ = ["LIVENESS", "Call", "Deadline", "Identity", "Security", "Server", "Service", "current_call", "serving"]

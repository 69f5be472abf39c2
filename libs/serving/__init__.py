"""How every process of Shoal serves gRPC: one server, one interceptor, health that never waits, an orderly end."""

import os

# gRPC looks at it when it is imported. Its own lines are not JSON, and one for each TLS handshake that fails, or for each request
# that is compressed, would let anybody who can connect fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from libs.serving.call import Call, current_call
from libs.serving.deadline import Deadline
from libs.serving.identity import Identity
from libs.serving.security import Security
from libs.serving.server import LIVENESS, Server, Service, serving

__all__ = ["LIVENESS", "Call", "Deadline", "Identity", "Security", "Server", "Service", "current_call", "serving"]

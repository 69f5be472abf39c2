"""How every process of Shoal serves gRPC: one server, one interceptor, health that never waits, an orderly end."""

from libs.serving.call import Call, current_call
from libs.serving.deadline import Deadline
from libs.serving.server import Server, Service, serving

__all__ = ["Call", "Deadline", "Server", "Service", "current_call", "serving"]

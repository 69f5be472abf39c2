"""`python healthcheck.py SERVICE`: status 0 if the process in this container says that it serves,
at SHOAL_HEALTH_ADDRESS.

For Docker's HEALTHCHECK. Kubernetes asks by itself.
"""

from __future__ import annotations

import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def main() -> int:
    port = os.environ["SHOAL_HEALTH_ADDRESS"].rpartition(":")[2]
    with grpc.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=sys.argv[1]), timeout=SECONDS
            )
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())

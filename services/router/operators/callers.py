"""CallerService: reports the tenant for which a caller acts."""

from __future__ import annotations

import grpc
from shoal.v1 import caller_pb2 as pb
from shoal.v1 import caller_pb2_grpc

from libs.serving import current_call


class CallerService(caller_pb2_grpc.CallerServiceServicer):
    """Returns the tenant that the interceptor found before it called the handler."""

    async def GetCaller(
        self,
        request: pb.GetCallerRequest,
        context: grpc.aio.ServicerContext[pb.GetCallerRequest, pb.GetCallerResponse],
    ) -> pb.GetCallerResponse:
        return pb.GetCallerResponse(tenant=current_call().tenant)

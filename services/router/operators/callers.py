"""CallerService: which tenant a caller acts for."""

from __future__ import annotations

import grpc
from shoal.v1 import caller_pb2 as pb
from shoal.v1 import caller_pb2_grpc

from libs.serving import current_call


class CallerService(caller_pb2_grpc.CallerServiceServicer):
    """Answers with what the interceptor has found before it called the handler."""

    async def GetCaller(
        self,
        request: pb.GetCallerRequest,
        context: grpc.aio.ServicerContext[pb.GetCallerRequest, pb.GetCallerResponse],
    ) -> pb.GetCallerResponse:
        return pb.GetCallerResponse(tenant=current_call().tenant)

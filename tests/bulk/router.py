"""`python -m tests.bulk.router`: a fake router in its own process, until its stdin is closed.

Each line of stdin is a row number, or empty: calls for this row and the following ones are held
until another line allows them. The router prints a line once it counts.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from shoal.v1 import inference_pb2

from tests.api.fake_router import FakeRouter, serving

EMBEDDING_ID = "0123456789abcdef.float32"


@dataclass
class HoldingRouter(FakeRouter):
    """Holds calls for the texts of `tests.bulk.jobs.write_parquet`.

    Attributes:
        held_row: The first row that is held; None: no row is.
    """

    held_row: int | None = None

    def begin_call(self, method: str, request: Message, context: grpc.ServicerContext) -> int:
        while self._is_held(request) and context.is_active():
            time.sleep(0.01)
        return super().begin_call(method, request, context)

    def _is_held(self, request: Message) -> bool:
        row = self.held_row
        if row is None or not isinstance(request, inference_pb2.EncodeRequest):
            return False
        return int(request.items[0].text.split()[1]) >= row


def main() -> None:
    router = HoldingRouter(embedding_id=lambda number: EMBEDDING_ID)
    with serving(router):
        print(router.address, flush=True)
        for line in sys.stdin:
            router.held_row = int(line) if line.strip() else None
            print(flush=True)
        router.held_row = None


if __name__ == "__main__":
    main()

"""Record a trace from a running mesh: the jobs that its lanes received, and the models' costs that
its workers report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import grpc
from shoal.transport.channels import channel_options
from shoal.transport.failures import translate
from shoal.transport.trust import Tls
from shoal.v1 import mesh_pb2 as pb
from shoal.v1 import mesh_pb2_grpc, models_pb2

from services.scheduler.simulate.trace import TOKENS_PER_SECOND, ModelCost, TraceRequest

RECORD_SECONDS: Final = 0.2
RENEWED_SECONDS: Final = 60.0
"""A watch that ends after this time is started again: its connection was old. Routers close
connections after minutes.
"""
_Lane = tuple[str, str, str]


class Recorder:
    """Derives requests and costs from successive views of the mesh.

    A lane's counters give the number of jobs and tokens since the last view, not each arrival time:
    they are spread evenly over that time. Routers refresh the counters about once a second, which
    limits the precision of the times. A split request is recorded as its jobs.
    """

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []
        # The state: the time and content of the last view; None before the first.
        self._last: float | None = None
        self._began = 0.0
        self._jobs: dict[_Lane, int] = {}
        self._tokens: dict[_Lane, int] = {}
        self._costs: dict[str, ModelCost] = {}

    def see(self, mesh: pb.Mesh, now: float) -> None:
        """Add one view; `now` rises, in seconds."""
        if self._last is None:
            self._began = self._last = now
            for lane in mesh.lanes:
                self._note(lane)
        for lane in mesh.lanes:
            self._grow(lane, self._last, now)
        for model in mesh.models:
            self._learn(model)
        self._last = now

    def trace(self) -> tuple[list[TraceRequest], list[ModelCost], dict[str, int]]:
        """Return requests by time, their models' costs, and the number of requests left out by
        model because no worker reported its costs.
        """
        left_out: dict[str, int] = {}
        for request in self.requests:
            if request.model not in self._costs:
                left_out[request.model] = left_out.get(request.model, 0) + 1
        requests = sorted(
            (one for one in self.requests if one.model in self._costs), key=lambda one: one.at
        )
        used = {request.model for request in requests}
        return requests, [self._costs[model] for model in sorted(used)], left_out

    def _note(self, lane: pb.LaneStatus) -> None:
        key = (lane.pool, lane.model, lane.adapter)
        self._jobs[key], self._tokens[key] = lane.enqueued_jobs, lane.enqueued_tokens

    def _grow(self, lane: pb.LaneStatus, since: float, now: float) -> None:
        key = (lane.pool, lane.model, lane.adapter)
        jobs = lane.enqueued_jobs - self._jobs.get(key, 0)
        tokens = lane.enqueued_tokens - self._tokens.get(key, 0)
        if jobs < 0:  # the lane was forgotten and is new
            jobs, tokens = lane.enqueued_jobs, lane.enqueued_tokens
        self._note(lane)
        if jobs == 0:
            return
        each, rest = divmod(max(tokens, jobs), jobs)
        for number in range(jobs):
            at = since - self._began + (number + 0.5) / jobs * (now - since)
            self.requests.append(TraceRequest(at, lane.model, each + (number < rest), lane.adapter))

    def _learn(self, model: models_pb2.Model) -> None:
        loaded = [place for place in model.places if place.bytes and place.load_seconds]
        if not loaded:
            return
        self._costs[model.model] = ModelCost(
            model.model,
            max(place.bytes for place in loaded),
            sum(place.load_seconds for place in loaded) / len(loaded),
            None,
            max(place.tokens_per_second for place in loaded) or TOKENS_PER_SECOND,
        )


def watch(
    address: str,
    recorder: Recorder,
    *,
    seconds: float | None = None,
    tls: Tls | None = None,
    token: str = "",
    on_view: Callable[[Recorder], None] = lambda recorder: None,
) -> None:
    """Fill `recorder` from the router at `address`, for `seconds` or until Ctrl-C. Raises
    shoal.errors.ShoalError if it cannot.
    """
    options = channel_options(address, tls)
    if tls is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*tls.read()), options)
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    with channel, suppress(KeyboardInterrupt):
        stub = mesh_pb2_grpc.MeshServiceStub(channel)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            begun = now = time.monotonic()
            call: Iterator[pb.WatchMeshResponse] = stub.WatchMesh(
                pb.WatchMeshRequest(interval_seconds=RECORD_SECONDS), metadata=metadata
            )
            try:
                for reply in call:
                    now = time.monotonic()
                    recorder.see(reply.mesh, now)
                    on_view(recorder)
                    if end is not None and now >= end:
                        return
            except grpc.RpcError as error:
                # Routers end old connections; a stopped router does not answer again.
                if (
                    error.code() != grpc.StatusCode.UNAVAILABLE
                    or now == begun
                    or now < begun + RENEWED_SECONDS
                ):
                    raise translate(error, address) from None

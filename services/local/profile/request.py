"""Send requests through a small temporary mesh, one at a time, and measure the time of each
stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from statistics import fmean, median
from typing import Final

from shoal import Client, Regions
from shoal.results import EncodeResult, ExtractResult, ScoreResult, Timings

from libs.models import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    RegionsWork,
    RelationsWork,
    ScoreWork,
    StructureWork,
    Work,
)
from libs.models.interface.work import DetokenizeWork, TextWork, TokenizeWork, all_parts
from services.local.mesh import running
from services.local.settings import Settings

_LOAD_SECONDS: Final = 300.0
_WARM_REQUESTS: Final = 5

# Name, description and seconds of each stage, computed from the seconds that the client measured
# and the `Timings` that the mesh returned. Stages have the names of the fields of `Timings`.
_STOPS: Final[tuple[tuple[str, str, Callable[[float, Timings], float]], ...]] = (
    (
        "client and wire",
        "client library, gRPC, client to router and back",
        lambda seconds, timings: seconds - timings.total_seconds,
    ),
    (
        "router",
        "decode, admit, merge; the answer's way from the worker",
        lambda _, timings: timings.total_seconds - _worker_seconds(timings),
    ),
    (
        "queue",
        "in the lane, and the job's way to the worker",
        lambda _, timings: timings.queue_seconds,
    ),
    ("prepare", "tokenise", lambda _, timings: timings.prepare_seconds),
    ("wait", "for the device", lambda _, timings: timings.wait_seconds),
    ("forward", "on the device", lambda _, timings: timings.forward_seconds),
    ("finish", "the device's output to the answer", lambda _, timings: timings.finish_seconds),
)


@dataclass(frozen=True, slots=True)
class RequestStage:
    """A stage of a request, and its mean duration in seconds."""

    name: str
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestProfile:
    """Durations of requests by the client's clock.

    Attributes:
        requests: The number of requests.
        seconds: The mean duration.
        median_seconds: The median duration.
        stages: The mean duration of each stage; their sum is `seconds`.
    """

    requests: int
    seconds: float
    median_seconds: float
    stages: tuple[RequestStage, ...]


async def profile_requests(settings: Settings, model: str, works: Sequence[Work]) -> RequestProfile:
    """Start a mesh and send it each job as a request, one after the other.

    Raises ShoalError if the mesh does not start or a request fails.
    """
    async with running(settings) as mesh:
        return await asyncio.to_thread(_measure, mesh.address, model, works)


def _measure(address: str, model: str, works: Sequence[Work]) -> RequestProfile:
    measured: list[tuple[float, Timings]] = []
    with Client(address, timeout=_LOAD_SECONDS) as client:
        for work in chain(repeat(works[0], _WARM_REQUESTS), works):
            started = time.perf_counter()
            answer = _ask(client, model, work)
            measured.append((time.perf_counter() - started, answer.timings))
    return summed(measured[_WARM_REQUESTS:])


def summed(measured: Sequence[tuple[float, Timings]]) -> RequestProfile:
    """Summarise requests, given for each the seconds that the client measured and the timings in
    the response.
    """
    seconds = [one for one, _ in measured]
    stages = tuple(
        RequestStage(name, what, fmean(part(*one) for one in measured))
        for name, what, part in _STOPS
    )
    return RequestProfile(len(measured), fmean(seconds), median(seconds), stages)


def _worker_seconds(timings: Timings) -> float:
    """Seconds from the enqueueing of the job to its answer, as the worker measured them."""
    waited = timings.queue_seconds + timings.prepare_seconds + timings.wait_seconds
    return waited + timings.forward_seconds + timings.finish_seconds


def _ask(client: Client, model: str, work: Work) -> EncodeResult | ScoreResult | ExtractResult:
    match work:
        case EncodeWork():
            return client.encode(
                model, work.texts, role=work.role or None, representations=work.representations
            )
        case ScoreWork():
            return client.score(model, work.query, work.documents)
        case EntitiesWork():
            return client.entities(model, work.texts, work.labels)
        case ClassifyWork():
            return client.classify(model, work.texts, work.labels)
        case RelationsWork():
            given = [[(one.start, one.end) for one in entities] for entities in work.entities]
            return client.relations(
                model, work.texts, work.labels, entity_labels=work.entity_labels, entities=given
            )
        case StructureWork():
            return client.extract(model, work.texts, work.schema)
        case RegionsWork():
            images = [part.content for part in all_parts(work)]
            return client.extract(
                model, images, Regions(labels=work.labels, threshold=work.threshold)
            )
        case TextWork() | TokenizeWork() | DetokenizeWork():
            raise ValueError("requests for text and for tokens have no sample")

"""Generate traces of requests for simulations, with three kinds of popularity of models: by Zipf's
law, in bursts of user sessions, and uniform.

Pure: the same seed gives the same trace on every machine.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from services.scheduler.simulate.trace import ModelCost, Trace, TraceRequest

GIB: Final = 2**30
_WARM_UP_SECONDS: Final = (2.0, 4.0, 15.0)
"""Load times in addition to reading bytes (runtime start, compilation of kernels), of which one is
drawn for each model.
"""
_DISK_GIB_PER_SECOND: Final = 1.5
_DRIFT: Final = 4000
"""Requests after which a quarter of the models trade ranks in popularity."""
_SESSION_GAP_SECONDS: Final = 3.0
"""Average time between two requests of a session."""
_SESSION_REQUESTS: Final = 15.0
"""Average number of requests of a session."""


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Parameters of a trace to generate."""

    models: int = 80
    requests: int = 20_000
    rate: float = 0.2
    """Average requests per second."""
    skew: float = 1.1
    """Exponent of Zipf's law; 0: all models equally popular."""


def random_models(count: int, chance: random.Random) -> list[ModelCost]:
    """Draw models of 0.1 to 16 GiB, half of them below 1.2 GiB. The load time of a model is a start
    time, one of _WARM_UP_SECONDS, plus the time to read its bytes from disk.
    """
    costs = []
    for number in range(count):
        gib = min(16.0, max(0.1, chance.lognormvariate(0.2, 1.1)))
        seconds = chance.choice(_WARM_UP_SECONDS) + gib / _DISK_GIB_PER_SECOND
        rate = chance.uniform(20_000, 200_000)
        costs.append(ModelCost(f"model-{number:03}", int(gib * GIB), seconds, None, rate))
    return costs


def zipf(shape: TraceShape, seed: int) -> Trace:
    """Generate independent requests at random times; popularity falls by rank and drifts slowly."""
    chance = random.Random(seed)  # noqa: S311 — nothing secret
    models = random_models(shape.models, chance)
    ranked = [one.model for one in models]
    chance.shuffle(ranked)
    weights = list(accumulate((rank + 1) ** -shape.skew for rank in range(shape.models)))
    requests, at = [], 0.0
    for number in range(shape.requests):
        if number and number % _DRIFT == 0:
            for _ in range(shape.models // 4):
                one, other = chance.randrange(shape.models), chance.randrange(shape.models)
                ranked[one], ranked[other] = ranked[other], ranked[one]
        at += chance.expovariate(shape.rate)
        requests.append(TraceRequest(at, _drawn(ranked, weights, chance), _tokens(chance)))
    return _trace(f"zipf {shape.skew:g}", seed, requests, models)


def bursty(shape: TraceShape, seed: int) -> Trace:
    """Generate sessions: a user works with one model for a while, then leaves. The model is drawn
    by Zipf's law.
    """
    chance = random.Random(seed)  # noqa: S311 — nothing secret
    models = random_models(shape.models, chance)
    ranked = [one.model for one in models]
    chance.shuffle(ranked)
    weights = list(accumulate((rank + 1) ** -shape.skew for rank in range(shape.models)))
    requests: list[TraceRequest] = []
    start = 0.0
    while len(requests) < shape.requests:
        start += chance.expovariate(shape.rate / (_SESSION_REQUESTS + 0.5))
        model, at = _drawn(ranked, weights, chance), start
        for _ in range(int(chance.expovariate(1 / _SESSION_REQUESTS)) + 1):
            requests.append(TraceRequest(at, model, _tokens(chance)))
            at += chance.expovariate(1 / _SESSION_GAP_SECONDS)
    requests.sort(key=lambda request: request.at)
    return _trace("bursty", seed, requests[: shape.requests], models)


def uniform(shape: TraceShape, seed: int) -> Trace:
    """Generate requests for equally likely models, which no policy can predict."""
    trace = zipf(TraceShape(shape.models, shape.requests, shape.rate, skew=0.0), seed)
    return Trace(f"uniform, seed {seed}", trace.requests, trace.models)


GENERATORS: Final[Mapping[str, Callable[[TraceShape, int], Trace]]] = MappingProxyType(
    {"zipf": zipf, "bursty": bursty, "uniform": uniform}
)


def _drawn(ranked: Sequence[str], weights: Sequence[float], chance: random.Random) -> str:
    return ranked[min(bisect(weights, chance.random() * weights[-1]), len(ranked) - 1)]


def _tokens(chance: random.Random) -> int:
    return max(1, int(chance.lognormvariate(5.0, 1.0)))


def _trace(
    name: str, seed: int, requests: Sequence[TraceRequest], models: Sequence[ModelCost]
) -> Trace:
    used = {request.model for request in requests}
    return Trace(
        f"{name}, seed {seed}", requests, {one.model: one for one in models if one.model in used}
    )

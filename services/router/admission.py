"""May a request enter, at what price, and in how many jobs? Pure: counts, snapshots and the clock are arguments.

Second stop of a request in the router, after `routes.py` and `validation.py`; what it decides, `codec.py` makes jobs of and
`dispatch.py` enqueues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import NoCapacity, QueueFull, from_reason
from libs.fleet import FleetSnapshot, WorkerRecord
from libs.queue import LaneGauges, LaneKey, Priority
from services.router.validation import Sizes

DEFAULT_TOKENS_PER_BYTE: Final = 0.3
SPECIAL_TOKENS: Final = 2
"""Put around each sequence by the tokenizers of the bert family, and by most others."""
MAX_JOBS: Final = 250
"""Of one request: they are enqueued by one script call, which takes at most 256 well."""
MIN_JOB_TOKENS: Final = 1024
"""Splitting finer costs more in handling than another worker wins."""
DEFAULT_JOB_TOKENS: Final = 4096
JOBS_PER_WORKER: Final = 2
"""So that a worker prepares the second job while it computes the first."""


@dataclass(frozen=True, slots=True)
class Part:
    """Items `first` to `first + count` of a request, and what they cost in estimated tokens."""

    first: int
    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """What this router has in a lane for those who compete with a request, in tokens: the asking tenant's own, and the sum of the
    weights of all tenants with work there (the asking one included)."""

    own_tokens: int
    active_weight: float


def priority_name(priority: pb.Priority) -> Priority:
    return "bulk" if priority == pb.PRIORITY_BULK else "interactive"


def why_broken(lane: LaneKey, snapshot: FleetSnapshot) -> worker_pb2.Failure | None:
    """Why the pool cannot serve the lane's model or adapter, or None while it may.

    Of an adapter the first worker with the model that could not load it decides, unless it could only not be reached.
    """
    if snapshot.failures.get(lane.model):
        failure = snapshot.verdict(lane.model, lane.pool)
        if failure is not None:
            return failure
    if not lane.adapter:
        return None
    records = [worker.models[lane.model] for worker in snapshot.resident_on(lane.model) if worker.pool == lane.pool]
    if any(lane.adapter in record.adapters for record in records):
        return None
    failures = [record.failed_adapters[lane.adapter] for record in records if lane.adapter in record.failed_adapters]
    return next((failure for failure in failures if failure.reason != NoCapacity.reason), None)


def refuse_broken(lane: LaneKey, snapshot: FleetSnapshot) -> None:
    """Raises ModelNotFound or ModelBroken, as a rule, while it is known that the pool cannot serve the lane (`why_broken`)."""
    failure = why_broken(lane, snapshot)
    if failure is not None:
        raise from_reason(failure.reason, failure.message, field=failure.field, retry_after=failure.retry_after_seconds)


def price(sizes: Sizes, card: models_pb2.ModelCard | None, truncation: pb.Truncation) -> tuple[list[int], int]:
    """Estimated tokens of each item, and of what each job repeats. The worker counts exactly before it packs a batch."""
    rate = (card.tokens_per_byte if card is not None else 0.0) or DEFAULT_TOKENS_PER_BYTE
    most = card.max_tokens if card is not None and truncation != pb.TRUNCATION_NONE else 0
    items = [int(rate * (size + sizes.each)) + SPECIAL_TOKENS for size in sizes.items]
    if most:
        items = [min(tokens, most) for tokens in items]
    return items, int(rate * sizes.once)


def job_target(total: int, lane: LaneKey, snapshot: FleetSnapshot) -> int:
    """Tokens to aim at for one job: small enough that all workers with the model get some, not so small that it costs."""
    workers = [worker for worker in _holders(lane, snapshot) if not worker.draining]
    largest = min((worker.batch_tokens for worker in workers if worker.batch_tokens), default=DEFAULT_JOB_TOKENS)
    spread = -(-total // (max(1, len(workers)) * JOBS_PER_WORKER))
    fewest = -(-2 * total // MAX_JOBS)
    return max(min(max(spread, MIN_JOB_TOKENS), largest), fewest)


def split(costs: Sequence[int], target: int, repeated: int = 0) -> list[Part]:
    """Neighbouring items up to `target` tokens a part; an item beyond it stands alone. `repeated` is added to each part."""
    parts: list[Part] = []
    first, tokens = 0, 0
    for index, cost in enumerate(costs):
        if index > first and tokens + cost > target:
            parts.append(Part(first, index - first, tokens + repeated))
            first, tokens = index, 0
        tokens += cost
    parts.append(Part(first, len(costs) - first, tokens + repeated))
    return parts


def refuse_late(remaining_seconds: float, rate: float, gauges: LaneGauges, load: Load, weight: float) -> None:
    """Raises QueueFull if what is ahead of a request takes longer than its deadline leaves.

    rate: tokens/s of all workers that hold the model; 0 (not measured): nothing is refused. The wait is the smaller of two: for
    all that is queued, and for its tenant's own work at its share of the lane (fair queueing serves a light tenant before a heavy
    one's backlog). The request's own tokens do not count: a rate measured on small batches is far too low for a large one, and
    work that nobody is ahead of may as well begin.
    """
    if rate <= 0:
        return
    everything = gauges.queued_tokens + gauges.leased_tokens
    share = weight / max(load.active_weight, weight)
    wait = min(everything, load.own_tokens / share) / rate
    if wait > remaining_seconds:
        message = (
            f"the lane of {gauges.lane.model} holds {gauges.queued_tokens:,} tokens and works off {rate:,.0f} a second: "
            f"about {wait:.1f} s, later than the deadline in {remaining_seconds:.1f} s"
        )
        raise QueueFull(message, retry_after=min(max(wait - remaining_seconds, 0.1), 60.0))


def lane_rate(lane: LaneKey, snapshot: FleetSnapshot) -> float:
    """Measured tokens/s of the lane's model on all workers of the pool that hold it; 0 as long as one of them has none."""
    rates = [worker.models[lane.model].tokens_per_second for worker in _holders(lane, snapshot)]
    return sum(rates) if all(rate > 0 for rate in rates) else 0.0


def _holders(lane: LaneKey, snapshot: FleetSnapshot) -> list[WorkerRecord]:
    """Workers of the pool with the model resident; only those with the lane's adapter, once one has it."""
    holders = [worker for worker in snapshot.resident_on(lane.model) if worker.pool == lane.pool]
    able = [worker for worker in holders if lane.adapter in worker.models[lane.model].adapters] if lane.adapter else holders
    return able or holders


def request_digest(tenant: str, request_id: str, method: str, body: bytes) -> str:
    """Names a request by who asks, its id and its content: a retry finds its jobs again, and an id that is used again with other
    content does not find them. 32 hex digits."""
    digest = blake2b(digest_size=16)
    for part in (tenant.encode(), request_id.encode(), method.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    digest.update(body)
    return digest.hexdigest()


def job_id(digest: str, part: Part) -> str:
    """The id of one job of the request with that digest."""
    return f"{digest}-{part.first}-{part.count}"


def why_late(lane: LaneKey, snapshot: FleetSnapshot) -> str:
    """What a request waited for when its deadline passed."""
    workers = snapshot.in_pool(lane.pool)
    if not workers:
        return f"the deadline passed, and there was no worker in pool {lane.pool} to serve {lane.model}"
    states = {worker.state(lane.model) for worker in workers}
    if models_pb2.MODEL_STATE_RESIDENT in states:
        loaded = {name for worker in workers if lane.model in worker.models for name in worker.models[lane.model].adapters}
        if lane.adapter and lane.adapter not in loaded:
            return f"the deadline passed before a worker of pool {lane.pool} had loaded {lane.adapter} into {lane.model}"
        return f"the deadline passed before {lane.model} answered"
    if models_pb2.MODEL_STATE_LOADING in states:
        return f"the deadline passed while {lane.model} was being loaded"
    if models_pb2.MODEL_STATE_DOWNLOADING in states:
        return f"the deadline passed while {lane.model} was being downloaded; that goes on"
    return f"the deadline passed before a worker of pool {lane.pool} could load {lane.model}"

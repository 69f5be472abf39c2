"""Pricing, admission control and splitting into jobs. Pure: counts, snapshots and the clock are
arguments.

A request's second step in the router, after `routing/routes.py` and `validation/requests.py`;
`codec.py` makes the jobs of an admitted request and `dispatch.py` enqueues them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import QueueFull, from_reason
from libs.fleet import FleetSnapshot
from libs.queue import LaneKey, Priority
from libs.queue.queue_position import QueuePosition
from services.router.admission.routing.routes import why_broken
from services.router.admission.validation.sizes import Sizes, tokens_per_byte
from services.router.state.throughput import BULK_SHARE, Throughput, holders, wait_seconds

DEFAULT_TOKENS_PER_BYTE: Final = 0.3
"""Workers' measurements are clamped to these, so that no tenant's texts change others' prices much.

By MiniLM's tokenizer English has 0.21, Japanese 0.33, German 0.35, code 0.42, Russian 0.47, base64
0.79, punctuation 1.0. Only text unknown to the tokenizer has less. Only a text of a few letters has
more, which SPECIAL_TOKENS cover.
"""
TRUNCATED_BYTES_PER_TOKEN: Final = 1024
"""Bytes beyond a model's longest sequence that cost one token: they are truncated, but a worker
must read them.
"""
SPECIAL_TOKENS: Final = 2
"""Added to each sequence by the tokenizers of the bert family, and by most others."""
MAX_JOBS: Final = 250
"""Maximum jobs of one request: one script call enqueues them, and it handles up to 256 well."""
JOB_BYTES: Final = 1024 * 1024
"""Bytes of text that a worker reads for one job: lanes alternate tenants by whole jobs."""
JOB_FRAME_BYTES: Final = 512
"""Size of a serialised job without its request: ids, tenant, trace and times."""
COPIED_BYTES: Final = 64 * 1024
"""A request's jobs take at most twice its bytes plus this: fields that its items share are repeated
in each job.
"""
MIN_JOB_TOKENS: Final = 1024
"""Splitting finer costs more overhead than another worker's parallelism saves."""
DEFAULT_JOB_TOKENS: Final = 4096
JOB_SECONDS: Final = 0.15
"""Device time of one job of a slow model: fair queueing switches tenants between jobs, not within
them. It is 1.5 times the limit of workers for a batch of a slow model while they share the device.
"""
MIN_SLOW_MODEL_JOB_TOKENS: Final = 128
"""Jobs of this size are not made smaller for JOB_SECONDS, however slow the model."""
JOBS_PER_WORKER: Final = 2
"""A worker prepares the second job while it computes the first."""
MIN_WORK_SHARE: Final = 0.05
"""If a lane's work exceeds this share of a request's time, the router reads the queue position from
Redis.
"""
PLANNED_TIME_SHARE: Final = 0.8
"""Share of a request's time that admission plans with: speeds are estimates, and a late answer is
wasted work.
"""
MAX_UNKNOWN: Final = 256
MAX_UNKNOWN_OF_TENANT: Final = 32
"""Maximum lanes with work at one router for models that no worker knows: in total, and with work of
one tenant.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """Items `first` to `first + count` of a request, and their cost in estimated tokens."""

    first: int
    count: int
    tokens: int


def priority_name(priority: pb.Priority) -> Priority:
    return "bulk" if priority == pb.PRIORITY_BULK else "interactive"


def refuse_broken(lane: LaneKey, snapshot: FleetSnapshot) -> None:
    """Raise the failure, usually ModelNotFound or ModelBroken, while the pool is known not to serve
    the lane (`why_broken`).
    """
    failure = why_broken(lane, snapshot)
    if failure is not None:
        raise from_reason(
            failure.reason,
            failure.message,
            field=failure.field,
            retry_after=failure.retry_after_seconds,
        )


def price(
    sizes: Sizes, card: models_pb2.ModelCard | None, truncation: pb.Truncation
) -> tuple[list[int], int]:
    """Estimate the tokens of each item, and those that each job repeats. The worker counts exactly
    before it packs a batch.

    1. Truncated bytes cost only their reading. Texts that are divided into chunks or windows are
      not truncated.
    2. Images cost the tokens that the model makes of their size.
    3. Short texts cost the length to which they are padded.
    """
    rate = tokens_per_byte(card, DEFAULT_TOKENS_PER_BYTE)
    is_cut = truncation != pb.TRUNCATION_NONE and not sizes.chunks
    most = card.max_tokens if card is not None and is_cut else 0
    items = [int(rate * (size + sizes.per_sequence_bytes)) + SPECIAL_TOKENS for size in sizes.items]
    for index, chunks in enumerate(sizes.chunks):
        items[index] += (chunks - 1) * (int(rate * sizes.per_sequence_bytes) + SPECIAL_TOKENS)
    per_job_bytes = int(rate * sizes.per_job_bytes)
    filled = card.images.text_tokens if card is not None else 0
    if filled:
        items = [
            max(tokens, filled) if size else tokens
            for tokens, size in zip(items, sizes.items, strict=True)
        ]
        per_job_bytes = max(per_job_bytes, filled * sizes.per_job_texts) if per_job_bytes else 0
    if most:
        items = [_cut(tokens, most, rate) for tokens in items]
        per_job_bytes = _cut(per_job_bytes, most * max(1, sizes.per_job_texts), rate)
    costs = [tokens * sizes.sequences_per_item for tokens in items]
    for index, own in sizes.images.items():
        costs[index] += own.tokens
    return costs, per_job_bytes + sizes.per_job_images.tokens


def price_reading(sizes: Sizes) -> list[int]:
    """Estimate the tokens of each entry of a request that is tokenized without a forward pass."""
    return [SPECIAL_TOKENS + size // TRUNCATED_BYTES_PER_TOKEN for size in sizes.items]


def _cut(tokens: int, most: int, rate: float) -> int:
    """Price a text of a model that takes `most` tokens: truncated tokens cost only their
    reading.
    """
    return (
        tokens
        if tokens <= most
        else most + int((tokens - most) / (rate * TRUNCATED_BYTES_PER_TOKEN))
    )


def job_target(total: int, lane: LaneKey, snapshot: FleetSnapshot) -> int:
    """Return a job's target size in tokens: small enough to spread over all workers with the model,
    yet worth a job's overhead.
    """
    workers = holders(lane, snapshot)
    largest = min(
        (worker.batch_tokens for worker in workers if worker.batch_tokens),
        default=DEFAULT_JOB_TOKENS,
    )
    rates = [
        rate for worker in workers if (rate := worker.models[lane.model].tokens_per_second) > 0
    ]
    while rates and largest > max(MIN_SLOW_MODEL_JOB_TOKENS, min(rates) * JOB_SECONDS):
        largest //= 2  # in steps, so that a retried request is most likely split identically
    spread = -(-total // (max(1, len(workers)) * JOBS_PER_WORKER))
    fewest = -(-2 * total // MAX_JOBS)
    return max(min(max(spread, MIN_JOB_TOKENS), largest), fewest)


def parts(
    costs: Sequence[int], read: Sequence[int], target: int, repeated: int = 0, most: int = MAX_JOBS
) -> list[Part]:
    """Split a request into at most `most` parts of about `target` tokens and, as far as possible,
    JOB_BYTES.

    Args:
        costs: Tokens of each item.
        read: Bytes that a worker reads for each item.
        repeated: Tokens that are added to each part.
    """
    loads = [
        max(cost, -(-size * target // JOB_BYTES)) for cost, size in zip(costs, read, strict=True)
    ]
    total = sum(loads)
    # Two adjacent parts together exceed the target, so the number of parts is at most twice total /
    # target.
    return split(
        costs, max(target, -(-2 * total // (most - 1)) if most > 1 else total), repeated, loads
    )


def max_jobs(size: int, shared: int) -> int:
    """Return the maximum number of jobs for a request of `size` bytes, `shared` of them in each."""
    own = max(0, size - shared)
    return max(1, min(MAX_JOBS, (2 * size + COPIED_BYTES - own) // (shared + JOB_FRAME_BYTES)))


def split(
    costs: Sequence[int], target: int, repeated: int = 0, loads: Sequence[int] | None = None
) -> list[Part]:
    """Group adjacent items into parts of at most `target` by their loads (None: their costs).

    A larger item is a separate part. `repeated` is added to each part's cost.
    """
    found: list[Part] = []
    first, tokens, load = 0, 0, 0
    for index, (cost, weight) in enumerate(
        zip(costs, costs if loads is None else loads, strict=True)
    ):
        if index > first and load + weight > target:
            found.append(Part(first, index - first, tokens + repeated))
            first, tokens, load = index, 0, 0
        tokens += cost
        load += weight
    found.append(Part(first, len(costs) - first, tokens + repeated))
    return found


def may_be_late(seconds: float, throughput: Throughput, tokens: int) -> bool:
    """Return whether a lane with `tokens` may make a request late, so that reading its queue
    position is worth a call to Redis.

    A lane without recent backlog and with less than a batch for each worker does not count: its
    speed may have been measured at a bad time, and work that fits into the next batch does not
    wait.
    """
    is_backlogged = throughput.drain > 0 or tokens > throughput.batch_tokens
    return (
        throughput.is_known
        and is_backlogged
        and throughput.seconds(tokens) > MIN_WORK_SHARE * seconds
    )


def refuse_late(
    remaining_seconds: float,
    most_seconds: float,
    throughput: Throughput,
    position: QueuePosition,
    priority: Priority,
    *,
    own_tokens: int,
    since: int = 0,
    waiting_tokens: int = 0,
) -> None:
    """Raise QueueFull if a request would be answered after its deadline, or wait longer than
    `most_seconds`.

    1. A request with nothing ahead of it is admitted however large it is: a speed measured on small
      batches is far too low for a large one, and the work may as well begin.
    2. Any other request must fit its queueing time and that of its batch into PLANNED_TIME_SHARE of
       its remaining time. In a lane that has been backlogged its own work counts in full, because
       batches are full there.

    The retry delay is the time until the lane is half as full as allowed; `retry_slots.py` spreads
    the retries.

    Args:
        since: Tokens admitted after the queue position was read.
        waiting_tokens: Tokens of the same tenant in the lane.
    """
    wait = (
        wait_seconds(throughput, position, priority, since, waiting_tokens)
        if throughput.is_known
        else 0.0
    )
    if wait <= 0:
        return
    own = throughput.seconds(own_tokens)
    service = max(min(throughput.batch_seconds, wait + own), own if throughput.drain > 0 else 0.0)
    most = most_seconds / (BULK_SHARE if priority == "bulk" else 1)
    allowed = min(remaining_seconds * PLANNED_TIME_SHARE - service, most)
    if wait <= allowed:
        return
    ahead = f"about {wait:.1f} s of work wait before this request"
    if allowed == most:
        message = f"{ahead}; at most {most:.0f} s are allowed"
    else:
        message = (
            f"{ahead}, which takes {service:.1f} s itself:"
            f" too much for its deadline in {remaining_seconds:.1f} s"
        )
    raise QueueFull(message, retry_after=_soon(wait - max(0.0, allowed) / 2))


def refuse_over_quota(tokens: int, waiting: int, most: int, throughput: Throughput) -> None:
    """Raise QueueFull if a tenant's waiting work plus the request's `tokens` exceeds its quota at
    this router.

    A request larger than the quota is admitted when the tenant has no waiting work.
    """
    if most and waiting and waiting + tokens > most:
        message = (
            f"{waiting:,} tokens of this tenant wait at this router; its quota is {most:,},"
            f" and the request has {tokens:,}"
        )
        raise QueueFull(
            message,
            retry_after=_soon(
                throughput.seconds(waiting + tokens - most) if throughput.is_known else 1.0
            ),
        )


def refuse_unknown(lane: LaneKey, tenant: str, opened: Mapping[LaneKey, Collection[str]]) -> None:
    """Raise QueueFull for one more lane of a model that no worker knows, if too many are open.

    Clients can invent any number of models, and each lane costs all routers something.

    Args:
        opened: Such lanes here, with the tenants that have work in them.
    """
    if lane in opened:
        return
    own = sum(tenant in tenants for tenants in opened.values())
    if own >= MAX_UNKNOWN_OF_TENANT or len(opened) >= MAX_UNKNOWN:
        waited = (
            f"{own} such models of this tenant"
            if own >= MAX_UNKNOWN_OF_TENANT
            else f"{len(opened)} such models"
        )
        raise QueueFull(
            f"no worker knows {lane.model} yet, and {waited} have waiting requests already",
            retry_after=2.0,
        )


def queue_full(
    lane: LaneKey, queued: int, most: int, tokens: int, throughput: Throughput
) -> QueueFull:
    """Return the error for a request that would exceed the lane's cap."""
    message = f"the lane of {lane.model} is full: {queued:,} of {most:,} tokens"
    return QueueFull(
        message, retry_after=_soon(throughput.seconds(tokens) if throughput.is_known else 1.0)
    )


def _soon(seconds: float) -> float:
    """Clamp a retry delay to 0.1..60 s."""
    return min(max(seconds, 0.1), 60.0)


def request_digest(tenant: str, request_id: str, method: str, model: str, body: bytes) -> str:
    """Return the idempotency key of a request: 32 hex digits of its tenant, id, method, model and
    content.

    A retry finds its jobs again; reusing an id with other content does not, nor does a retry after
    the alias in the content was moved to another model.
    """
    digest = blake2b(digest_size=16)
    for part in (tenant.encode(), request_id.encode(), method.encode(), model.encode()):
        digest.update(len(part).to_bytes(4, "big") + part)
    digest.update(body)
    return digest.hexdigest()


def job_id(digest: str, part: Part) -> str:
    """Return the id of one job of the request with that digest."""
    return f"{digest}-{part.first}-{part.count}"


def deadline_message(lane: LaneKey, snapshot: FleetSnapshot) -> str:
    """Return the error message for a passed deadline: the step for which the request was
    waiting.
    """
    workers = snapshot.in_pool(lane.pool)
    if not workers:
        return f"the deadline passed: pool {lane.pool} has no worker to serve {lane.model}"
    states = {worker.state(lane.model) for worker in workers}
    if models_pb2.MODEL_STATE_RESIDENT in states:
        loaded = {
            name
            for worker in workers
            if lane.model in worker.models
            for name in worker.models[lane.model].adapters
        }
        if lane.adapter and lane.adapter not in loaded:
            return (
                f"the deadline passed before a worker of pool {lane.pool} had loaded"
                f" {lane.adapter} into {lane.model}"
            )
        return f"the deadline passed before {lane.model} answered"
    if models_pb2.MODEL_STATE_LOADING in states:
        return f"the deadline passed while {lane.model} was being loaded"
    if models_pb2.MODEL_STATE_DOWNLOADING in states:
        return (
            f"the deadline passed while {lane.model} was being downloaded; the download continues"
        )
    return f"the deadline passed before a worker of pool {lane.pool} could load {lane.model}"

"""Split an admitted request into jobs, and name them. Pure.

`lanes/codec.py` makes the jobs of the parts, and `lanes/dispatch.py` enqueues them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from libs.fleet import FleetSnapshot
from libs.queue import LaneKey
from services.router.state.throughput import holders

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


@dataclass(frozen=True, slots=True)
class RequestPart:
    """Items `first` to `first + count` of a request, and their cost in estimated tokens."""

    first: int
    count: int
    tokens: int


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
) -> list[RequestPart]:
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
) -> list[RequestPart]:
    """Group adjacent items into parts of at most `target` by their loads (None: their costs).

    A larger item is a separate part. `repeated` is added to each part's cost.
    """
    found: list[RequestPart] = []
    first, tokens, load = 0, 0, 0
    for index, (cost, weight) in enumerate(
        zip(costs, costs if loads is None else loads, strict=True)
    ):
        if index > first and load + weight > target:
            found.append(RequestPart(first, index - first, tokens + repeated))
            first, tokens, load = index, 0, 0
        tokens += cost
        load += weight
    found.append(RequestPart(first, len(costs) - first, tokens + repeated))
    return found


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


def job_id(digest: str, part: RequestPart) -> str:
    """Return the id of one job of the request with that digest."""
    return f"{digest}-{part.first}-{part.count}"

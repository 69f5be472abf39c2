"""Split the jobs of requests into script calls that occupy Redis for only 1 or 2 milliseconds.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libs.queue.jobs import QueuedJob

CALL_JOBS: Final = 256
CALL_BYTES: Final = 4 << 20
"""Maximum jobs and bytes of one script call."""


def is_large(group: Sequence[QueuedJob]) -> bool:
    """Return whether the jobs do not fit into one call."""
    return len(group) > CALL_JOBS or sum(len(job.payload) for job in group) > CALL_BYTES


def batched(groups: Sequence[Sequence[QueuedJob]]) -> list[list[int]]:
    """Batch the groups that are not large, in order, into calls within the limits. Returns their
    indices.
    """
    calls: list[list[int]] = []
    jobs, size = CALL_JOBS + 1, 0
    for index, group in enumerate(groups):
        if is_large(group):
            continue
        jobs += len(group)
        size += sum(len(job.payload) for job in group)
        if jobs > CALL_JOBS or size > CALL_BYTES:
            calls.append([])
            jobs, size = len(group), sum(len(job.payload) for job in group)
        calls[-1].append(index)
    return calls


def split_jobs(jobs: Sequence[QueuedJob]) -> list[Sequence[QueuedJob]]:
    """Split the jobs, in order, into chunks within the limits of one call. A single job above them
    is a separate chunk.
    """
    chunks: list[Sequence[QueuedJob]] = []
    start, size = 0, 0
    for position, job in enumerate(jobs):
        if position > start and (
            position - start == CALL_JOBS or size + len(job.payload) > CALL_BYTES
        ):
            chunks.append(jobs[start:position])
            start, size = position, 0
        size += len(job.payload)
    return [*chunks, jobs[start:]]

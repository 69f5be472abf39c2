"""The record of a submitted job, and its form for clients. Pure."""

from __future__ import annotations

import math
import re
from typing import Any, Final, Literal

import msgspec

Status = Literal["queued", "running", "paused", "failed", "expired", "cancelled", "completed"]
STOPPED: Final[frozenset[Status]] = frozenset(
    ("paused", "failed", "expired", "cancelled", "completed")
)
FINAL: Final[frozenset[Status]] = frozenset(("cancelled", "completed"))
JOB_ID: Final = re.compile(r"job_[0-9a-f]{8}[0-9a-f]{32}")
JOB_PREFIX: Final = "job_"


class JobCounts(msgspec.Struct):
    """Numbers of rows, tokens and parts, and the size of the parts. `total_rows` is null until it
    is known.
    """

    rows: int = 0
    failed_rows: int = 0
    total_rows: int | None = None
    tokens: int = 0
    parts: int = 0
    bytes: int = 0


class JobRecord(msgspec.Struct, kw_only=True):
    """A submitted job.

    Attributes:
        recipe: The recipe, as the manifest has it.
        limits: The limits, as the manifest has them.
        tenant: The tenant that the caller named; empty if its credential has only one.
        identified: The tenant, as the router identified it.
        needs_token: Whether the caller sent a token.
        retry: Whether the failed rows of a completed job are sent again.
        error: Why the job is in its state; empty if it has no reason.
        progress: Rates and estimates, as the manifest has them.
        cost: The cost by pool, of pools with a price.
        faults: The number of times that its process was started without an orderly end or a further
            row, with the present time: an edge that dies with the process cannot count it later.
        changes: The number of times that it has stopped or was run again.
    """

    id: str
    created_at: int
    recipe: dict[str, Any]
    input: str
    output: str
    limits: dict[str, Any]
    tenant: str = ""
    identified: str = ""
    needs_token: bool = False
    retry: bool = False
    traceparent: str = ""
    status: Status = "queued"
    error: str = ""
    started_at: int = 0
    ended_at: int = 0
    updated_at: float = 0.0
    counts: JobCounts = msgspec.field(default_factory=JobCounts)
    progress: dict[str, float] = msgspec.field(default_factory=dict)
    cost: dict[str, float] = msgspec.field(default_factory=dict)
    embedding_id: str = ""
    revision: str = ""
    faults: int = 0
    changes: int = 0

    @property
    def is_ended(self) -> bool:
        """Return whether no edge runs the job until a client resumes it."""
        return self.status in STOPPED

    @property
    def expires_at(self) -> float:
        return float(self.limits.get("deadline") or math.inf)

    @property
    def rows_left(self) -> int:
        """The number of rows without a part, as far as it is known."""
        return max(0, (self.counts.total_rows or 0) - self.counts.rows)

    def to_client(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "job",
            "status": self.status,
            "error": self.error or None,
            "recipe": self.recipe,
            "input": self.input,
            "output": self.output,
            "limits": {name: value for name, value in self.limits.items() if name != "prices"},
            "created_at": self.created_at,
            "started_at": self.started_at or None,
            "ended_at": self.ended_at or None,
            "counts": self.counts,
            "progress": self.progress,
            "cost": self.cost,
            "embedding_id": self.embedding_id or None,
            "revision": self.revision or None,
        }

"""The record of a job, `manifest.json`, next to its parts.

The manifest is the truth about a job: its recipe, the input's version, the committed parts with
their digests, and its state. It is replaced atomically, before the first part, every few seconds,
and at each change of the state. Parts that were committed after the last manifest are recognised
by their names (`Manifest.adopt`).
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from shoal.bulk.failures import JobError
from shoal.bulk.places import OutputPlace
from shoal.bulk.spec import (
    FORMAT,
    BulkLimits,
    BulkRecipe,
    InputVersion,
    input_from,
    part_name,
    recipe_from,
)

MANIFEST: Final = "manifest.json"
CONTROL: Final = "control.json"
"""A request of another process to the one that runs the job."""

MAX_SILENT_SECONDS: Final = 120.0
"""The age of the manifest of a running job where locks do not show whether it runs."""

State = Literal["running", "paused", "completed", "failed", "cancelled", "expired"]
_PART: Final = re.compile(r"part-(\d{8,})-[0-9a-f]{16}(?:\.r(\d+))?\.(?:parquet|jsonl)")


@dataclass(frozen=True, slots=True)
class CommittedPart:
    """A committed part.

    Attributes:
        rows: Number of input rows.
        failed: Number of them with an error.
        truncated: Number of rows with a text that was cut; of a retry, those that it sent.
        size: Number of bytes.
        attempt: 0, or the number of the retry of failed rows that wrote it.
    """

    chunk: int
    name: str
    rows: int
    failed: int
    tokens: int
    truncated: int
    sha256: str
    size: int
    attempt: int = 0


@dataclass(slots=True)
class Manifest:
    """The record of a job.

    Attributes:
        embedding_id: What identifies the vectors of all parts; empty without vectors.
        revision: The model's revision in the first answer.
        schema: The Arrow schema of the parts.
        total: Number of input rows; None if it is not known yet.
        error: Why the job is in its state; empty if it has no reason.
        active_seconds: Time in which the job ran.
        progress: Rates and the estimate of the process that runs the job.
        cost: The cost by pool, of pools with a price.
    """

    job: str
    recipe: BulkRecipe
    input: InputVersion
    limits: BulkLimits
    state: State = "running"
    embedding_id: str = ""
    revision: str = ""
    schema: bytes = b""
    total: int | None = None
    parts: dict[int, CommittedPart] = field(default_factory=dict)
    error: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    active_seconds: float = 0.0
    progress: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    rows: int = 0
    failed: int = 0
    tokens: int = 0
    truncated: int = 0
    size: int = 0

    def add(self, part: CommittedPart) -> None:
        """Record a part; it replaces an earlier one of its chunk."""
        old = self.parts.get(part.chunk)
        if old is not None:
            self.rows, self.failed = self.rows - old.rows, self.failed - old.failed
            self.size -= old.size
        self.parts[part.chunk] = part
        self.rows, self.failed = self.rows + part.rows, self.failed + part.failed
        self.size += part.size
        self.tokens += part.tokens
        self.truncated += part.truncated

    def chunk_part_name(self, chunk: int, rows: int, attempt: int = 0) -> str:
        """Return the name of a chunk's part."""
        return part_name(self.recipe, self.input, chunk, rows, attempt)

    def adopt(
        self, place: OutputPlace, read: Callable[[str, bytes], CommittedPart | None]
    ) -> list[str]:
        """Record parts that were committed after the manifest was written.

        Returns:
            The names of parts that a retry has replaced, to be deleted once the manifest is saved.

        Args:
            read: Return the part of a name and its content; None if it is not one of this job.
        """
        replaced: list[str] = []
        for name in place.names():
            match = _PART.fullmatch(name)
            if match is None:
                continue
            chunk, attempt = int(match[1]), int(match[2] or 0)
            known = self.parts.get(chunk)
            if known is not None and known.name == name:
                continue
            if known is not None and attempt < known.attempt:
                replaced.append(name)
                continue
            part = read(name, place.read(name) or b"")
            if part is None or name != self.chunk_part_name(chunk, part.rows, attempt):
                raise JobError(
                    f"{place.full_path(name)} is not a part of this job; choose another output, or "
                    "delete it"
                )
            self.add(part)
            if known is not None:
                replaced.append(known.name)
        return replaced

    def save(self, place: OutputPlace) -> None:
        """Replace the manifest in the output location. Raises StorageError."""
        place.replace(MANIFEST, self.encoded())

    def encoded(self) -> bytes:
        """Return the content of the file, with the time of this call."""
        self.updated_at = time.time()
        return json.dumps(self.to_json()).encode()

    def is_interrupted(self, place: OutputPlace) -> bool:
        """Return True if the job is said to run and no process runs it."""
        if self.state != "running":
            return False
        locked = place.is_locked()
        silent = time.time() - self.updated_at > MAX_SILENT_SECONDS
        return silent if locked is None else not locked

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON values."""
        return {
            "version": FORMAT,
            "job": self.job,
            "state": self.state,
            "error": self.error,
            "recipe": asdict(self.recipe),
            "input": asdict(self.input),
            "limits": asdict(self.limits),
            "embedding_id": self.embedding_id,
            "revision": self.revision,
            "counts": {
                "total_rows": self.total,
                "rows": self.rows,
                "failed_rows": self.failed,
                "tokens": self.tokens,
                "truncated_rows": self.truncated,
                "parts": len(self.parts),
                "bytes": self.size,
            },
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "active_seconds": round(self.active_seconds, 3),
            "progress": self.progress,
            "cost": self.cost,
            "schema": base64.b64encode(self.schema).decode(),
            "parts": [asdict(part) for _, part in sorted(self.parts.items())],
        }


def load(place: OutputPlace) -> Manifest | None:
    """Return the manifest of an output location; None without a job. Raises JobError."""
    data = place.read(MANIFEST)
    if data is None:
        return None
    try:
        values = json.loads(data)
        if values["version"] != FORMAT:
            raise JobError(
                f"{place.full_path(MANIFEST)} has version {values['version']}; this shoal reads "
                f"version {FORMAT}"
            )
        return _from_json(values)
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"{place.full_path(MANIFEST)} is not a manifest of a job: {error}"
        ) from error


def _from_json(values: Mapping[str, Any]) -> Manifest:
    found = Manifest(
        values["job"],
        recipe_from(values["recipe"]),
        input_from(values["input"]),
        BulkLimits(**values["limits"]),
        values["state"],
        values["embedding_id"],
        values["revision"],
        base64.b64decode(values["schema"]),
        values["counts"]["total_rows"],
        error=values["error"],
        created_at=values["created_at"],
        updated_at=values["updated_at"],
        active_seconds=values["active_seconds"],
        progress=values["progress"],
        cost=values["cost"],
    )
    for saved in values["parts"]:
        part = CommittedPart(**saved)
        match = _PART.fullmatch(part.name)
        if match is None or int(match[1]) != part.chunk:
            raise ValueError(f"{part.name[:100]!r} is not the name of part {part.chunk}")
        found.add(part)
    found.tokens = values["counts"]["tokens"]
    found.truncated = values["counts"]["truncated_rows"]
    return found

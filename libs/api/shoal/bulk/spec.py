"""The description of a bulk job: its input, verb, model and limits. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from shoal.bulk.failures import JobError
from shoal.schema import Schema
from shoal.tasks import Chunking, Classify, Entities, ReadText, Relations, Task

Verb = Literal["encode", "score", "extract"]
VERBS: Final = ("encode", "score", "extract")
FORMAT: Final = 3
"""The version of manifests and of the names of parts."""
DEFAULT_CHUNK_ROWS: Final = 1024
MAX_CHUNK_ROWS: Final = 1 << 20
_TASKS: Final[Mapping[str, type[Any]]] = {
    "entities": Entities,
    "classify": Classify,
    "relations": Relations,
    "generate": ReadText,
}


@dataclass(frozen=True, slots=True)
class BulkRecipe:
    """Everything that decides the content of the output, except the input and the model's files.

    Attributes:
        options: Keyword arguments of the client's verb, as JSON.
        task: The task of `extract`: its fields as JSON, and its `kind`.
        text: The column with the texts; of `score`, with the documents.
        keep: Further columns, which are copied to the output.
        query: The query of all documents of `score`; empty if `query_column` names a column.
    """

    verb: Verb
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    text: str = "text"
    keep: tuple[str, ...] = ()
    query: str = ""
    query_column: str = ""
    chunk_rows: int = DEFAULT_CHUNK_ROWS

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise JobError(f"the verb is {self.verb!r}; it must be one of {', '.join(VERBS)}")
        if not 1 <= self.chunk_rows <= MAX_CHUNK_ROWS:
            raise JobError(
                f"a chunk must have 1 to {MAX_CHUNK_ROWS:,} rows, not {self.chunk_rows:,}"
            )
        if self.verb == "score" and bool(self.query) == bool(self.query_column):
            raise JobError("score needs a query, or a column with the query of each row")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read, each once."""
        named = (self.text, self.query_column, *self.keep)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def suffix(self) -> str:
        """The suffix of parts."""
        return ".jsonl" if self.verb == "extract" else ".parquet"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the client's verb."""
        arguments = dict(self.options)
        if arguments.get("chunking"):
            arguments["chunking"] = Chunking(**arguments["chunking"])
        return arguments

    def extract_task(self) -> Task:
        """Return the task of `extract`."""
        values = dict(self.task)
        kind = values.pop("kind", "")
        if kind == "structure":
            return Schema.from_json(json.dumps(values["schema"]))
        if kind not in _TASKS:
            raise JobError(f"the task is {kind!r}; it must be one of {', '.join(_TASKS)}")
        task: Task = _TASKS[kind](**values)
        return task

    def digest(self) -> str:
        """Return a digest that is different for recipes with different output."""
        return _digest({"format": FORMAT, **asdict(self)})


@dataclass(frozen=True, slots=True)
class InputFile:
    """The state of a file, by which a change is noticed.

    Attributes:
        tag: The ETag or generation of an object, or the time of the last modification.
    """

    uri: str
    size: int
    tag: str


@dataclass(frozen=True, slots=True)
class InputVersion:
    """The input of a job when it began.

    Attributes:
        uri: A file, a pattern, or a folder.
        size: The size of all files.
        tag: The tag of a single file, or a digest of all files.
        files: The files, in the order of their rows.
    """

    uri: str
    size: int
    tag: str
    files: tuple[InputFile, ...]


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """The limits of a job, which may be changed when it is resumed.

    Attributes:
        in_flight: Maximum number of chunks in flight.
        failed_share: Share of failed rows at which the job stops, 0..1.
        deadline: Seconds since the epoch at which the job stops; 0 for none.
        patience: Seconds without any answered chunk after which the job stops.
        prices: The price of a worker for an hour, by pool, in any currency.
        output_bytes: Size of all parts at which the job stops; 0 for none.
    """

    in_flight: int = 8
    failed_share: float = 0.1
    deadline: float = 0.0
    patience: float = 900.0
    prices: Mapping[str, float] = field(default_factory=dict)
    output_bytes: int = 0

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise JobError(f"at least 1 chunk must be in flight, not {self.in_flight}")
        if not 0 <= self.failed_share <= 1:
            raise JobError(f"the share of failed rows must be 0 to 1, not {self.failed_share:g}")
        if not self.patience > 0:
            raise JobError(f"the patience must be above 0 seconds, not {self.patience:g}")


def part_name(
    recipe: BulkRecipe, version: InputVersion, number: int, rows: int, attempt: int
) -> str:
    """Return the name of a chunk's part: its number, so that names sort in input order, a digest
    of all that decides its content, and the number of an attempt after the first.
    """
    first = number * recipe.chunk_rows
    source = [version.uri, version.size, version.tag]
    digest = _digest([source, recipe.digest(), first, rows])[:16]
    again = f".r{attempt}" if attempt else ""
    return f"part-{number:08}-{digest}{again}{recipe.suffix}"


def recipe_from(values: Mapping[str, Any]) -> BulkRecipe:
    """Return the recipe of a manifest. Raises JobError if it has unknown fields."""
    unknown = sorted(set(values) - {one.name for one in fields(BulkRecipe)})
    if unknown:
        raise JobError(f"the manifest has unknown fields: {', '.join(unknown)}; update shoal")
    return BulkRecipe(**{**values, "keep": tuple(values.get("keep", ()))})


def input_from(values: Mapping[str, Any]) -> InputVersion:
    """Return the input of a manifest."""
    files = tuple(InputFile(**file) for file in values["files"])
    return InputVersion(**{**values, "files": files})


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

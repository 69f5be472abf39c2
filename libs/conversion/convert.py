"""Convert the files of a checkpoint directory, verify the results, and record them. Blocks; the
caller holds the model's lock.

A result is written as `<name>.part`, read again and compared with the child's report, and renamed.
`.shoal.conversion.json` next to the results lists finished conversions, so that an interrupted
conversion continues with the next file.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Final

from libs.catalog.checkpoint.files import locate, tensor_entries
from libs.conversion.plan import VERSION, VOCABULARY_FILES, ConversionStep, index_path
from libs.conversion.process import run
from libs.errors import ModelBroken, NoCapacity

RECORD: Final = ".shoal.conversion.json"
MAX_VOCABULARY_BYTES: Final = 64 << 20
"""Maximum size of the vocabulary of a folder with the files that describe it; the largest published
one has 17 MB.
"""

OnProgress = Callable[[str, int, int], None]
"""Called with the file that is converted, the bytes written, and those of its whole output."""


@dataclass(frozen=True, slots=True)
class ConversionRecord:
    """The record of one conversion.

    Attributes:
        left_out: Entries that are not tensors.
        tied: Names that are not written, each with its equal.
        converter: Version of our rules and of the library.
    """

    source: str
    source_bytes: int
    source_sha256: str
    output: str
    output_bytes: int
    output_sha256: str
    tensors: int
    left_out: Sequence[str]
    tied: Mapping[str, str]
    converter: str


def convert(
    root: Path, into: Path, steps: Sequence[ConversionStep], on_progress: OnProgress
) -> tuple[ConversionRecord, ...]:
    """Write the outputs of all steps to the directory `into`; sources are files of the checkpoint
    `root`, which may be `into`.

    Raises ModelBroken naming the file that is refused, and NoCapacity where a retry may help.
    """
    into.mkdir(parents=True, exist_ok=True)
    done = {one.output: one for one in read_record(into)}
    for step in steps:
        path = locate(root, step.source)
        if path is None:
            raise ModelBroken(f"{step.source}: missing from {root}")
        before = done.get(step.output)
        if before is None or not _is_same(before, path, into):
            done[step.output] = _convert(step, path, into, on_progress)
            _write_record(into, done.values())
    _write_indexes(into, steps)
    return tuple(done[step.output] for step in steps)


def read_record(directory: Path) -> tuple[ConversionRecord, ...]:
    """Return the conversions with results in a directory; empty if it has none, or if a crash cut
    the record short.
    """
    try:
        entries = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        return tuple(ConversionRecord(**entry) for entry in entries)
    except (OSError, ValueError, TypeError):
        return ()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_same(before: ConversionRecord, source: Path, into: Path) -> bool:
    """Return True if a result of a source of the same size exists; the caller's listing stands for
    the same content.
    """
    output = into / before.output
    return (
        output.is_file()
        and output.stat().st_size == before.output_bytes
        and source.stat().st_size == before.source_bytes
    )


def _convert(
    step: ConversionStep, path: Path, into: Path, on_progress: OnProgress
) -> ConversionRecord:
    output = into / step.output
    part = output.with_name(f"{output.name}.part")
    output.parent.mkdir(parents=True, exist_ok=True)
    part.unlink(missing_ok=True)
    try:
        with _opened(step, path) as source, part.open("xb") as file:
            report = run(
                step.kind,
                step.source,
                source,
                file,
                lambda done, total: on_progress(step.source, done, total),
            )
        converted = _verified(step, path, into, part, report)
        part.rename(output)
    except OSError as error:
        raise NoCapacity(
            f"{step.source}: cannot be converted on this machine's disk: {error.strerror}"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    _sync(output.parent)
    return converted


@contextmanager
def _opened(step: ConversionStep, path: Path) -> Iterator[BinaryIO]:
    """Yield the file that the child reads: the source, or a bundle of all files that decide about a
    tokenizer, as JSON of base64.
    """
    if step.kind != "tokenizer":
        with path.open("rb") as source:
            yield source
        return
    files = {
        name: path.with_name(name) for name in VOCABULARY_FILES if path.with_name(name).is_file()
    }
    total = sum(file.stat().st_size for file in files.values())
    if total > MAX_VOCABULARY_BYTES:
        raise ModelBroken(
            f"{step.source}: with its side files {total:,} bytes; at most "
            f"{MAX_VOCABULARY_BYTES:,} are converted"
        )
    with TemporaryFile() as bundle:
        bundle.write(
            json.dumps(
                {name: b64encode(file.read_bytes()).decode() for name, file in files.items()}
            ).encode()
        )
        bundle.seek(0)
        yield bundle


def _verified(
    step: ConversionStep, source: Path, into: Path, part: Path, report: Mapping[str, object]
) -> ConversionRecord:
    """Return the record of a result that was read again: its digest, and its header with every
    tensor in place. Raises ModelBroken.
    """
    match report:
        case {
            "tensors": int(tensors),
            "sha256": str(digest),
            "library": str(library),
            "left_out": list(left_out),
            "tied": dict(tied),
        }:
            found = file_sha256(part)
            entries = tensor_entries(into, str(part.relative_to(into)))
            if found != digest or len(entries) != tensors:
                raise ModelBroken(
                    f"{step.source}: its conversion was not written as it was computed: the disk "
                    "may be faulty"
                )
            return ConversionRecord(
                source=step.source,
                source_bytes=source.stat().st_size,
                source_sha256=file_sha256(source),
                output=step.output,
                output_bytes=part.stat().st_size,
                output_sha256=digest,
                tensors=tensors,
                left_out=[str(name) for name in left_out],
                tied={str(name): str(equal) for name, equal in tied.items()},
                converter=f"shoal {VERSION}, {library}",
            )
        case {"sha256": str(digest), "tokenizers": str(library), **counts}:
            if file_sha256(part) != digest:
                raise ModelBroken(
                    f"{step.source}: its conversion was not written as it was computed: the disk "
                    "may be faulty"
                )
            return ConversionRecord(
                source=step.source,
                source_bytes=source.stat().st_size,
                source_sha256=file_sha256(source),
                output=step.output,
                output_bytes=part.stat().st_size,
                output_sha256=digest,
                tensors=0,
                left_out=[],
                tied={},
                converter=f"shoal {VERSION}, tokenizers {library}, "
                + ", ".join(f"{count} {name}" for name, count in counts.items()),
            )
    raise ModelBroken(f"{step.source}: the report of its conversion cannot be read")


def _write_indexes(into: Path, steps: Sequence[ConversionStep]) -> None:
    """Write model.safetensors.index.json for each folder with sharded weights. Raises ModelBroken
    for a tensor in two shards.
    """
    maps: dict[str, dict[str, str]] = {}
    for step in steps:
        index = index_path(step)
        if not index:
            continue
        places = maps.setdefault(index, {})
        for tensor in tensor_entries(into, step.output):
            if tensor in places:
                raise ModelBroken(
                    f"{step.source}: has the tensor {tensor[:200]!r}, which is in another shard too"
                )
            places[tensor] = Path(step.output).name
    for index, places in maps.items():
        _write(into / index, json.dumps({"metadata": {}, "weight_map": places}, indent=1))


def _write_record(into: Path, done: Iterable[ConversionRecord]) -> None:
    _write(into / RECORD, json.dumps([asdict(one) for one in done], indent=1))


def _write(path: Path, text: str) -> None:
    """Write a file by one atomic rename."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

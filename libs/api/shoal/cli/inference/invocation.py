"""One run of an inference command: read its texts, show progress, time the call, and report skipped
items.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import typer

from shoal.cli.console import bar, counted, note
from shoal.cli.inference import outputs, parquet
from shoal.cli.inference.arguments import LineFiles, VectorFiles
from shoal.cli.inference.files import DOCUMENTS, IMAGES, SUFFIXES, TextRecord, page_range
from shoal.cli.inference.inputs import located, read
from shoal.errors import ModelChanged, ShoalError
from shoal.options import ItemOptions
from shoal.requests.merging import merged_embedding_id
from shoal.results import EncodeResult, ExtractResult, ScoreResult, Skipped
from shoal.tasks import Document

Result = EncodeResult | ScoreResult | ExtractResult
R = TypeVar("R", EncodeResult, ScoreResult, ExtractResult)
Lines = Callable[[R, Sequence[TextRecord]], Iterable[outputs.Row]]
Write = Callable[[R, Sequence[TextRecord]], None]
STREAMED: Final = (*outputs.JSON_LINES, parquet.SUFFIX)
"""Suffixes of files to which results are written as they arrive."""
_MAX_SKIPPED_LINES = 10
_NOTHING: Final[Mapping[str, Sequence[object]]] = MappingProxyType({})
FIRST_PART_ITEMS: Final = 128
MAX_PART_ITEMS: Final = 2048
"""Items of one call of the client while a .jsonl file is written: as many as it has in flight at a
time.
"""
INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as of shells: 128 and the number of the signal."""


class Invocation:
    """The texts of a command and what happens to its results: written to `output`, printed as JSON,
    or shown as a table.

    Raises InputError for files that cannot be read, BadParameter for options that do not fit
    together. `argument`: the name of the texts' argument in messages.
    """

    def __init__(
        self,
        model: str,
        texts: Sequence[str] | None,
        files: LineFiles,
        serving: ItemOptions,
        as_json: bool,
        *,
        argument: str = "TEXT",
    ) -> None:
        outputs.check(files.output, *files.suffixes)
        self.model, self.as_json = model, as_json
        self.output: Path | None = files.output
        records = read(
            texts,
            files.source,
            files.selection(serving.get("on_invalid", "raise")),
            argument=argument,
        )
        if files.image and files.document:
            raise typer.BadParameter("--image and --document exclude each other: name one")
        if files.pages and not files.document:
            raise typer.BadParameter("--pages selects pages of documents: add --document")
        pages = page_range(files.pages) if files.pages else (0, 0)
        if files.image or files.document:
            records = [
                replace(record, is_image=files.image, is_document=files.document, pages=pages)
                for record in records
            ]
        else:
            _note_names_of_files(texts or (), files)
        self.records = records
        self._resume = files.resume
        if self._resume and (
            self.output is None or self.output.suffix not in outputs.JSON_LINES or as_json
        ):
            raise typer.BadParameter(
                "--resume continues a file of lines: add --output FILE.jsonl, without --json"
            )
        self._seconds = 0.0

    @property
    def items(self) -> list[str | Path | Document]:
        return [record.item for record in self.records]

    @contextmanager
    def sending(
        self,
        name: str,
        description: str,
        advice: str = "with --output FILE.jsonl, results are written as they arrive",
    ) -> Iterator[Callable[[int, int], None] | None]:
        """Surround the call: yield `on_progress`, measure the time, and add the source of a text to
        an error about `name[i]`.

        Ctrl-C ends the command with a line about the results that were kept, and `advice`.
        """
        started = time.monotonic()
        try:
            with located(self.records, name), bar(description, len(self.records)) as on_progress:
                yield on_progress
        except KeyboardInterrupt:
            note(f"interrupted: nothing was kept; {advice}")
            raise typer.Exit(INTERRUPTED) from None
        self._seconds = time.monotonic() - started

    def ask(
        self,
        name: str,
        description: str,
        ask: Callable[..., R],
        lines: Lines[R],
        each: Mapping[str, Sequence[object]] = _NOTHING,
        *,
        max_part: int = MAX_PART_ITEMS,
    ) -> R | None:
        """Call `ask(items, on_progress=…)` and return its result, or write the results of a .jsonl
        or .parquet file as they arrive.

        Args:
            name: The name of the items in requests, for errors.
            description: The text of the progress bar.
            ask: The client's verb with all other arguments.
            lines: Return the lines of a file for a result and its records.
            each: Further arguments of `ask` with an entry for each item.
            max_part: Maximum items of one call while a file of lines is written.

        Returns:
            The result, or None if it was written and reported.
        """
        if self.as_json or self.output is None or self.output.suffix not in STREAMED:
            with self.sending(name, description) as on_progress:
                return ask(self.items, on_progress=on_progress, **each)
        self._stream(self.output, name, description, ask, lines, each, max_part)
        return None

    def _stream(
        self,
        output: Path,
        name: str,
        description: str,
        ask: Callable[..., R],
        lines: Lines[R],
        each: Mapping[str, Sequence[object]],
        max_part: int,
    ) -> None:
        started, total = time.monotonic(), len(self.records)
        begin = first = outputs.lines_before(output, self.records) if self._resume else 0
        skipped: list[Skipped] = []
        tokens, cut, revision, embedding_id = 0, 0, "", ""
        ids: list[str] = []
        write: Write[R] | None = None
        try:
            with bar(description, total) as on_progress, ExitStack() as opened:
                for part in _parts(first, total, max_part):
                    records, progress = (
                        self.records[part],
                        on_progress and partial(_advance, on_progress, part.start, total),
                    )
                    sliced = {argument: values[part] for argument, values in each.items() if values}
                    with located(records, name):
                        result = ask(
                            [record.item for record in records], on_progress=progress, **sliced
                        )
                    if write is None:
                        write = opened.enter_context(self._writing(output, lines, first))
                    revision = revision or result.revision
                    if result.revision not in ("", revision):
                        raise ModelChanged(
                            f"the model changed from revision {revision} to {result.revision} "
                            "between two answers"
                        )
                    if isinstance(result, EncodeResult) and result.embedding_id:
                        ids.append(result.embedding_id)
                    embedding_id = merged_embedding_id(ids)
                    result = _explained(result, records)
                    write(result, records)
                    skipped += [
                        replace(one, index=part.start + one.index) for one in result.skipped
                    ]
                    tokens, begin = tokens + result.usage.input_tokens, part.stop
                    cut += result.usage.truncated_items
        except (KeyboardInterrupt, ShoalError, OSError) as error:
            kept = f"{begin:,} of {counted(total, self._kind)} are in {output}"
            has_lines = output.suffix in outputs.JSON_LINES
            if has_lines and isinstance(error, OSError):  # The last part may be there in part.
                advice = f"--resume continues after the lines that are in {output}"
            elif has_lines and begin:
                advice = f"{kept}; --resume continues after them"
            else:
                advice = f"nothing was written to {output}"
            if isinstance(error, KeyboardInterrupt):
                note(f"interrupted: {advice}")
                raise typer.Exit(INTERRUPTED) from None
            error.add_note(advice)
            raise
        self._seconds = time.monotonic() - started
        self._note_skipped(skipped)
        _note_truncated(cut)
        self._note_written(total - first - len(skipped), tokens)
        if embedding_id:
            note(f"embedding id {embedding_id}")
        if first:
            note(f"{counted(first, self._kind)} before them were already in the file")

    @contextmanager
    def _writing(self, output: Path, lines: Lines[R], first: int) -> Iterator[Write[R]]:
        """Yield a function that writes a result and its records, in the format of the file's
        suffix; to lines after the first `first`.
        """
        if output.suffix == parquet.SUFFIX:
            with (
                outputs.name_errors(output),
                parquet.writing(output, self.model, self.records) as write,
            ):
                encoded: Any = write  # of EncodeResult; other commands write lines alone
                yield encoded
            return
        with outputs.name_errors(output), output.open("ab" if first else "wb") as file:
            yield lambda result, records: outputs.append_lines(file, lines(result, records))

    def report_skipped(self, result: R) -> R:
        """Print to stderr which texts were skipped, the first of them with the reason.

        Returns the result, in which a line without a text has the problem of the line as its
        reason.
        """
        result = _explained(result, self.records)
        self._note_skipped(result.skipped)
        _note_truncated(result.usage.truncated_items, is_query=result.usage.truncated_query)
        return result

    def _note_skipped(self, skipped: Sequence[Skipped]) -> None:
        if skipped:
            note(
                f"skipped {len(skipped):,} of {counted(len(self.records), self._kind)}, which have "
                "no result:"
            )
        for one in skipped[:_MAX_SKIPPED_LINES]:
            where = self.records[one.index].where
            note(
                "  "
                f"{one.message if one.message.startswith(where) else f'{where}: {one.message}'} "
                f"[{one.reason}]"
            )
        if len(skipped) > _MAX_SKIPPED_LINES:
            note(f"  … {len(skipped) - _MAX_SKIPPED_LINES:,} more")

    def report_written(self, result: Result) -> None:
        """Print a summary to stderr, after the results were written to `output`."""
        self._note_written(len(self.records) - len(result.skipped), result.usage.input_tokens)
        if isinstance(result, EncodeResult) and result.embedding_id:
            note(f"embedding id {result.embedding_id}")

    @property
    def _kind(self) -> str:
        """The noun for the inputs in messages."""
        kinds = {record.kind for record in self.records}
        return kinds.pop() if len(kinds) == 1 else "input"

    def _note_written(self, inputs: int, tokens: int) -> None:
        rate = tokens / max(self._seconds, 1e-9)
        note(
            f"{counted(inputs, self._kind)}, {counted(tokens, 'token')} in {self._seconds:.2f} s "
            f"({rate:,.0f} tokens/s)"
            f" by {self.model} -> {self.output}"
        )

    def metadata(self, result: Result) -> dict[str, object]:
        """Return the JSON members that every command adds to its results."""
        usage = {
            name: count
            for name, count in asdict(result.usage).items()
            if count or name == "input_tokens"
        }
        found = {
            "model": self.model,
            "revision": result.revision,
            "usage": usage,
            "timings": asdict(result.timings),
        }
        if isinstance(result, EncodeResult) and result.embedding_id:
            found["embedding_id"] = result.embedding_id
        if result.alias is not None:
            found["alias"] = asdict(result.alias)
        return found | (
            {"skipped": [asdict(skipped) for skipped in result.skipped]} if result.skipped else {}
        )

    def heading(self, result: Result) -> str:
        """Return the title of a table of results."""
        return (
            f"{self.model}  {counted(result.usage.input_tokens, 'token')}, "
            f"{result.timings.total_seconds * 1000:.1f} ms"
        )


def _note_names_of_files(texts: Sequence[str], files: LineFiles) -> None:
    """Print to stderr if an argument that is sent as a text is the name of a file."""
    for text in texts:
        suffix = os.path.splitext(text)[1].lower()
        if not suffix or not os.path.isfile(text):
            continue
        if suffix in SUFFIXES:
            option = "--input"
        elif suffix in IMAGES:
            option = "--image"
        elif suffix in DOCUMENTS and isinstance(files, VectorFiles):
            option = "--document"
        else:
            continue
        note(f"{text} is sent as a text, and is also the name of a file: {option} reads the file")


def _note_truncated(texts: int, *, is_query: bool = False) -> None:
    """Print to stderr how many texts were cut, and whether the query was."""
    if texts:
        note(f"cut {counted(texts, 'text')} with more tokens than the model takes")
    if is_query:
        note("the query, or a label, had more tokens than the model takes and was cut")


def _parts(first: int, total: int, max_part: int) -> Iterator[slice]:
    """Slices of records that are asked for together: small ones at first, so that the file begins
    to grow soon.
    """
    size = min(FIRST_PART_ITEMS, max_part)
    while first < total:
        yield slice(first, min(total, first + size))
        first, size = first + size, min(2 * size, max_part)


def _advance(
    on_progress: Callable[[int, int], None], before: int, total: int, done: int, _: int
) -> None:
    on_progress(before + done, total)


def _explained(result: R, records: Sequence[TextRecord]) -> R:
    """Return the result, in which a line without a text has the problem of the line as the reason
    why it was skipped.
    """
    if not any(records[one.index].problem for one in result.skipped):
        return result
    skipped = tuple(
        replace(one, message=records[one.index].problem or one.message) for one in result.skipped
    )
    return replace(result, skipped=skipped)

"""One run of an inference command: reads its texts, shows progress, times the call, and reports what was skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from shoal.cli.console import bar, counted, note
from shoal.cli.inference import outputs
from shoal.cli.inference.arguments import LineFiles, Serving
from shoal.cli.inference.inputs import located, read
from shoal.results import EncodeResult, ExtractResult, ScoreResult

Result = EncodeResult | ScoreResult | ExtractResult
R = TypeVar("R", EncodeResult, ScoreResult, ExtractResult)
_MAX_SKIPPED_LINES = 10


class Invocation:
    """The texts of a command and what happens to its results: written to `output`, printed as JSON, or shown as a table.

    Raises InputError for files that cannot be read, BadParameter for options that do not fit together. `what`: the name of the
    texts' argument in messages.
    """

    def __init__(
        self, model: str, texts: Sequence[str] | None, files: LineFiles, serving: Serving, as_json: bool, *, what: str = "TEXT"
    ) -> None:
        outputs.check(files.output, *files.suffixes)
        self.model, self.as_json = model, as_json
        self.output: Path | None = files.output
        records = read(texts, files.source, files.selection(serving.on_invalid), what=what)
        self.records = [replace(record, is_image=True) for record in records] if files.image else records
        self._seconds = 0.0

    @property
    def items(self) -> list[str | Path]:
        return [record.item for record in self.records]

    @contextmanager
    def sending(self, name: str, description: str) -> Iterator[Callable[[int, int], None] | None]:
        """Around the call: gives `on_progress`, measures its time, and adds to an error about `name[i]` where that text is from."""
        started = time.monotonic()
        with located(self.records, name), bar(description, len(self.records)) as on_progress:
            yield on_progress
        self._seconds = time.monotonic() - started

    def report_skipped(self, result: R) -> R:
        """Print to stderr which texts were skipped, the first of them with the reason.

        Returns the result, in which a line without a text has the problem of the line as its reason.
        """
        if any(self.records[one.index].problem for one in result.skipped):
            skipped = [replace(one, message=self.records[one.index].problem or one.message) for one in result.skipped]
            result = replace(result, skipped=skipped)
        if result.skipped:
            note(f"skipped {len(result.skipped):,} of {counted(len(self.records), 'text')}, which have no result:")
        for skipped in result.skipped[:_MAX_SKIPPED_LINES]:
            where = self.records[skipped.index].where
            found = skipped.message if skipped.message.startswith(where) else f"{where}: {skipped.message}"
            note(f"  {found} [{skipped.reason}]")
        if len(result.skipped) > _MAX_SKIPPED_LINES:
            note(f"  … {len(result.skipped) - _MAX_SKIPPED_LINES:,} more")
        return result

    def report_written(self, result: Result) -> None:
        """Prints a summary to stderr, after the results were written to `output`."""
        tokens = result.usage.input_tokens
        rate = tokens / max(self._seconds, 1e-9)
        texts = counted(len(self.records) - len(result.skipped), "text")
        note(
            f"{texts}, {counted(tokens, 'token')} in {self._seconds:.2f} s ({rate:,.0f} tokens/s) by {self.model} -> {self.output}"
        )

    def metadata(self, result: Result) -> dict[str, object]:
        """What the JSON of every command has beside its results."""
        usage = {name: count for name, count in asdict(result.usage).items() if count or name == "input_tokens"}
        found = {"model": self.model, "revision": result.revision, "usage": usage, "timings": asdict(result.timings)}
        return found | ({"skipped": [asdict(skipped) for skipped in result.skipped]} if result.skipped else {})

    def heading(self, result: Result) -> str:
        """The title of a table of results."""
        return f"{self.model}  {counted(result.usage.input_tokens, 'token')}, {result.timings.total_seconds * 1000:.1f} ms"

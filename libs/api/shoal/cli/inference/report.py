"""Reports of results: to a file, as JSON, or as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from shoal.cli.console import emit, preview, show, table
from shoal.cli.inference import outputs
from shoal.cli.inference.invocation import Invocation
from shoal.cli.text import document, printable
from shoal.extractions import Extraction, Value
from shoal.results import EncodeResult, ExtractResult, ScoreResult


def report_vectors(run: Invocation, result: EncodeResult) -> None:
    """Report vectors. With --output and --json, stdout has the JSON without the vectors."""
    result = run.report_skipped(result)
    if run.output is not None:
        outputs.write_vectors(run.output, run.model, result, run.records)
        run.report_written(result)
    if run.as_json and str(run.output) != "-":
        rows = None if run.output is not None else list(outputs.encoded_rows(result))
        emit(
            run.metadata(result)
            | ({"items": rows} if rows is not None else {"output": str(run.output)})
        )
    elif run.output is None:
        _show_vectors(run, result)


def report_ranking(run: Invocation, result: ScoreResult, query: str) -> None:
    result = run.report_skipped(result)
    if run.output is not None:
        outputs.write_lines(run.output, outputs.ranked_rows(result, run.records))
        run.report_written(result)
    elif run.as_json:
        emit(
            run.metadata(result)
            | {"query": query, "results": list(outputs.ranked_rows(result, run.records))}
        )
    else:
        _show_ranking(run, result)


def report_extractions(run: Invocation, result: ExtractResult, kind: str) -> None:
    """Print extractions, or write them to a file.

    Args:
        kind: The field of an Extraction that the command fills, such as "entities".
    """
    result = run.report_skipped(result)
    if run.output is not None:
        outputs.write_lines(run.output, outputs.extracted_rows(result, run.records, kind))
        run.report_written(result)
    elif run.as_json:
        emit(
            run.metadata(result)
            | {"results": list(outputs.extracted_rows(result, run.records, kind))}
        )
    elif kind in ("generated_text", "ocr_text"):
        sys.stdout.writelines(f"{line}\n" for line in _generated(result))
    else:
        _show_extractions(run, result, kind)


def _show_vectors(run: Invocation, result: EncodeResult) -> None:
    made = table(run.heading(result), "text", "vector", "first numbers")
    for index, record in enumerate(run.records):
        if result.is_divided and result.chunks[index]:
            for chunk in result.chunks[index]:
                for name, numbers in _first_numbers_of_row(result, chunk.row):
                    made.add_row(preview(chunk.text), name, numbers)
            continue
        for name, numbers in _first_numbers(result, index):
            made.add_row(preview(record.text), name, numbers)
    show(made)


def _first_numbers(result: EncodeResult, index: int) -> Iterator[tuple[str, str]]:
    """Return the shape and the first numbers of each representation."""
    if any(skipped.index == index for skipped in result.skipped):
        yield "skipped", ""
        return
    yield from _first_numbers_of_row(result, index)


def _first_numbers_of_row(result: EncodeResult, index: int) -> Iterator[tuple[str, str]]:
    if "dense" in result.representations:
        numbers = " ".join(f"{number:.4g}" for number in result.dense[index][:5].tolist())
        yield f"dense {result.vectors.dimensions} {result.vectors.data_type}", f"{numbers} …"
    if "sparse" in result.representations:
        columns, weights = result.sparse[index]
        numbers = " ".join(
            f"{column}:{weight:.3g}"
            for column, weight in zip(columns[:5], weights[:5], strict=True)
        )
        yield f"sparse {len(columns)} of {result.sparse.shape[1]}", f"{numbers} …"
    if "multi_vector" in result.representations:
        rows = result.multi_vector[index]
        yield (
            f"multi-vector {rows.shape[0]} x {rows.shape[1]}",
            " ".join(f"{number:.4g}" for number in rows[0][:5].tolist()) + " …",
        )


def _show_ranking(run: Invocation, result: ScoreResult) -> None:
    made = table(run.heading(result), "rank", "score", "document", right=("rank", "score"))
    for rank, index in enumerate(result.ranking.tolist(), start=1):
        made.add_row(
            str(rank), f"{result.scores[index]:.4f}", preview(run.records[index].text, 100)
        )
    show(made)


def _show_extractions(run: Invocation, result: ExtractResult, kind: str) -> None:
    made = table(run.heading(result), "text", "label", "score", "where", right=("score",))
    for record, extraction in zip(run.records, result, strict=True):
        text = preview(record.text)
        for entity in extraction.entities:
            made.add_row(
                text,
                entity.label,
                f"{entity.score:.4f}",
                f"{entity.text}  ({entity.start}-{entity.end})",
            )
        for label in extraction.labels:
            made.add_row(text, label.label, f"{label.score:.4f}", "")
        for relation in extraction.relations:
            ends = (
                f"{relation.head.text} → {relation.tail.text}  ({relation.head.start}, "
                f"{relation.tail.start})"
            )
            made.add_row(text, relation.label, f"{relation.score:.4f}", ends)
        for region in extraction.regions:
            box = f"{region.left:.0f}, {region.top:.0f} to {region.right:.0f}, {region.bottom:.0f}"
            made.add_row(text, region.label, f"{region.score:.4f}", box)
        for question in extraction.classifications:
            for label in question.labels:
                made.add_row(text, f"{question.name}: {label.label}", f"{label.score:.4f}", "")
        for one in extraction.structures:
            for name, value in one.fields.items():
                for each in (
                    value if isinstance(value, tuple) else () if value is None else (value,)
                ):
                    made.add_row(text, f"{one.name}.{name}", f"{each.score:.4f}", _placed(each))
        if extraction == Extraction() or extraction.truncated:
            made.add_row(
                text, f"more {kind} were left out" if extraction.truncated else f"no {kind}", "", ""
            )
    show(made)


def _generated(result: ExtractResult) -> Iterator[str]:
    """Yield the lines of every text or form and of its regions, apart by an empty line; a text that
    was cut off ends with dots.
    """
    for number, extraction in enumerate(result):
        if number:
            yield ""
        text = extraction.text if extraction.form is None else document(extraction.form)
        text += " …" if extraction.finish_reason == "length" else ""
        if text or not extraction.regions:
            yield from map(printable, text.split("\n"))
        for region in extraction.regions:
            yield (
                f"{region.left:.0f}, {region.top:.0f} to {region.right:.0f}, "
                f"{region.bottom:.0f}: {printable(region.label)}"
            )


def _placed(value: Value) -> str:
    return value.text if value.start is None else f"{value.text}  ({value.start}-{value.end})"

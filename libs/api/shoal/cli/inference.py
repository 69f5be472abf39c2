"""`shoal encode`, `shoal score`, `shoal extract entities`, `shoal extract classify`, `shoal extract relations`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import outputs
from shoal.cli.arguments import (
    FORMS,
    Adapter,
    AsJson,
    Field,
    Forms,
    Input,
    Instruction,
    Invalid,
    Labels,
    LineFile,
    ModelId,
    Pool,
    Texts,
    Threshold,
    Truncate,
    Urgency,
    VectorFile,
)
from shoal.cli.console import bar, emit, note, preview, show, table
from shoal.cli.inputs import Record, given_entities, located, read
from shoal.cli.options import Reach, connected
from shoal.plans import Aggregation, Role, Scale
from shoal.results import DataType, EncodeResult, ExtractResult, ScoreResult

Result = EncodeResult | ScoreResult | ExtractResult
_TOLD = 10

extract = typer.Typer(no_args_is_help=True, help="Find entities, labels or relations in texts.")


@connected
def encode(
    mesh: Reach,
    model: ModelId,
    texts: Texts = None,
    source: Input = None,
    field: Field = None,
    output: VectorFile = None,
    role: Annotated[Role | None, typer.Option(help="Chooses the model's prompt.")] = None,
    forms: Forms = None,
    data_type: Annotated[DataType | None, typer.Option(help="How numbers are stored; default float32.")] = None,
    dimensions: Annotated[int, typer.Option(min=0, help="Keep the first so many (Matryoshka); 0 keeps all.")] = 0,
    normalize: Annotated[bool | None, typer.Option(help="Scale to length 1; default as the model says.")] = None,
    instruction: Instruction = "",
    truncation: Truncate = None,
    adapter: Adapter = "",
    pool: Pool = "",
    priority: Urgency = None,
    on_invalid: Invalid = "raise",
    as_json: AsJson = False,
) -> None:
    """Turn texts into vectors."""
    outputs.check(output, ".npy", ".npz", ".jsonl")
    records = read(texts, source, field, blank=on_invalid == "skip")
    started = time.monotonic()
    with located(records, "items"), bar("encoding", len(records)) as on_progress:
        result = mesh().encode(
            model,
            [record.text for record in records],
            role=role,
            representations=[FORMS[form] for form in forms or ()],
            data_type=data_type,
            dimensions=dimensions,
            normalize=normalize,
            instruction=instruction,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
            on_invalid=on_invalid,
            on_progress=on_progress,
        )
    _tell_skipped(records, result)
    if output is not None:
        outputs.write_vectors(output, result, records)
        note(_summary(model, len(records), result, time.monotonic() - started, output))
    if as_json and str(output) != "-":
        rows = None if output is not None else list(outputs.encoded_rows(result))
        emit(_about(model, result) | ({"items": rows} if rows is not None else {"output": str(output)}))
    elif output is None:
        _show_vectors(model, records, result)


@connected
def score(
    mesh: Reach,
    model: ModelId,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="What is searched for.", show_default=False)],
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="DOC", help="Documents; - for stdin, one a line.", show_default=False)
    ] = None,
    source: Input = None,
    field: Field = None,
    output: LineFile = None,
    top_n: Annotated[int, typer.Option("--top-n", "-n", min=0, help="Show the best so many; 0 shows all.")] = 0,
    scale: Annotated[Scale | None, typer.Option(help="Default: the model's own.")] = None,
    instruction: Instruction = "",
    truncation: Truncate = None,
    adapter: Adapter = "",
    pool: Pool = "",
    priority: Urgency = None,
    on_invalid: Invalid = "raise",
    as_json: AsJson = False,
) -> None:
    """Say how well documents answer a query, best first."""
    outputs.check(output, ".jsonl")
    records = read(documents, source, field, what="DOC", blank=on_invalid == "skip")
    started = time.monotonic()
    with located(records, "documents"), bar("scoring", len(records)) as on_progress:
        result = mesh().score(
            model,
            query,
            [record.text for record in records],
            instruction=instruction,
            scale=scale,
            top_n=top_n,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
            on_invalid=on_invalid,
            on_progress=on_progress,
        )
    _tell_skipped(records, result)
    if output is not None:
        outputs.write_lines(output, outputs.ranked_rows(result, records))
        note(_summary(model, len(records), result, time.monotonic() - started, output))
    elif as_json:
        emit(_about(model, result) | {"query": query, "results": list(outputs.ranked_rows(result, records))})
    else:
        _show_ranking(model, records, result)


@extract.command()
@connected
def entities(
    mesh: Reach,
    model: ModelId,
    texts: Texts = None,
    source: Input = None,
    field: Field = None,
    output: LineFile = None,
    labels: Labels = None,
    threshold: Threshold = None,
    flat: Annotated[bool | None, typer.Option(help="No overlapping entities; default yes.")] = None,
    aggregation: Annotated[Aggregation | None, typer.Option(help="How the tokens of a word agree; default simple.")] = None,
    truncation: Truncate = None,
    adapter: Adapter = "",
    pool: Pool = "",
    priority: Urgency = None,
    on_invalid: Invalid = "raise",
    as_json: AsJson = False,
) -> None:
    """Find named things in texts."""
    outputs.check(output, ".jsonl")
    records = read(texts, source, field, blank=on_invalid == "skip")
    started = time.monotonic()
    with located(records, "items"), bar("reading", len(records)) as on_progress:
        result = mesh().entities(
            model,
            [record.text for record in records],
            labels or (),
            threshold=threshold,
            flat=flat,
            aggregation=aggregation,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
            on_invalid=on_invalid,
            on_progress=on_progress,
        )
    _report(model, records, result, "entities", output, as_json, time.monotonic() - started)


@extract.command()
@connected
def classify(
    mesh: Reach,
    model: ModelId,
    texts: Texts = None,
    source: Input = None,
    field: Field = None,
    output: LineFile = None,
    labels: Labels = None,
    threshold: Threshold = None,
    multi_label: Annotated[bool | None, typer.Option(help="Each label on its own; default as the model says.")] = None,
    hypothesis: Annotated[str, typer.Option(help="Sentence put for each label, {} standing for it.")] = "",
    among_labels: Annotated[
        bool, typer.Option("--among-labels", help="Shares among the labels given, not among all that the model has.")
    ] = False,
    truncation: Truncate = None,
    adapter: Adapter = "",
    pool: Pool = "",
    priority: Urgency = None,
    on_invalid: Invalid = "raise",
    as_json: AsJson = False,
) -> None:
    """Say which labels fit texts."""
    outputs.check(output, ".jsonl")
    records = read(texts, source, field, blank=on_invalid == "skip")
    started = time.monotonic()
    with located(records, "items"), bar("classifying", len(records)) as on_progress:
        result = mesh().classify(
            model,
            [record.text for record in records],
            labels or (),
            multi_label=multi_label,
            threshold=threshold,
            hypothesis=hypothesis,
            among_labels=among_labels,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
            on_invalid=on_invalid,
            on_progress=on_progress,
        )
    _report(model, records, result, "labels", output, as_json, time.monotonic() - started)


@extract.command()
@connected
def relations(
    mesh: Reach,
    model: ModelId,
    texts: Texts = None,
    source: Input = None,
    field: Field = None,
    output: LineFile = None,
    labels: Labels = None,
    entity_labels: Annotated[
        list[str] | None,
        typer.Option("--entity", "-e", help="Kind of entity to look between; repeat for more.", show_default=False),
    ] = None,
    given: Annotated[
        str | None,
        typer.Option(help="Field of a .jsonl line with its entities, for models that do not find them.", show_default=False),
    ] = None,
    threshold: Threshold = None,
    truncation: Truncate = None,
    adapter: Adapter = "",
    pool: Pool = "",
    priority: Urgency = None,
    on_invalid: Invalid = "raise",
    as_json: AsJson = False,
) -> None:
    """Find how entities in texts relate."""
    outputs.check(output, ".jsonl")
    records = read(texts, source, field, blank=on_invalid == "skip")
    entities = () if given is None else given_entities(records, given)
    started = time.monotonic()
    with located(records, "items"), bar("reading", len(records)) as on_progress:
        result = mesh().relations(
            model,
            [record.text for record in records],
            labels or (),
            entity_labels=entity_labels or (),
            entities=entities,
            threshold=threshold,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
            on_invalid=on_invalid,
            on_progress=on_progress,
        )
    _report(model, records, result, "relations", output, as_json, time.monotonic() - started)


def _report(
    model: str, records: Sequence[Record], result: ExtractResult, only: str, output: Path | None, as_json: bool, seconds: float
) -> None:
    _tell_skipped(records, result)
    if output is not None:
        outputs.write_lines(output, outputs.extracted_rows(result, records, only))
        note(_summary(model, len(records), result, seconds, output))
    elif as_json:
        emit(_about(model, result) | {"results": list(outputs.extracted_rows(result, records, only))})
    else:
        _show_findings(model, records, result, only)


def _tell_skipped(records: Sequence[Record], result: Result) -> None:
    """Which texts have no answer and why, on stderr: the first of them in words."""
    if result.skipped:
        note(f"skipped {len(result.skipped):,} of {len(records):,} texts, which have no answer:")
    for one in result.skipped[:_TOLD]:
        note(f"  {records[one.index].where}: {one.message} [{one.reason}]")
    if len(result.skipped) > _TOLD:
        note(f"  … {len(result.skipped) - _TOLD:,} more")


def _about(model: str, result: Result) -> dict[str, object]:
    about = {"model": model, "revision": result.revision, "usage": asdict(result.usage), "timings": asdict(result.timings)}
    return about | ({"skipped": [asdict(one) for one in result.skipped]} if result.skipped else {})


def _summary(model: str, items: int, result: Result, seconds: float, output: Path) -> str:
    rate = result.usage.input_tokens / max(seconds, 1e-9)
    return f"{items:,} texts, {result.usage.input_tokens:,} tokens in {seconds:.2f} s ({rate:,.0f} tokens/s) by {model} -> {output}"


def _heading(model: str, result: Result) -> str:
    return f"{model}  {result.usage.input_tokens:,} tokens, {result.timings.total_seconds * 1000:.1f} ms"


def _show_vectors(model: str, records: Sequence[Record], result: EncodeResult) -> None:
    made = table(_heading(model, result), "text", "vector", "beginning")
    for index, record in enumerate(records):
        for name, beginning in _beginnings(result, index):
            made.add_row(preview(record.text), name, beginning)
    show(made)


def _beginnings(result: EncodeResult, index: int) -> Iterator[tuple[str, str]]:
    """For each representation its shape and its first numbers."""
    if any(one.index == index for one in result.skipped):
        yield "skipped", ""
        return
    if "dense" in result.representations:
        numbers = " ".join(f"{number:.4g}" for number in result.dense[index][:5].tolist())
        yield f"dense {result.vectors.dimensions} {result.vectors.data_type}", f"{numbers} …"
    if "sparse" in result.representations:
        columns, weights = result.sparse[index]
        numbers = " ".join(f"{column}:{weight:.3g}" for column, weight in zip(columns[:5], weights[:5], strict=True))
        yield f"sparse {len(columns)} of {result.sparse.shape[1]}", f"{numbers} …"
    if "multi_vector" in result.representations:
        rows = result.multi_vector[index]
        yield f"multi-vector {rows.shape[0]} x {rows.shape[1]}", " ".join(f"{number:.4g}" for number in rows[0][:5].tolist()) + " …"


def _show_ranking(model: str, records: Sequence[Record], result: ScoreResult) -> None:
    made = table(_heading(model, result), "rank", "score", "document", right=("rank", "score"))
    for rank, index in enumerate(result.ranking.tolist(), start=1):
        made.add_row(str(rank), f"{result.scores[index]:.4f}", preview(records[index].text, 100))
    show(made)


def _show_findings(model: str, records: Sequence[Record], result: ExtractResult, only: str) -> None:
    made = table(_heading(model, result), "text", "label", "score", "where", right=("score",))
    for record, extraction in zip(records, result, strict=True):
        text = preview(record.text)
        for entity in extraction.entities:
            made.add_row(text, entity.label, f"{entity.score:.4f}", f"{entity.text}  ({entity.start}-{entity.end})")
        for label in extraction.labels:
            made.add_row(text, label.label, f"{label.score:.4f}", "")
        for relation in extraction.relations:
            ends = f"{relation.head.text} → {relation.tail.text}  ({relation.head.start}, {relation.tail.start})"
            made.add_row(text, relation.label, f"{relation.score:.4f}", ends)
        if not (extraction.entities or extraction.labels or extraction.relations):
            made.add_row(text, f"no {only}", "", "")
    show(made)

"""`shoal encode`, `shoal score`, `shoal extract entities`, `shoal extract classify`, `shoal extract relations`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import outputs
from shoal.cli.console import bar, emit, note, preview, show, table
from shoal.cli.inputs import Record, given_entities, located, read
from shoal.cli.options import Json, Reach, connected
from shoal.plans import Aggregation, Form, Priority, Role, Scale, Truncation
from shoal.results import DataType, EncodeResult, ExtractResult, ScoreResult

ModelId = Annotated[str, typer.Argument(metavar="MODEL", help="org/name, or org/name@revision.", show_default=False)]
Texts = Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts; - for stdin, one a line.", show_default=False)]
Input = Annotated[
    Path | None, typer.Option("--input", "-i", help=".txt (a text a line) or .jsonl; - for stdin.", show_default=False)
]
Field = Annotated[str | None, typer.Option(help='Field of a .jsonl line that holds the text; default "text".', show_default=False)]
VectorFile = Annotated[Path | None, typer.Option("--output", "-o", help=".npy, .npz, .jsonl, or - for stdout.", show_default=False)]
LineFile = Annotated[Path | None, typer.Option("--output", "-o", help=".jsonl, or - for stdout.", show_default=False)]
Instruction = Annotated[str, typer.Option(help="Put before each text instead of the model's prompt.")]
Truncate = Annotated[Truncation | None, typer.Option("--truncation", help="What to do with texts that are too long; default end.")]
Adapter = Annotated[str, typer.Option(help="LoRA adapter of the model, org/name.")]
Pool = Annotated[str, typer.Option(help="Workers to serve it, such as l4-spot; default as the catalog says.")]
Urgency = Annotated[Priority | None, typer.Option("--priority", help="Who goes first; default interactive.")]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="Label to look for; repeat for more.", show_default=False)]
Threshold = Annotated[float | None, typer.Option(help="Keep what scores at least this.", show_default=False)]


class FormName(StrEnum):
    """`Form` as an enumeration: typer does not take a list of literals."""

    DENSE = "dense"
    SPARSE = "sparse"
    MULTI_VECTOR = "multi_vector"


_FORMS: dict[FormName, Form] = {
    FormName.DENSE: "dense",
    FormName.SPARSE: "sparse",
    FormName.MULTI_VECTOR: "multi_vector",
}
Forms = Annotated[
    list[FormName] | None, typer.Option("--representation", "-r", help="Repeat for more; default the model's.", show_default=False)
]

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
    as_json: Json = False,
) -> None:
    """Turn texts into vectors."""
    outputs.check(output, ".npy", ".npz", ".jsonl")
    records = read(texts, source, field)
    started = time.monotonic()
    with located(records, "items"), bar("encoding", len(records)) as on_progress:
        result = mesh().encode(
            model,
            [record.text for record in records],
            role=role,
            representations=[_FORMS[form] for form in forms or ()],
            data_type=data_type,
            dimensions=dimensions,
            normalize=normalize,
            instruction=instruction,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
            on_progress=on_progress,
        )
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
    as_json: Json = False,
) -> None:
    """Say how well documents answer a query, best first."""
    outputs.check(output, ".jsonl")
    records = read(documents, source, field, what="DOC")
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
            on_progress=on_progress,
        )
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
    as_json: Json = False,
) -> None:
    """Find named things in texts."""
    outputs.check(output, ".jsonl")
    records = read(texts, source, field)
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
    truncation: Truncate = None,
    adapter: Adapter = "",
    pool: Pool = "",
    priority: Urgency = None,
    as_json: Json = False,
) -> None:
    """Say which labels fit texts."""
    outputs.check(output, ".jsonl")
    records = read(texts, source, field)
    started = time.monotonic()
    with located(records, "items"), bar("classifying", len(records)) as on_progress:
        result = mesh().classify(
            model,
            [record.text for record in records],
            labels or (),
            multi_label=multi_label,
            threshold=threshold,
            hypothesis=hypothesis,
            truncation=truncation,
            adapter=adapter,
            pool=pool,
            priority=priority,
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
    as_json: Json = False,
) -> None:
    """Find how entities in texts relate."""
    outputs.check(output, ".jsonl")
    records = read(texts, source, field)
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
            on_progress=on_progress,
        )
    _report(model, records, result, "relations", output, as_json, time.monotonic() - started)


def _report(
    model: str, records: Sequence[Record], result: ExtractResult, only: str, output: Path | None, as_json: bool, seconds: float
) -> None:
    if output is not None:
        outputs.write_lines(output, outputs.extracted_rows(result, records, only))
        note(_summary(model, len(records), result, seconds, output))
    elif as_json:
        emit(_about(model, result) | {"results": list(outputs.extracted_rows(result, records, only))})
    else:
        _show_findings(model, records, result, only)


def _about(model: str, result: EncodeResult | ScoreResult | ExtractResult) -> dict[str, object]:
    return {"model": model, "revision": result.revision, "usage": asdict(result.usage), "timings": asdict(result.timings)}


def _summary(model: str, items: int, result: EncodeResult | ScoreResult | ExtractResult, seconds: float, output: Path) -> str:
    rate = result.usage.input_tokens / max(seconds, 1e-9)
    return f"{items:,} texts, {result.usage.input_tokens:,} tokens in {seconds:.2f} s ({rate:,.0f} tokens/s) by {model} -> {output}"


def _heading(model: str, result: EncodeResult | ScoreResult | ExtractResult) -> str:
    return f"{model}  {result.usage.input_tokens:,} tokens, {result.timings.total_seconds * 1000:.1f} ms"


def _show_vectors(model: str, records: Sequence[Record], result: EncodeResult) -> None:
    made = table(_heading(model, result), "text", "vector", "beginning")
    for index, record in enumerate(records):
        for name, beginning in _beginnings(result, index):
            made.add_row(preview(record.text), name, beginning)
    show(made)


def _beginnings(result: EncodeResult, index: int) -> Iterator[tuple[str, str]]:
    """For each representation its shape and its first numbers."""
    if result.vectors is not None:
        numbers = " ".join(f"{number:.4g}" for number in result.vectors.array[index][:5].tolist())
        yield f"dense {result.vectors.dimensions} {result.vectors.data_type}", f"{numbers} …"
    if result.sparse is not None:
        columns, weights = result.sparse[index]
        numbers = " ".join(f"{column}:{weight:.3g}" for column, weight in zip(columns[:5], weights[:5], strict=True))
        yield f"sparse {len(columns)} of {result.sparse.shape[1]}", f"{numbers} …"
    if result.multi_vector is not None:
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

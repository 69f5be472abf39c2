"""`shoal encode`, `shoal score`, and `shoal extract` with its tasks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.failures import InputError
from shoal.cli.inference import drawings, generation, outputs, pages
from shoal.cli.inference.arguments import (
    FORMS,
    AggregationOption,
    AsJson,
    ChunkOverlap,
    ChunkTokens,
    DataTypeOption,
    Dimensions,
    DrawInto,
    Flat,
    Forms,
    Hypothesis,
    ImageFiles,
    Instruction,
    ItemFiles,
    Labels,
    LineFiles,
    MultiLabel,
    Normalize,
    RoleOption,
    ScaleOption,
    SchemaPath,
    Texts,
    Threshold,
    VectorFiles,
)
from shoal.cli.inference.inputs import given_entities
from shoal.cli.inference.invocation import Invocation
from shoal.cli.inference.report import report_extractions, report_ranking, report_vectors
from shoal.cli.model_names import ModelId
from shoal.cli.options import FILES, OpenClient, connected
from shoal.options import EncodeOptions, LongTextOptions
from shoal.schema import Schema
from shoal.tasks import Chunking, ReadText, Regions, TextLayer

TextChunks = Literal["sentences", "tokens", "markdown"]

extract = typer.Typer(
    no_args_is_help=True,
    help=(
        "Find entities, labels, relations or regions; read images (ocr) and documents (text); "
        "generate texts."
    ),
)


@connected
def encode(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    files: VectorFiles,
    role: RoleOption = None,
    forms: Forms = None,
    data_type: DataTypeOption = None,
    dimensions: Dimensions = 0,
    normalize: Normalize = None,
    instruction: Instruction = "",
    pooling_factor: Annotated[
        int,
        typer.Option(
            min=0, help="Factor by which to reduce the number of vectors of each multi-vector."
        ),
    ] = 0,
    chunk: Annotated[
        TextChunks | None,
        typer.Option(help="Divide texts, or texts of documents, into chunks with vectors."),
    ] = None,
    chunk_tokens: ChunkTokens = 0,
    chunk_overlap: ChunkOverlap = 0,
    late: Annotated[
        bool, typer.Option("--late", help="Late chunking: the model reads texts whole.")
    ] = False,
    expect_embedding_id: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Refuse vectors with another id (`embedding_id` of --json), such as those of a "
            "changed model.",
            show_default=False,
        ),
    ] = "",
    serving: EncodeOptions,
    as_json: AsJson = False,
) -> None:
    """Encode texts as vectors."""
    if chunk is None and (chunk_tokens or chunk_overlap or late):
        raise typer.BadParameter(
            "--chunk-tokens, --chunk-overlap and --late are for chunks: add --chunk sentences"
        )
    chunking = None if chunk is None else Chunking(chunk, chunk_tokens, chunk_overlap, late)
    run = Invocation(model, texts, files, serving, as_json)
    ask = partial(
        open_client().encode,
        model,
        role=role,
        representations=[FORMS[form] for form in forms or ()],
        data_type=data_type,
        dimensions=dimensions,
        normalize=normalize,
        instruction=instruction,
        pooling_factor=pooling_factor,
        chunking=chunking,
        expect_embedding_id=expect_embedding_id,
        **serving,
    )
    result = run.ask("items", "encoding", ask, outputs.encoded_lines)
    if result is not None:
        report_vectors(run, result)


@connected
def score(
    open_client: OpenClient,
    model: ModelId,
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="The search query.", show_default=False)
    ],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOC", help="Documents; - for stdin, one per line.", show_default=False
        ),
    ] = None,
    *,
    files: LineFiles,
    top_n: Annotated[
        int,
        typer.Option("--top-n", "-n", min=0, help="Number of best results to show; 0 shows all."),
    ] = 0,
    scale: ScaleOption = None,
    instruction: Instruction = "",
    serving: LongTextOptions,
    as_json: AsJson = False,
) -> None:
    """Score how relevant documents are to a query, best first."""
    run = Invocation(model, documents, files, serving, as_json, argument="DOC")
    with run.sending(
        "documents", "scoring", "a ranking is complete when all documents are scored"
    ) as on_progress:
        options: LongTextOptions = {**serving, "on_progress": on_progress}
        result = open_client().score(
            model,
            query,
            run.items,
            instruction=instruction,
            scale=scale,
            top_n=top_n,
            **options,
        )
    report_ranking(run, result, query)


@extract.command()
@connected
def entities(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    files: ItemFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    flat: Flat = None,
    aggregation: AggregationOption = None,
    serving: LongTextOptions,
    as_json: AsJson = False,
) -> None:
    """Find named entities in texts."""
    run = Invocation(model, texts, files, serving, as_json)
    ask = partial(
        open_client().entities,
        model,
        labels=labels or (),
        threshold=threshold,
        flat=flat,
        aggregation=aggregation,
        **serving,
    )
    result = run.ask("items", "extracting", ask, partial(outputs.extracted_rows, kind="entities"))
    if result is not None:
        report_extractions(run, result, "entities")


@extract.command()
@connected
def classify(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    files: ItemFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    multi_label: MultiLabel = None,
    hypothesis: Hypothesis = "",
    among_labels: Annotated[
        bool,
        typer.Option(
            "--among-labels",
            help="Normalise over the labels given, not over all labels of the model.",
        ),
    ] = False,
    serving: LongTextOptions,
    as_json: AsJson = False,
) -> None:
    """Classify texts."""
    run = Invocation(model, texts, files, serving, as_json)
    ask = partial(
        open_client().classify,
        model,
        labels=labels or (),
        multi_label=multi_label,
        threshold=threshold,
        hypothesis=hypothesis,
        among_labels=among_labels,
        **serving,
    )
    result = run.ask("items", "classifying", ask, partial(outputs.extracted_rows, kind="labels"))
    if result is not None:
        report_extractions(run, result, "labels")


@extract.command()
@connected
def relations(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    files: ItemFiles,
    labels: Labels = None,
    entity_labels: Annotated[
        list[str] | None,
        typer.Option(
            "--entity", "-e", help="Kind of entity to relate; may be repeated.", show_default=False
        ),
    ] = None,
    given: Annotated[
        str | None,
        typer.Option(
            help="Field of a .jsonl line with its entities, for models that do not find them.",
            show_default=False,
        ),
    ] = None,
    threshold: Threshold = None,
    serving: LongTextOptions,
    as_json: AsJson = False,
) -> None:
    """Find relations between entities in texts."""
    run = Invocation(model, texts, files, serving, as_json)
    entities = () if given is None else given_entities(run.records, given)
    ask = partial(
        open_client().relations,
        model,
        labels=labels or (),
        entity_labels=entity_labels or (),
        threshold=threshold,
        **serving,
    )
    result = run.ask(
        "items",
        "extracting",
        ask,
        partial(outputs.extracted_rows, kind="relations"),
        {"entities": entities},
    )
    if result is not None:
        report_extractions(run, result, "relations")


@extract.command()
@connected
def regions(
    open_client: OpenClient,
    model: ModelId,
    images: ImageFiles = None,
    *,
    files: ItemFiles,
    labels: Labels = None,
    threshold: Threshold = None,
    draw: DrawInto = None,
    serving: EncodeOptions,
    as_json: AsJson = False,
) -> None:
    """Find objects in images: boxes in pixels, separately for each label."""
    run = Invocation(model, images, replace(files, image=True), serving, as_json, argument="IMAGE")
    drawings.check(draw, run.records)
    task = Regions(labels=labels or (), threshold=threshold)
    ask = drawings.drawing(
        draw, run.records, partial(open_client().extract, model, task=task, **serving)
    )
    result = run.ask("items", "extracting", ask, partial(outputs.extracted_rows, kind="regions"))
    if result is not None:
        report_extractions(run, result, "regions")


@extract.command()
@connected
def text(
    open_client: OpenClient,
    document: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A PDF, DOCX, XLSX, PPTX, EPUB, HTML, e-mail or Markdown file.",
            show_default=False,
        ),
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Model that reads pages without a text layer as images; org/name.",
            show_default=False,
        ),
    ] = "",
    asked: Annotated[
        str, typer.Option("--pages", help="Pages to read, such as 3 or 1-5; default all.")
    ] = "",
    layer: Annotated[
        TextLayer | None,
        typer.Option(
            "--text-layer",
            help=(
                "The text that the file has: prefer it to the model (default), return nothing "
                "else, or never use it."
            ),
            show_default=False,
        ),
    ] = None,
    dots_per_inch: Annotated[
        int,
        typer.Option(
            "--dpi",
            min=0,
            help="Resolution at which pages are rendered for the model, in dots per inch; 0: 144.",
        ),
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=".md, .txt or .jsonl, or - for stdout.",
            show_default=False,
            rich_help_panel=FILES,
        ),
    ] = None,
    serving: EncodeOptions,
    as_json: AsJson = False,
) -> None:
    """Read the text of a document, page by page, as Markdown: the text layer of a PDF file, and
    other formats converted. No mesh is needed unless a model is named.
    """
    if not model and (layer == "never" or dots_per_inch):
        raise typer.BadParameter(
            "--text-layer never and --dpi are for a model that reads the pages: add --model"
        )
    run = pages.PagesRun(document, asked, dots_per_inch, output)
    if model:
        client, task = open_client(), ReadText(kind="ocr", text_layer=layer)
        run.read(lambda part: client.extract(model, part, task, **serving))
    else:
        run.read_text_layer()
    run.report(model, as_json=as_json)


extract.command()(generation.generate)
extract.command()(generation.ocr)


@extract.command()
@connected
def structure(
    open_client: OpenClient,
    model: ModelId,
    texts: Texts = None,
    *,
    files: ItemFiles,
    schema: SchemaPath,
    threshold: Threshold = None,
    serving: LongTextOptions,
    as_json: AsJson = False,
) -> None:
    """Find the parts of a schema: entities, classes, relations and structures of fields."""
    run = Invocation(model, texts, files, serving, as_json)
    asked = _schema(schema)
    ask = partial(
        open_client().extract,
        model,
        task=asked if threshold is None else replace(asked, threshold=threshold),
        **serving,
    )
    result = run.ask("items", "extracting", ask, partial(outputs.extracted_rows, kind="structure"))
    if result is not None:
        report_extractions(run, result, "structure")


def _schema(file: Path) -> Schema:
    """Raise InputError for a file that cannot be read, InvalidInput if it is not a schema."""
    try:
        return Schema.from_json(file.read_bytes())
    except OSError as error:
        raise InputError(f"--schema {file} cannot be read: {error.strerror}") from None

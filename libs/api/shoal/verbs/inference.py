"""The verbs of inference. See `shoal.verbs` for how clients get them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

from shoal import results
from shoal.extractions import Delta
from shoal.options import (
    EncodeOptions,
    EncodeStreamOptions,
    LongTextOptions,
    StreamOptions,
    with_options,
)
from shoal.requests.encode import EncodeParts, EncodePlan, Encoding
from shoal.requests.extract import ExtractPlan
from shoal.requests.score import ScorePlan, Scoring
from shoal.results import DataType, EncodeResult, ExtractResult, Form, ScoreResult
from shoal.tasks import (
    Aggregation,
    Chunking,
    Classify,
    Entities,
    Given,
    Item,
    Items,
    ReadText,
    Relations,
    Role,
    Scale,
    Task,
)
from shoal.transport.methods import ENCODE_STREAM, EXTRACT_STREAM
from shoal.verbs.base import ClientBase


@with_options
async def encode(
    client: ClientBase,
    model: str,
    items: Items,
    *,
    role: Role | None = None,
    representations: Form | Sequence[Form] = (),
    data_type: DataType | None = None,
    dimensions: int = 0,
    normalize: bool | None = None,
    instruction: str = "",
    pooling_factor: int = 0,
    chunking: Chunking | None = None,
    expect_embedding_id: str = "",
    both_models: bool = False,
    writable: bool = False,
    **options: Unpack[EncodeOptions],
) -> EncodeResult:
    """Encode texts as vectors; row i of the result is for item i, and a single text is a list of
    one.

    An empty list sends no request: its result has no rows. Raises ShoalError.

    Args:
        role: Selects the model's prompt.
        instruction: Replaces the prompt.
        representations: Default the model's main one.
        data_type: Default float32.
        dimensions: Number of leading dimensions to keep (Matryoshka); 0: all.
        normalize: Applied after `dimensions`; default as configured for the model.
        pooling_factor: Factor by which to reduce the vectors of each multi-vector, to the means of
            clusters of similar ones (2 to 64); 0: keep all.
        chunking: Divide each text, or the text of each `Document`; rows are for chunks then, and
            `result.chunks[i]` are those of item i.
        expect_embedding_id: Refuse vectors with another `embedding_id` than this one, which an
            earlier result had (EmbeddingIdMismatch). Its first 16 digits accept any number format.
        both_models: While the model is an alias that is being changed, also encode by its other
            model, as `result.other`: by the next one before the switch, by the previous one after
            it. Two requests; `expect_embedding_id` is for the first.
        on_invalid: "skip": the row of a skipped item is NaN, and `result.skipped` has the reason.
        writable: Return arrays that may be modified.
    """
    encoding = Encoding(
        role,
        representations,
        data_type,
        dimensions,
        normalize,
        instruction,
        pooling_factor,
        chunking,
        expect_embedding_id,
    )
    items = list(items) if both_models and isinstance(items, Iterator) else items
    plan = EncodePlan(items, encoding, model, options)
    result = await client._caller.run(plan, options)
    result = results.writable(result) if writable else result
    if not both_models or result.alias is None or not result.alias.other_model:
        return result
    again = replace(encoding, expect_embedding_id="")
    plan = EncodePlan(items, again, result.alias.other_model, options)
    silent: EncodeOptions = {**options, "on_progress": None}
    other = await client._caller.run(plan, silent)
    return replace(result, other=results.writable(other) if writable else other)


@with_options
def encode_stream(
    client: ClientBase,
    model: str,
    items: Items,
    *,
    role: Role | None = None,
    instruction: str = "",
    representations: Form | Sequence[Form] = (),
    data_type: DataType | None = None,
    dimensions: int = 0,
    normalize: bool | None = None,
    chunking: Chunking | None = None,
    expect_embedding_id: str = "",
    **options: Unpack[EncodeStreamOptions],
) -> AsyncGenerator[EncodeResult]:
    """Yield vectors as they are computed: of a long text or document in chunks, the first chunks
    while later pages are read.

    Each `EncodeResult` has the next rows. With `chunking`, `result.chunks[0]` is of item
    `result.first_item`, and the next result may have more of it; without, row 0 is of that item.
    The results add up to that of `encode`, which explains the arguments. The call is one request
    and is not retried. Raises ShoalError.
    """
    encoding = Encoding(
        role,
        representations,
        data_type,
        dimensions,
        normalize,
        instruction,
        chunking=chunking,
        expect_embedding_id=expect_embedding_id,
    )
    parts = EncodeParts(EncodePlan(items, encoding, model, options))
    seconds = client._caller.seconds(options.get("timeout"))
    return client._caller.stream(
        ENCODE_STREAM, parts.request(), lambda reply: [parts.take(reply)], seconds=seconds
    )


@with_options
async def score(
    client: ClientBase,
    model: str,
    query: Item,
    documents: Items,
    *,
    instruction: str = "",
    scale: Scale | None = None,
    top_n: int = 0,
    writable: bool = False,
    **options: Unpack[LongTextOptions],
) -> ScoreResult:
    """Score how relevant each document is to the query: `scores` in document order, and the
    `top_n` best (0: all) as `ranking`.

    `scale`: "logit" or "probability", default the model's own. With `truncation` "windows", the
    best score of a document's windows counts. Other arguments as for `encode`. Raises ShoalError.
    """
    scoring = Scoring(query, instruction, scale, top_n)
    result = await client._caller.run(ScorePlan(documents, scoring, model, options), options)
    return results.writable(result) if writable else result


@with_options
async def extract(
    client: ClientBase,
    model: str,
    items: Items,
    task: Task,
    **options: Unpack[LongTextOptions],
) -> ExtractResult:
    """Run `task` (`Entities`, `Classify`, `Relations`, `Regions`, `ReadText` or a `Schema`) on
    each item. With `truncation` "windows", here and for the verbs below, results are those of the
    whole text. Raises ShoalError.
    """
    return await client._caller.run(ExtractPlan(items, task, model, options), options)


@with_options
def extract_stream(
    client: ClientBase,
    model: str,
    items: Items,
    task: ReadText,
    **options: Unpack[StreamOptions],
) -> AsyncGenerator[Delta | ExtractResult]:
    """Generate text and stream it: yield `Delta`s, and finally the whole `ExtractResult`.

    Models that generate no text, use beam search or return regions yield only the result. The call
    is one request and is not retried. Raises ShoalError.
    """
    plan = ExtractPlan(items, task, model, options)
    seconds = client._caller.seconds(options.get("timeout"))
    return client._caller.stream(EXTRACT_STREAM, plan.whole(), plan.written, seconds=seconds)


@with_options
async def entities(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str] = (),
    *,
    threshold: float | None = None,
    flat: bool | None = None,
    aggregation: Aggregation | None = None,
    **options: Unpack[LongTextOptions],
) -> ExtractResult:
    """Find named entities: `result[i].entities`, in order of their start. `extract` with
    `Entities(...)`. Raises ShoalError.
    """
    task = Entities(labels=labels, threshold=threshold, flat=flat, aggregation=aggregation)
    return await client._caller.run(ExtractPlan(items, task, model, options), options)


@with_options
async def classify(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str] = (),
    *,
    multi_label: bool | None = None,
    threshold: float | None = None,
    hypothesis: str = "",
    among_labels: bool = False,
    **options: Unpack[LongTextOptions],
) -> ExtractResult:
    """Classify items: `result[i].labels`, best first. `extract` with `Classify(...)`. Raises
    ShoalError.
    """
    task = Classify(
        labels=labels,
        multi_label=multi_label,
        threshold=threshold,
        hypothesis=hypothesis,
        among_labels=among_labels,
    )
    return await client._caller.run(ExtractPlan(items, task, model, options), options)


@with_options
async def relations(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str],
    *,
    entity_labels: Sequence[str] = (),
    entities: Sequence[Sequence[Given]] = (),
    threshold: float | None = None,
    **options: Unpack[LongTextOptions],
) -> ExtractResult:
    """Find relations between entities: `result[i].relations`, best first. `extract` with
    `Relations(...)`. Raises ShoalError.

    A model either finds the entities by `entity_labels`, or is given them: `entities` has a list
    for each item, of `(start, end)`, `(start, end, label)` or the `Entity` objects of another
    model's result.
    """
    task = Relations(
        labels=labels, entity_labels=entity_labels, threshold=threshold, entities=entities
    )
    return await client._caller.run(ExtractPlan(items, task, model, options), options)

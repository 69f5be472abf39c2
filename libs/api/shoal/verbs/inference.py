"""The verbs of inference. See `shoal.verbs` for how clients get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal import results
from shoal.calls.caller import Progress
from shoal.requests.arguments import Options
from shoal.requests.encode import EncodePlan, Encoding
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
    LongText,
    OnInvalid,
    Priority,
    Relations,
    Role,
    Scale,
    Task,
    Truncation,
)
from shoal.verbs.base import ClientBase


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
    truncation: Truncation | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
    writable: bool = False,
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
        truncation: "none" refuses items that are too long, "end" (default) and "start" cut there.
        adapter: A LoRA adapter of the model, `org/name`, or the name of a task with an adapter in
            the checkpoint.
        pool: The workers to serve the call; default as in the mesh's catalog.
        priority: "interactive" (default) or "bulk".
        on_invalid: "skip": an item that is empty, too long or not a text does not fail the call;
            its row is NaN, and `result.skipped` has the reason.
        on_progress: Called as `on_progress(done, total)` after each request of a long list.
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
    options = Options(model, truncation, adapter, pool, priority, on_invalid)
    items = list(items) if both_models and isinstance(items, Iterator) else items
    plan = EncodePlan(items, encoding, options)
    result = await client._caller.run(plan, timeout=timeout, on_progress=on_progress)
    result = results.writable(result) if writable else result
    if not both_models or result.alias is None or not result.alias.other_model:
        return result
    other = await client._caller.run(
        EncodePlan(
            items,
            replace(encoding, expect_embedding_id=""),
            replace(options, model=result.alias.other_model),
        ),
        timeout=timeout,
    )
    return replace(result, other=results.writable(other) if writable else other)


async def score(
    client: ClientBase,
    model: str,
    query: Item,
    documents: Items,
    *,
    instruction: str = "",
    scale: Scale | None = None,
    top_n: int = 0,
    truncation: LongText | None = None,
    window_overlap: int | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
    writable: bool = False,
) -> ScoreResult:
    """Score how relevant each document is to the query: `scores` in document order, and the
    `top_n` best (0: all) as `ranking`.

    `scale`: "logit" or "probability", default the model's own. `truncation`: also "windows": the
    model reads long documents in overlapping windows, and the best score of a document's windows
    counts; `window_overlap` is how many tokens a window repeats of the one before (default 256, or
    a quarter of a shorter window). Other arguments as for `encode`. Raises ShoalError.
    """
    scoring = Scoring(query, instruction, scale, top_n)
    plan = ScorePlan(
        documents,
        scoring,
        Options(model, truncation, adapter, pool, priority, on_invalid, window_overlap),
    )
    result = await client._caller.run(plan, timeout=timeout, on_progress=on_progress)
    return results.writable(result) if writable else result


async def extract(
    client: ClientBase,
    model: str,
    items: Items,
    task: Task,
    *,
    truncation: LongText | None = None,
    window_overlap: int | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> ExtractResult:
    """Run `task` (`Entities`, `Classify`, `Relations`, `Regions`, `ReadText` or a `Schema`) on
    each item. `truncation` and `window_overlap` as for `score`, here and for the verbs below: with
    "windows", results are those of the whole text. Raises ShoalError.
    """
    plan = ExtractPlan(
        items, task, Options(model, truncation, adapter, pool, priority, on_invalid, window_overlap)
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def entities(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str] = (),
    *,
    threshold: float | None = None,
    flat: bool | None = None,
    aggregation: Aggregation | None = None,
    truncation: LongText | None = None,
    window_overlap: int | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
) -> ExtractResult:
    """Find named entities: `result[i].entities`, in order of their start. `extract` with
    `Entities(...)`. Raises ShoalError.
    """
    task = Entities(labels=labels, threshold=threshold, flat=flat, aggregation=aggregation)
    plan = ExtractPlan(
        items, task, Options(model, truncation, adapter, pool, priority, on_invalid, window_overlap)
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


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
    truncation: LongText | None = None,
    window_overlap: int | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
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
    plan = ExtractPlan(
        items, task, Options(model, truncation, adapter, pool, priority, on_invalid, window_overlap)
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)


async def relations(
    client: ClientBase,
    model: str,
    items: Items,
    labels: Sequence[str],
    *,
    entity_labels: Sequence[str] = (),
    entities: Sequence[Sequence[Given]] = (),
    threshold: float | None = None,
    truncation: LongText | None = None,
    window_overlap: int | None = None,
    adapter: str = "",
    pool: str = "",
    priority: Priority | None = None,
    on_invalid: OnInvalid = "raise",
    timeout: float | None = None,
    on_progress: Progress | None = None,
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
    plan = ExtractPlan(
        items, task, Options(model, truncation, adapter, pool, priority, on_invalid, window_overlap)
    )
    return await client._caller.run(plan, timeout=timeout, on_progress=on_progress)

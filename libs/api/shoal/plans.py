"""From a verb's arguments to its requests. Pure.

The router validates; here only what cannot be put into a message at all is refused, with the same InvalidInput and field path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from shoal import codec, gaps, parts
from shoal.call import One, Plan
from shoal.errors import InvalidInput
from shoal.results import DataType, EncodeResult, Entity, ExtractResult, Form, ScoreResult, Skipped
from shoal.streams import EncodeSink, Rows, is_large
from shoal.transport import ENCODE, ENCODE_STREAM, EXTRACT, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import tensor_pb2

# A text, or the bytes of a picture's file (PNG, JPEG, WebP).
Item = str | bytes
Items = Item | Iterable[Item]
Role = Literal["query", "document"]
Truncation = Literal["none", "end", "start"]
Priority = Literal["interactive", "bulk"]
Scale = Literal["logit", "probability"]
# What an item that is empty, too long (truncation "none") or no text does: it fails the call, or its row says nothing.
OnInvalid = Literal["raise", "skip"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
# An entity that the caller knows: start, end (exclusive) in code points, and its label if it has one; or one of a model's answer.
Given = Entity | tuple[int, int] | tuple[int, int, str]

E = TypeVar("E")
M = TypeVar("M")

_SCORE_BYTES = 16
"""That a label of an answer is longer than its name, as routers count."""

_ROLES = {"query": pb.ROLE_QUERY, "document": pb.ROLE_DOCUMENT}
_FORMS = {
    "dense": pb.REPRESENTATION_DENSE,
    "sparse": pb.REPRESENTATION_SPARSE,
    "multi_vector": pb.REPRESENTATION_MULTI_VECTOR,
}
_TRUNCATIONS = {"none": pb.TRUNCATION_NONE, "end": pb.TRUNCATION_END, "start": pb.TRUNCATION_START}
_PRIORITIES = {"interactive": pb.PRIORITY_INTERACTIVE, "bulk": pb.PRIORITY_BULK}
_SCALES = {"logit": pb.SCORE_SCALE_LOGIT, "probability": pb.SCORE_SCALE_PROBABILITY}
_AGGREGATIONS = {
    "none": pb.AGGREGATION_NONE,
    "simple": pb.AGGREGATION_SIMPLE,
    "first": pb.AGGREGATION_FIRST,
    "average": pb.AGGREGATION_AVERAGE,
    "max": pb.AGGREGATION_MAX,
}
_KINDS = {
    "caption": pb.TextTask.KIND_CAPTION,
    "detailed_caption": pb.TextTask.KIND_DETAILED_CAPTION,
    "ocr": pb.TextTask.KIND_OCR,
}
_DATA_TYPES = {
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "int8": tensor_pb2.DATA_TYPE_INT8,
    "uint8": tensor_pb2.DATA_TYPE_UINT8,
    "binary": tensor_pb2.DATA_TYPE_BINARY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entities:
    """Find named things in text. `labels`: required by zero-shot models, else a subset of the model's own. `threshold` 0..1.
    `flat`: no overlaps. `aggregation`: how the tokens of a word agree, for models that label tokens."""

    labels: Sequence[str] = ()
    threshold: float | None = None
    flat: bool | None = None
    aggregation: Aggregation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Classify:
    """Say which labels fit. `multi_label`: each on its own (sigmoid) instead of against the others (softmax). `hypothesis`: what is
    put to a zero-shot or embedding model for each label, `{}` standing for it. `among_labels`: shares are among `labels` and add up
    to 1, instead of among all that the model has."""

    labels: Sequence[str] = ()
    multi_label: bool | None = None
    threshold: float | None = None
    hypothesis: str = ""
    among_labels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """Find how things relate. `entity_labels`: kinds of things between which they are looked for, for models that find them.
    `entities`: the things themselves, a list for each item, for models that are given them. `threshold` 0..1, default the model's
    own."""

    labels: Sequence[str]
    entity_labels: Sequence[str] = ()
    threshold: float | None = None
    entities: Sequence[Sequence[Given]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Find things in pictures. `threshold` 0..1, default the model's own."""

    labels: Sequence[str]
    threshold: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """Describe a picture or read what stands in it. `max_tokens` 0: the model's own."""

    kind: Literal["caption", "detailed_caption", "ocr"] = "caption"
    max_tokens: int = 0


Task = Entities | Classify | Relations | Regions | ReadText


def encode(
    model: str,
    items: Items,
    *,
    role: Role | None,
    representations: Form | Sequence[Form],
    data_type: DataType | None,
    dimensions: int,
    normalize: bool | None,
    instruction: str,
    truncation: Truncation | None,
    adapter: str,
    pool: str,
    priority: Priority | None,
    on_invalid: OnInvalid,
) -> Plan[pb.EncodeRequest, pb.EncodeResponse, EncodeResult]:
    forms: Sequence[Form] = [representations] if isinstance(representations, str) else representations
    frame = _message(
        pb.EncodeRequest,
        model=model,
        role=_choice("role", role, _ROLES),
        representations=[_choice("representations", form, _FORMS) for form in forms],
        data_type=_choice("data_type", data_type, _DATA_TYPES),
        dimensions=dimensions,
        normalize=normalize,
        instruction=instruction,
        truncation=_choice("truncation", truncation, _TRUNCATIONS),
        adapter=adapter,
        pool=pool,
        priority=_choice("priority", priority, _PRIORITIES),
    )
    listed = _listed(items)

    def build(places: Sequence[int]) -> pb.EncodeRequest:
        request = pb.EncodeRequest()
        request.CopyFrom(frame)
        request.items.extend(_items("items", listed, places))
        return request

    stored, rows = data_type or "float32", Rows(len(listed))

    def sink(places: Sequence[int]) -> EncodeSink:
        is_block = isinstance(places, range)  # else some are left out, and rows have other places than items
        return EncodeSink(rows, places[0], len(places)) if is_block else EncodeSink(Rows(len(places)), 0, len(places))

    return Plan(
        ENCODE,
        "items",
        _lengths(listed),
        build,
        sink,
        partial(parts.merge_encode, nothing=gaps.no_vectors(forms, stored, dimensions)),
        gaps.spread_encode,
        _left_out("items", listed, on_invalid),
        repeated=frame.ByteSize(),
        stream=ENCODE_STREAM,
        is_large=partial(is_large, forms=forms, data_type=stored, dimensions=dimensions),
    )


def score(
    model: str,
    query: Item,
    documents: Items,
    *,
    instruction: str,
    scale: Scale | None,
    top_n: int,
    truncation: Truncation | None,
    adapter: str,
    pool: str,
    priority: Priority | None,
    on_invalid: OnInvalid,
) -> Plan[pb.ScoreRequest, pb.ScoreResponse, ScoreResult]:
    frame = _message(
        pb.ScoreRequest,
        model=model,
        query=_item("query", query),
        instruction=instruction,
        scale=_choice("scale", scale, _SCALES),
        top_n=top_n,
        truncation=_choice("truncation", truncation, _TRUNCATIONS),
        adapter=adapter,
        pool=pool,
        priority=_choice("priority", priority, _PRIORITIES),
    )
    listed = _listed(documents)

    def build(places: Sequence[int]) -> pb.ScoreRequest:
        request = pb.ScoreRequest()
        request.CopyFrom(frame)
        request.documents.extend(_items("documents", listed, places))
        return request

    merge = partial(parts.merge_score, top_n=top_n)
    left_out, repeated = _left_out("documents", listed, on_invalid), frame.ByteSize()
    return Plan(SCORE, "documents", _lengths(listed), build, _score, merge, gaps.spread_score, left_out, repeated)


def extract(
    model: str,
    items: Items,
    task: Task,
    *,
    truncation: Truncation | None,
    adapter: str,
    pool: str,
    priority: Priority | None,
    on_invalid: OnInvalid,
) -> Plan[pb.ExtractRequest, pb.ExtractResponse, ExtractResult]:
    frame = _message(
        pb.ExtractRequest,
        model=model,
        truncation=_choice("truncation", truncation, _TRUNCATIONS),
        adapter=adapter,
        pool=pool,
        priority=_choice("priority", priority, _PRIORITIES),
        **_task(task),
    )
    listed = _listed(items)
    given = task.entities if isinstance(task, Relations) else ()
    if given and len(given) != len(listed):
        raise InvalidInput(f"entities has {len(given)} lists for {len(listed)} items; it must have one for each", field="entities")

    def build(places: Sequence[int]) -> pb.ExtractRequest:
        request = pb.ExtractRequest()
        request.CopyFrom(frame)
        request.items.extend(_items("items", listed, places))
        if given:
            for number, (item, index) in enumerate(zip(request.items, places, strict=True)):
                item.entities.extend(_entities(f"items[{number}].entities", given[index]))
        return request

    classify = frame.classify
    return Plan(
        EXTRACT,
        "items",
        _lengths(listed),
        build,
        _extracted,
        parts.merge_extract,
        gaps.spread_extract,
        _left_out("items", listed, on_invalid),
        repeated=frame.ByteSize() + len(classify.hypothesis.encode()) * len(classify.labels),
        answered=frame.ByteSize() + _SCORE_BYTES * _labels(frame),
    )


def _labels(frame: pb.ExtractRequest) -> int:
    """How many labels an answer may repeat for each item."""
    named = (
        frame.entities.labels,
        frame.classify.labels,
        frame.relations.labels,
        frame.relations.entity_labels,
        frame.regions.labels,
    )
    return sum(map(len, named))


def _score(places: Sequence[int]) -> One[pb.ScoreResponse, ScoreResult]:
    return One(codec.score_result)


def _extracted(places: Sequence[int]) -> One[pb.ExtractResponse, ExtractResult]:
    return One(codec.extract_result)


def _task(task: Task) -> dict[str, object]:
    """The one field of the request's task that is set."""
    match task:
        case Entities():
            aggregation = _choice("entities.aggregation", task.aggregation, _AGGREGATIONS)
            return {
                "entities": _message(
                    pb.EntitiesTask, labels=task.labels, threshold=task.threshold, flat=task.flat, aggregation=aggregation
                )
            }
        case Classify():
            return {
                "classify": _message(
                    pb.ClassifyTask,
                    labels=task.labels,
                    multi_label=task.multi_label,
                    threshold=task.threshold,
                    hypothesis=task.hypothesis,
                    among_labels=task.among_labels,
                )
            }
        case Relations():
            return {
                "relations": _message(
                    pb.RelationsTask, labels=task.labels, entity_labels=task.entity_labels, threshold=task.threshold
                )
            }
        case Regions():
            return {"regions": _message(pb.RegionsTask, labels=task.labels, threshold=task.threshold)}
        case ReadText():
            return {"text": _message(pb.TextTask, kind=_choice("text.kind", task.kind, _KINDS), max_tokens=task.max_tokens)}


def _message(kind: Callable[..., M], /, **values: object) -> M:
    """A message, or InvalidInput where a value does not fit its field (a negative count, a lone surrogate, a wrong type)."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"an argument does not fit the request: {error}") from None


def _choice(field: str, value: str | None, choices: Mapping[str, E]) -> E | None:
    """The enum value of a name; None leaves the field at its default."""
    if value is None:
        return None
    if value not in choices:
        raise InvalidInput(f"{field} is {value!r}; it must be one of {', '.join(choices)}", field=field)
    return choices[value]


def _listed(items: Items) -> list[Item]:
    return [items] if isinstance(items, (str, bytes)) else list(items)


def _lengths(items: Sequence[Item]) -> list[int]:
    """Characters (or bytes of a picture); what is neither fails in `_item`, with its path."""
    return [len(item) if isinstance(item, (str, bytes)) else 0 for item in items]


def _left_out(name: str, items: Sequence[Item], on_invalid: OnInvalid) -> list[Skipped] | None:
    """Those that no request needs to find out about: the empty ones, and what is neither a text nor a picture."""
    if on_invalid not in ("raise", "skip"):
        raise InvalidInput(f"on_invalid is {on_invalid!r}; it must be one of raise, skip", field="on_invalid")
    if on_invalid == "raise":
        return None
    found = ((index, _problem(f"{name}[{index}]", item)) for index, item in enumerate(items))
    return [Skipped(index, InvalidInput.reason, problem) for index, problem in found if problem]


def _problem(path: str, item: Item) -> str:
    """What is wrong with it; empty: nothing that can be seen here."""
    if isinstance(item, (str, bytes)) and not item:
        return f"{path} is empty"
    try:
        _item(path, item)
    except InvalidInput as error:
        return error.message
    return ""


def _items(name: str, items: Sequence[Item], places: Sequence[int]) -> list[pb.Item]:
    # Paths are relative to the part, as the router's are; `ShoalError.move` makes them absolute.
    return [_item(f"{name}[{number}]", items[index]) for number, index in enumerate(places)]


def _entities(path: str, given: Sequence[Given]) -> list[pb.Entity]:
    return [_entity(f"{path}[{index}]", entity) for index, entity in enumerate(given)]


def _entity(path: str, entity: Given) -> pb.Entity:
    try:
        start, end, label = (entity.start, entity.end, entity.label) if isinstance(entity, Entity) else (*entity, "")[:3]
        return pb.Entity(start=start, end=end, label=label)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{path} does not fit the request: {error}", field=path) from None


def _item(path: str, item: Item) -> pb.Item:
    if isinstance(item, bytes):
        return pb.Item(image=pb.Image(data=item))
    if not isinstance(item, str):
        raise InvalidInput(f"{path} is a {type(item).__name__}; it must be a str, or the bytes of a picture's file", field=path)
    try:
        return pb.Item(text=item)
    except ValueError:
        raise InvalidInput(f"{path} is not valid Unicode: it holds half of a surrogate pair", field=f"{path}.text") from None

"""The plan of `extract` and of the verbs that are `extract` with one task. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from google.protobuf.message import Message

from shoal.errors import InvalidInput
from shoal.extractions import Delta, ToolCall
from shoal.options import LongTextOptions, StreamOptions
from shoal.requests import codec, words
from shoal.requests.items import entity_messages, enum_value, item_list, message
from shoal.requests.merging import merge_extract, with_skipped_extractions
from shoal.requests.plan import ItemPlan, SingleReply, request_frame
from shoal.results import ExtractResult, Skipped
from shoal.schema import Schema, SchemaClassification, SchemaField, SchemaLabel, SchemaStructure
from shoal.tasks import Classify, Entities, Given, Items, ReadText, Regions, Relations, Task, Turn
from shoal.transport.methods import EXTRACT
from shoal.v1 import inference_pb2 as pb

_FOUND_BYTES = 16 << 10
"""Minimum answer bytes of each item where the size depends on the findings: some hundred results. A
request has no more items than that allows, since all of them share the answer's limit.
"""
_DEFAULT_TOKENS = 256
_GENERATED_TOKEN_BYTES = 4
"""Routers let 1,048,576 tokens be written for a request: a quarter of the bytes of an answer."""
_SCORE_BYTES = 16
"""Bytes that routers count for a label or name of an answer in addition to its own bytes."""
_INSTANCES = 19
"""Instances for which routers count that an answer repeats a relation or a field of a schema."""
_ITEM_ROLES = {"user": pb.Turn.ROLE_UNSPECIFIED, "tool": pb.Turn.ROLE_TOOL}
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class ExtractPlan(ItemPlan[pb.ExtractRequest, pb.ExtractResponse, ExtractResult]):
    """A call of `extract`. Raises InvalidInput for arguments that no request can hold."""

    method, name = EXTRACT, "items"

    def __init__(
        self, items: Items, task: Task, model: str, options: LongTextOptions | StreamOptions
    ) -> None:
        field, task_message = _task(task)
        frame = request_frame(pb.ExtractRequest, model, options, **{field: task_message})
        listed = item_list(items)
        self._entities = _given_entities(task, len(listed))
        self._seed = (
            message(pb.Item, seed=task.seed)
            if isinstance(task, ReadText) and task.seed is not None
            else None
        )
        super().__init__(
            frame,
            listed,
            options,
            further_bytes=len(frame.classify.hypothesis.encode()) * len(frame.classify.labels),
            answered_bytes=_answered_bytes(frame),
        )

    def build(self, places: Sequence[int]) -> pb.ExtractRequest:
        request = super().build(places)
        if self._seed is not None:
            for item in request.items:
                item.MergeFrom(self._seed)
        if self._entities:
            for number, (item, index) in enumerate(zip(request.items, places, strict=True)):
                item.entities.extend(
                    entity_messages(f"items[{number}].entities", self._entities[index])
                )
        return request

    @staticmethod
    def written(reply: pb.ExtractStreamResponse) -> Iterator[Delta | ExtractResult]:
        """Yield the contents of one message of a stream."""
        for delta in reply.deltas:
            yield Delta(delta.item, delta.text, delta.page, delta.restarted)
        if reply.HasField("response"):
            yield codec.extract_result(reply.response)

    def sink(self, places: Sequence[int]) -> SingleReply[pb.ExtractResponse, ExtractResult]:
        return SingleReply(codec.extract_result)

    def merge(self, results: Sequence[ExtractResult]) -> ExtractResult:
        return merge_extract(results)

    def insert_skipped(
        self, result: ExtractResult, kept: Sequence[int], skipped: Sequence[Skipped]
    ) -> ExtractResult:
        return with_skipped_extractions(result, kept, skipped)


def _given_entities(task: Task, items: int) -> Sequence[Sequence[Given]]:
    """Return the entities that the caller gives for each item; empty if there are none."""
    given = task.entities if isinstance(task, Relations) else ()
    if given and len(given) != items:
        raise InvalidInput(
            f"entities has {len(given)} lists for {items} items; it must have one for each",
            field="entities",
        )
    return given


def _answered_bytes(frame: pb.ExtractRequest) -> int:
    """Return the bytes that an answer may have for each item; routers limit requests by it."""
    if frame.HasField("text"):
        return _GENERATED_TOKEN_BYTES * (frame.text.max_tokens or _DEFAULT_TOKENS)
    if frame.HasField("structure"):
        return max(_FOUND_BYTES, schema_bytes(frame.structure))
    labels = frame.ByteSize() + _SCORE_BYTES * _label_count(frame)
    if frame.HasField("regions"):  # which a model may generate, as one text for each label
        labels += _GENERATED_TOKEN_BYTES * _DEFAULT_TOKENS * len(frame.regions.labels)
    return labels if frame.HasField("classify") else max(_FOUND_BYTES, labels)


def _label_count(frame: pb.ExtractRequest) -> int:
    """Return how many labels an answer may repeat for each item."""
    return sum(
        map(
            len,
            (
                frame.entities.labels,
                frame.classify.labels,
                frame.relations.labels,
                frame.relations.entity_labels,
                frame.regions.labels,
            ),
        )
    )


def _task(task: Task) -> tuple[str, Message]:
    """Return the field of the request for this task, and its message."""
    match task:
        case Entities():
            aggregation = enum_value("entities.aggregation", task.aggregation, words.AGGREGATIONS)
            return "entities", message(
                pb.EntitiesTask,
                labels=_labels(task.labels, "entities.labels"),
                threshold=task.threshold,
                flat=task.flat,
                aggregation=aggregation,
            )
        case Classify():
            return "classify", message(
                pb.ClassifyTask,
                labels=_labels(task.labels, "classify.labels"),
                multi_label=task.multi_label,
                threshold=task.threshold,
                hypothesis=task.hypothesis,
                among_labels=task.among_labels,
            )
        case Relations():
            return "relations", message(
                pb.RelationsTask,
                labels=_labels(task.labels, "relations.labels"),
                entity_labels=_labels(task.entity_labels, "relations.entity_labels"),
                threshold=task.threshold,
            )
        case Regions():
            return "regions", message(
                pb.RegionsTask,
                labels=_labels(task.labels, "regions.labels"),
                threshold=task.threshold,
            )
        case Schema():
            return "structure", schema_message(task)
        case ReadText():
            kind = enum_value("text.kind", task.kind, words.TEXT_KINDS)
            layer = enum_value("text.text_layer", task.text_layer, words.TEXT_LAYERS)
            return "text", message(
                pb.TextTask,
                kind=kind,
                max_tokens=task.max_tokens,
                text_layer=layer,
                instruction=task.instruction,
                region=_box(task.region),
                json_schema=_json(task.schema, "text.json_schema"),
                turns=[_turn(number, turn) for number, turn in enumerate(task.turns)],
                template_values=_json(task.template_values, "text.template_values"),
                sampling=_sampling(task),
                stop=[task.stop] if isinstance(task.stop, str) else task.stop,
                top_logprobs=task.top_logprobs,
                raw_prompt=task.raw_prompt,
                tools=_tools(task.tools),
                tool_choice=pb.TextTask.TOOL_CHOICE_REQUIRED
                if task.tool_choice == "required"
                else None,
                tool=None if task.tool_choice in ("auto", "required") else task.tool_choice,
                single_tool_call=task.single_tool_call,
                item_role=enum_value("text.item_role", task.item_role, _ITEM_ROLES),
            )


def _labels(labels: Iterable[str], field: str) -> list[str]:
    """Return the labels of a task; a single str is one label, not one for each of its characters.

    Raises:
        InvalidInput: The labels are a mapping, of which only the keys would be sent.
    """
    if isinstance(labels, Mapping):
        raise InvalidInput(
            f"{field} is a {type(labels).__name__}; it must be a list of labels", field=field
        )
    return [labels] if isinstance(labels, str) else list(labels)


def _sampling(task: ReadText) -> pb.Sampling | None:
    given = {name: value for name in _SAMPLING if (value := getattr(task, name)) is not None}
    return message(pb.Sampling, **given) if given else None


def _tools(tools: Sequence[Mapping[str, object]]) -> str:
    if not tools:
        return ""
    try:
        return json.dumps([dict(tool) for tool in tools], ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"text.tools is not JSON: {error}", field="text.tools") from None


def _turn(number: int, turn: Turn) -> pb.Turn:
    field = f"text.turns[{number}]"
    if not isinstance(turn, tuple | list) or not 2 <= len(turn) <= 3:
        raise InvalidInput(
            (
                f'{field} must be a pair such as ("user", "Hello"), with the calls of an assistant '
                "after it"
            ),
            field=field,
        )
    role, text, *calls = turn
    if calls and not all(isinstance(call, ToolCall) for call in calls[0]):
        raise InvalidInput(f"{field}[2] must be a list of ToolCall", field=f"{field}.tool_calls")
    if not isinstance(text, str):
        raise InvalidInput(
            f"{field}[1] must be a str: only the item itself may have images", field=f"{field}.text"
        )
    return message(
        pb.Turn,
        role=enum_value(f"{field}.role", role, words.SPEAKERS),
        text=text,
        tool_calls=_calls(calls),
    )


def _calls(calls: Sequence[Sequence[ToolCall]]) -> list[pb.ToolCall]:
    return [
        message(pb.ToolCall, name=call.name, arguments=call.arguments)
        for each in calls
        for call in each
    ]


def _box(region: tuple[float, float, float, float] | None) -> pb.Box | None:
    if region is None:
        return None
    if len(region) != 4:
        raise InvalidInput(
            f"text.region has {len(region)} numbers: left, top, right and bottom are needed",
            field="text.region",
        )
    left, top, right, bottom = region
    return message(pb.Box, left=left, top=top, right=right, bottom=bottom)


def _json(value: Mapping[str, object] | str | None, field: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{field} is not JSON: {error}", field=field) from None


def schema_message(schema: Schema) -> pb.StructureTask:
    """Raise InvalidInput for values that a message cannot hold."""
    return message(
        pb.StructureTask,
        entities=[_label(one) for one in schema.entities],
        classifications=[_classification(one) for one in schema.classifications],
        relations=[_label(one) for one in schema.relations],
        structures=[
            _structure(one, f"structure.structures[{index}]")
            for index, one in enumerate(schema.structures)
        ],
        threshold=schema.threshold,
    )


def schema_bytes(task: pb.StructureTask) -> int:
    """Bytes that an answer may repeat for each item."""
    once = [one.label for one in task.entities]
    once += [
        name
        for one in task.classifications
        for name in (one.name, *(label.label for label in one.labels))
    ]
    often = [one.label for one in task.relations] + [one.name for one in task.structures]
    often += [
        name
        for one in task.structures
        for field in one.fields
        for name in (field.name, *field.choices)
    ]
    return _answered(once) + _INSTANCES * _answered(often)


def _answered(names: Iterable[str]) -> int:
    return sum(_SCORE_BYTES + len(name.encode()) for name in names)


def _label(label: SchemaLabel) -> pb.SchemaLabel:
    return message(
        pb.SchemaLabel, label=label.label, description=label.description, threshold=label.threshold
    )


def _classification(one: SchemaClassification) -> pb.SchemaClassification:
    return message(
        pb.SchemaClassification,
        name=one.name,
        labels=[_label(label) for label in one.labels],
        multi_label=one.multi_label,
        threshold=one.threshold,
        description=one.description,
    )


def _structure(one: SchemaStructure, path: str) -> pb.SchemaStructure:
    fields = [_field(field, f"{path}.fields[{index}]") for index, field in enumerate(one.fields)]
    return message(pb.SchemaStructure, name=one.name, fields=fields)


def _field(field: SchemaField, path: str) -> pb.SchemaField:
    return message(
        pb.SchemaField,
        name=field.name,
        kind=enum_value(f"{path}.dtype", str(field.dtype), words.FIELD_DTYPES),
        choices=field.choices,
        description=field.description,
        threshold=field.threshold,
    )

"""Every request that breaks its contract gets its code, reason and field path, and the next good
one is answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2, worker_pb2

from tests.router.parts import (
    MODEL,
    Client,
    FakeWorker,
    card,
    changed,
    encode_request,
    refused,
    router,
    until,
    vector,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
BINARY = int(tensor_pb2.DATA_TYPE_BINARY)
TEXT = pb.Item(text="a")


def given(*places: tuple[int, int], label: str = "", text: str = "東京 😀") -> pb.Item:
    return pb.Item(
        text=text, entities=[pb.Entity(start=start, end=end, label=label) for start, end in places]
    )


RELATIONS = pb.RelationsTask(labels=["in"])
ENCODE = {
    "no model": (pb.EncodeRequest(items=[TEXT]), "model"),
    "malformed model": (pb.EncodeRequest(model="../../etc/passwd", items=[TEXT]), "model"),
    "revision that is a path": (pb.EncodeRequest(model="a/b@../../x", items=[TEXT]), "model"),
    "revision with an empty part": (pb.EncodeRequest(model="a/b@x//y", items=[TEXT]), "model"),
    "revision of dots": (pb.EncodeRequest(model="a/b@..", items=[TEXT]), "model"),
    "adapter's revision that is a path": (pb.EncodeRequest(model="a/b", adapter="a/b@../x",
    items=[TEXT]), "adapter"),
    "model too long": (pb.EncodeRequest(model="a/" + "b" * 300, items=[TEXT]), "model"),
    "empty list": (encode_request(), "items"),
    "empty text": (encode_request("a", "", "b"), "items[1].text"),
    "item without content": (pb.EncodeRequest(model=MODEL, items=[TEXT, pb.Item()]), "items[1]"),
    "10,001 items": (encode_request(*["a"] * 10_001), "items"),
    "unknown role": (changed(encode_request("a"), role=77), "role"),
    "unknown data type": (changed(encode_request("a"), data_type=99), "data_type"),
    "unknown truncation": (changed(encode_request("a"), truncation=-1), "truncation"),
    "unknown priority": (changed(encode_request("a"), priority=9), "priority"),
    "entities of a text to encode": (pb.EncodeRequest(model=MODEL, items=[TEXT, given((0, 1))]),
    "items[1].entities"),
    "unknown representation": (changed(encode_request("a"), representations=[1, 42]),
    "representations[1]"),
    "unspecified representation": (changed(encode_request("a"), representations=[0]),
    "representations[0]"),
    "dimensions above the model's": (changed(encode_request("a"), dimensions=5), "dimensions"),
    "adapter of no form": (changed(encode_request("a"), adapter="mine/"), "adapter"),
    "adapter too long": (changed(encode_request("a"), adapter="o/" + "a" * 300), "adapter"),
    "pool of no form": (changed(encode_request("a"), pool="l4 spot"), "pool"),
    "instruction too long": (changed(encode_request("a"), instruction="i" * 16_385), "instruction"),
    "more forms than there are": (changed(encode_request("a"), representations=[1] * 4),
    "representations"),
    "text of 4 MiB and a byte": (encode_request("a", "é" * (1 << 21) + "a"), "items[1].text"),
    "too much to read": (changed(encode_request(*["a"] * 10_000), instruction="東" * 16_384),
    "items"),
    "sparse bits": (changed(encode_request("a"), representations=[2], data_type=BINARY,
    model="t/cold"), "data_type"),
}  # fmt: skip

LABEL, FIELD = pb.SchemaLabel(label="a"), pb.SchemaField(name="a")


def schema(**parts: Any) -> pb.ExtractRequest:
    return pb.ExtractRequest(structure=pb.StructureTask(**parts))


def said(text: str = "a", role: int = pb.Turn.ROLE_USER) -> pb.Turn:
    return changed(pb.Turn(text=text), role=role)


def values(text: str) -> pb.TextTask:
    return pb.TextTask(template_values=text)


def written(field: str, **task: Any) -> tuple[pb.ExtractRequest, str]:
    return pb.ExtractRequest(text=pb.TextTask(**task)), field


def tools(*names: str) -> str:
    return json.dumps([{"type": "function", "function": {"name": name}} for name in names])


SAMPLING: list[tuple[str, Any]] = [
    ("temperature", 10.5),
    ("temperature", float("nan")),
    ("top_k", 1 << 31),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
]

EXTRACT = {
    "no task": (pb.ExtractRequest(), "task"),
    "threshold is no number": (
        pb.ExtractRequest(entities=pb.EntitiesTask(threshold=float("nan"))),
        "entities.threshold",
    ),
    "threshold above 1": (
        pb.ExtractRequest(classify=pb.ClassifyTask(threshold=1.5)),
        "classify.threshold",
    ),
    "threshold below 0": (
        pb.ExtractRequest(entities=pb.EntitiesTask(threshold=-0.1)),
        "entities.threshold",
    ),
    "unknown aggregation": (
        pb.ExtractRequest(entities=changed(pb.EntitiesTask(), aggregation=9)),
        "entities.aggregation",
    ),
    "empty label": (
        pb.ExtractRequest(entities=pb.EntitiesTask(labels=["a", ""])),
        "entities.labels[1]",
    ),
    "257 labels": (
        pb.ExtractRequest(classify=pb.ClassifyTask(labels=["a"] * 257)),
        "classify.labels",
    ),
    "hypothesis without place": (
        pb.ExtractRequest(classify=pb.ClassifyTask(hypothesis="it is")),
        "classify.hypothesis",
    ),
    "relations without labels": (
        pb.ExtractRequest(relations=pb.RelationsTask()),
        "relations.labels",
    ),
    "empty entity label": (
        pb.ExtractRequest(relations=pb.RelationsTask(labels=["a"], entity_labels=["b", ""])),
        "relations.entity_labels[1]",
    ),
    "257 entity labels": (
        pb.ExtractRequest(relations=pb.RelationsTask(labels=["a"], entity_labels=["b"] * 257)),
        "relations.entity_labels",
    ),
    "relations' threshold": (
        pb.ExtractRequest(relations=pb.RelationsTask(labels=["a"], threshold=1.5)),
        "relations.threshold",
    ),
    "relations of nothing": (pb.ExtractRequest(relations=RELATIONS), "relations.entity_labels"),
    "entities of a text to classify": (
        pb.ExtractRequest(items=[given((0, 1))], classify=pb.ClassifyTask(labels=["a"])),
        "items[0].entities",
    ),
    "empty entity": (
        pb.ExtractRequest(items=[given((0, 1), (2, 2))], relations=RELATIONS),
        "items[0].entities[1]",
    ),
    "entity from back to front": (
        pb.ExtractRequest(items=[given((2, 1))], relations=RELATIONS),
        "items[0].entities[0]",
    ),
    "entity beyond the text": (
        pb.ExtractRequest(items=[given((0, 4), (3, 5))], relations=RELATIONS),
        "items[0].entities[1]",
    ),
    "entity of 1,001 characters": (
        pb.ExtractRequest(items=[given((0, 1001), text="a" * 1001)], relations=RELATIONS),
        "items[0].entities[0]",
    ),
    "129 entities": (
        pb.ExtractRequest(items=[given(*[(0, 1)] * 129)], relations=RELATIONS),
        "items[0].entities",
    ),
    "entity with a long label": (
        pb.ExtractRequest(items=[given((0, 1), label="a" * 257)], relations=RELATIONS),
        "items[0].entities[0].label",
    ),
    "entities without text": (
        pb.ExtractRequest(items=[given((0, 1), text="")], relations=RELATIONS),
        "items[0].text",
    ),
    "entity with a long text": (
        pb.ExtractRequest(
            items=[pb.Item(text="a", entities=[pb.Entity(end=1, text="a" * 1001)])],
            relations=RELATIONS,
        ),
        "items[0].entities[0].text",
    ),
    "long schema": (
        pb.ExtractRequest(text=pb.TextTask(json_schema="é" * 16_385)),
        "text.json_schema",
    ),
    "too many turns": (pb.ExtractRequest(text=pb.TextTask(turns=[said()] * 129)), "text.turns"),
    "long turns": (
        pb.ExtractRequest(text=pb.TextTask(turns=[said(), said("é" * 65_536)])),
        "text.turns",
    ),
    "an empty turn": (
        pb.ExtractRequest(text=pb.TextTask(turns=[said(), said(" \n")])),
        "text.turns[1].text",
    ),
    "a turn of nobody": (
        pb.ExtractRequest(text=pb.TextTask(turns=[said(role=0)])),
        "text.turns[0].role",
    ),
    "a turn of somebody": (
        pb.ExtractRequest(text=pb.TextTask(turns=[said(role=9)])),
        "text.turns[0].role",
    ),
    "text layers in a conversation": (
        pb.ExtractRequest(text=pb.TextTask(turns=[said()], text_layer=pb.TextTask.TEXT_LAYER_ONLY)),
        "text.text_layer",
    ),
    "text layers by a schema": (
        pb.ExtractRequest(
            text=pb.TextTask(json_schema="{}", text_layer=pb.TextTask.TEXT_LAYER_ONLY)
        ),
        "text.text_layer",
    ),
    "long values for a template": (
        pb.ExtractRequest(text=values(f'{{"a": "{"b" * 4096}"}}')),
        "text.template_values",
    ),
    "values for a template cut off": (
        pb.ExtractRequest(text=values('{"a": ')),
        "text.template_values",
    ),
    "values for a template in a list": (
        pb.ExtractRequest(text=values("[1]")),
        "text.template_values",
    ),
    "nested values for a template": (
        pb.ExtractRequest(text=values('{"a": {}}')),
        "text.template_values",
    ),
    "deep values for a template": (
        pb.ExtractRequest(text=values("[" * 4000)),
        "text.template_values",
    ),
    "long label": (
        pb.ExtractRequest(entities=pb.EntitiesTask(labels=["a", "b" * 1025])),
        "entities.labels[1]",
    ),
    "long label of a region": (
        pb.ExtractRequest(regions=pb.RegionsTask(labels=["b" * 1025])),
        "regions.labels[0]",
    ),
    "long entity label": (
        pb.ExtractRequest(relations=pb.RelationsTask(labels=["a"], entity_labels=["b" * 1025])),
        "relations.entity_labels[0]",
    ),
    "long hypothesis": (
        pb.ExtractRequest(classify=pb.ClassifyTask(labels=["a"], hypothesis="{}" + "b" * 1023)),
        "classify.hypothesis",
    ),
    "picture of 16 MiB and a byte": (
        pb.ExtractRequest(
            items=[pb.Item(image=pb.Image(data=bytes((1 << 24) + 1)))], text=pb.TextTask()
        ),
        "items[0].image.data",
    ),
    "unknown kind of text": (pb.ExtractRequest(text=changed(pb.TextTask(), kind=9)), "text.kind"),
    "a schema that asks for nothing": (
        pb.ExtractRequest(structure=pb.StructureTask()),
        "structure",
    ),
    "label twice": (schema(entities=[LABEL, LABEL]), "structure.entities[1].label"),
    "empty relation": (schema(relations=[pb.SchemaLabel()]), "structure.relations[0].label"),
    "long name of a schema": (
        schema(relations=[pb.SchemaLabel(label="a" * 257)]),
        "structure.relations[0].label",
    ),
    "long description": (
        schema(entities=[pb.SchemaLabel(label="a", description="a" * 1025)]),
        "structure.entities[0].description",
    ),
    "threshold of a schema": (schema(entities=[LABEL], threshold=1.5), "structure.threshold"),
    "threshold of a label": (
        schema(entities=[pb.SchemaLabel(label="a", threshold=float("nan"))]),
        "structure.entities[0].threshold",
    ),
    "257 labels of a schema": (
        schema(entities=[pb.SchemaLabel(label=str(number)) for number in range(257)]),
        "structure.entities",
    ),
    "65 relations": (
        schema(relations=[pb.SchemaLabel(label=str(number)) for number in range(65)]),
        "structure.relations",
    ),
    "33 questions": (
        schema(
            classifications=[
                pb.SchemaClassification(name=str(number), labels=[LABEL]) for number in range(33)
            ]
        ),
        "structure.classifications",
    ),
    "question without labels": (
        schema(classifications=[pb.SchemaClassification(name="a")]),
        "structure.classifications[0].labels",
    ),
    "threshold of a question's label": (
        schema(
            classifications=[
                pb.SchemaClassification(name="a", labels=[pb.SchemaLabel(label="b", threshold=0.5)])
            ]
        ),
        "structure.classifications[0].labels[0].threshold",
    ),
    "17 structures": (
        schema(
            structures=[
                pb.SchemaStructure(name=str(number), fields=[FIELD]) for number in range(17)
            ]
        ),
        "structure.structures",
    ),
    "structure without fields": (
        schema(structures=[pb.SchemaStructure(name="a")]),
        "structure.structures[0].fields",
    ),
    "33 fields": (
        schema(
            structures=[
                pb.SchemaStructure(
                    name="a", fields=[pb.SchemaField(name=str(number)) for number in range(33)]
                )
            ]
        ),
        "structure.structures[0].fields",
    ),
    "field twice": (
        schema(structures=[pb.SchemaStructure(name="a", fields=[FIELD, FIELD])]),
        "structure.structures[0].fields[1].name",
    ),
    "unknown kind of field": (
        schema(
            structures=[
                pb.SchemaStructure(name="a", fields=[changed(pb.SchemaField(name="b"), kind=9)])
            ]
        ),
        "structure.structures[0].fields[0].kind",
    ),
    "choice twice": (
        schema(
            structures=[
                pb.SchemaStructure(name="a", fields=[pb.SchemaField(name="b", choices=["c", "c"])])
            ]
        ),
        "structure.structures[0].fields[0].choices[1]",
    ),
    "65 choices": (
        schema(
            structures=[
                pb.SchemaStructure(
                    name="a", fields=[pb.SchemaField(name="b", choices=map(str, range(65)))]
                )
            ]
        ),
        "structure.structures[0].fields[0].choices",
    ),
    "a schema of more than 64 KiB": (
        schema(
            entities=[
                pb.SchemaLabel(label=str(number), description="a" * 1024) for number in range(65)
            ]
        ),
        "structure",
    ),
    "answers that would be too large": (
        pb.ExtractRequest(
            items=[pb.Item(text="a")] * 3000,
            structure=pb.StructureTask(
                structures=[pb.SchemaStructure(name="a", fields=[pb.SchemaField(name="b" * 250)])]
            ),
        ),
        "items",
    ),
    "a seed where nothing is written": (
        pb.ExtractRequest(
            items=[pb.Item(text="a", seed=1)], classify=pb.ClassifyTask(labels=["a"])
        ),
        "items[0].seed",
    ),
    **{
        f"{name} out of range": written(
            f"text.sampling.{name}", sampling=pb.Sampling(**{name: value})
        )
        for name, value in SAMPLING
    },
    "too many stop strings": written("text.stop", stop=["a"] * 17),
    "an empty stop string": written("text.stop[1]", stop=["a", ""]),
    "a long stop string": written("text.stop[0]", stop=["a" * 257]),
    "too many log probabilities": written("text.top_logprobs", top_logprobs=21),
    "log probabilities of many items": (
        pb.ExtractRequest(items=[TEXT] * 25, text=pb.TextTask(top_logprobs=20)),
        "text.top_logprobs",
    ),
    "log probabilities of text layers": written(
        "text.text_layer", top_logprobs=1, text_layer=pb.TextTask.TEXT_LAYER_ONLY
    ),
    "a prompt with an instruction": written("text.instruction", raw_prompt=True, instruction="a"),
    "a prompt with turns": written("text.turns", raw_prompt=True, turns=[said()]),
    "tools that are no JSON": written("text.tools", tools="[" * 5000),
    "tools that are none": written("text.tools", tools="[]"),
    "too many tools": written("text.tools", tools=tools(*map(str, range(65)))),
    "tools that are long": written("text.tools", tools=tools("a") + " " * (64 << 10)),
    "another kind of tool": written("text.tools[0]", tools='[{"type": "web_search"}]'),
    "a tool without a name": written(
        "text.tools[0].function.name", tools='[{"type": "function", "function": {}}]'
    ),
    "a tool with a name of other letters": written(
        "text.tools[1].function.name", tools=tools("a", "b c")
    ),
    "two tools of one name": written("text.tools[1].function.name", tools=tools("a", "a")),
    "tools and a schema": written("text.json_schema", tools=tools("a"), json_schema="{}"),
    "a tool that is not there": written("text.tool", tools=tools("a"), tool="b"),
    "a choice of no tools": written(
        "text.tool_choice", tool_choice=pb.TextTask.TOOL_CHOICE_REQUIRED
    ),
    "a choice that nobody knows": (
        pb.ExtractRequest(text=changed(pb.TextTask(), tool_choice=9)),
        "text.tool_choice",
    ),
    "calls of a user": written(
        "text.turns[0].tool_calls",
        turns=[pb.Turn(role=pb.Turn.ROLE_USER, tool_calls=[pb.ToolCall(name="a", arguments="{}")])],
    ),
    "a call without arguments": written(
        "text.turns[0].tool_calls[0].arguments",
        turns=[
            pb.Turn(role=pb.Turn.ROLE_ASSISTANT, tool_calls=[pb.ToolCall(name="a", arguments="[]")])
        ],
    ),
    "a result of no call": written("text.item_role", item_role=pb.Turn.ROLE_TOOL),
    "an item of the assistant": written("text.item_role", item_role=pb.Turn.ROLE_ASSISTANT),
    "too much text": (pb.ExtractRequest(text=pb.TextTask(max_tokens=5000)), "text.max_tokens"),
}

SCORE = {
    "no query": (pb.ScoreRequest(documents=[TEXT]), "query"),
    "query without content": (pb.ScoreRequest(query=pb.Item(), documents=[TEXT]), "query"),
    "empty query": (pb.ScoreRequest(query=pb.Item(text=""), documents=[TEXT]), "query.text"),
    "no documents": (pb.ScoreRequest(query=TEXT), "documents"),
    "entities of the query": (
        pb.ScoreRequest(query=given((0, 1)), documents=[TEXT]),
        "query.entities",
    ),
    "entities of a document": (
        pb.ScoreRequest(query=TEXT, documents=[given((0, 1))]),
        "documents[0].entities",
    ),
    "empty document": (
        pb.ScoreRequest(query=TEXT, documents=[TEXT, pb.Item(text="")]),
        "documents[1].text",
    ),
    "query too long": (
        pb.ScoreRequest(query=pb.Item(text="q" * 131_073), documents=[TEXT]),
        "query.text",
    ),
    "instruction of a query too long": (
        changed(pb.ScoreRequest(query=TEXT, documents=[TEXT]), instruction="i" * 16_385),
        "instruction",
    ),
    "unknown scale": (changed(pb.ScoreRequest(query=TEXT, documents=[TEXT]), scale=9), "scale"),
}


async def test_each_broken_contract_names_its_field(redis_url: str) -> None:
    async with router(redis_url) as client, FakeWorker(client.address, models=[card()]).working():
        calls: dict[str, tuple[Awaitable[object], str]] = {}
        for name, (encode, field) in ENCODE.items():
            calls[name] = (client.inference.Encode(encode), field)
        for name, (extract, field) in EXTRACT.items():
            extract.MergeFrom(pb.ExtractRequest(model="tests/cold", items=[TEXT]))
            calls[name] = (client.inference.Extract(extract), field)
        for name, (score, field) in SCORE.items():
            calls[name] = (client.inference.Score(changed(score, model=MODEL)), field)
        for name, (call, field) in calls.items():
            refusal = await refused(call)
            assert (refusal.code, refusal.reason, refusal.field) == (
                INVALID,
                "INVALID_INPUT",
                field,
            ), name
            assert len(refusal.infos) == 1, name
            assert refusal.infos[0].domain == "shoal", name
            assert refusal.infos[0].metadata["request_id"] == refusal.request_id != "", name
            assert refusal.retry_seconds == 0, name
        await still_answers(client)


async def still_answers(client: Client) -> None:
    assert (await client.encode("good")).dense.data == vector("good")


TASKS = {
    "entities of an embedder": (
        "Extract",
        pb.ExtractRequest(model=MODEL, items=[TEXT], entities=pb.EntitiesTask(labels=["a"])),
        "entities",
    ),
    "vectors of a classifier": (
        "Encode",
        changed(encode_request("a"), model="tests/labels"),
        "model",
    ),
    "scores of a classifier": (
        "Score",
        pb.ScoreRequest(model="tests/labels", query=TEXT, documents=[TEXT]),
        "model",
    ),
    "sparse vectors of a dense model": (
        "Encode",
        changed(encode_request("a"), representations=[2]),
        "representations[0]",
    ),
    "pictures for a text model": (
        "Encode",
        pb.EncodeRequest(model=MODEL, items=[TEXT, pb.Item(image=pb.Image(data=b"x"))]),
        "items[1].image",
    ),
}


async def test_requests_beyond_model_card_are_refused(redis_url: str) -> None:
    labels = card("tests/labels", labels=["yes", "no"], tasks=[models_pb2.TASK_CLASSIFY])
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card(), labels]).working(),
    ):
        for name, (method, request, field) in TASKS.items():
            refusal = await refused(getattr(client.inference, method)(request))
            assert (refusal.code, refusal.reason, refusal.field) == (
                INVALID,
                "TASK_NOT_SUPPORTED",
                field,
            ), name
        unknown = pb.ExtractRequest(
            model="tests/labels", items=[TEXT], classify=pb.ClassifyTask(labels=["yes", "maybe"])
        )
        refusal = await refused(client.inference.Extract(unknown))
        assert (refusal.reason, refusal.field) == ("INVALID_INPUT", "classify.labels[1]")
        await still_answers(client)


async def test_model_of_inference_takes_any_labels_or_none(redis_url: str) -> None:
    nli = card(
        "tests/nli", labels=["contradiction", "entailment"], tasks=[models_pb2.TASK_CLASSIFY]
    )
    nli.open_labels = True
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card(), nli]).working(),
    ):
        for labels in ([], ["sport"]):
            request = pb.ExtractRequest(
                model="tests/nli", items=[TEXT], classify=pb.ClassifyTask(labels=labels)
            )
            assert len((await client.inference.Extract(request)).results) == 1


async def test_entities_are_for_models_that_are_given_them(redis_url: str) -> None:
    finds, relates = (
        card(name, tasks=[models_pb2.TASK_RELATIONS]) for name in ("tests/finds", "tests/relates")
    )
    relates.given_entities = True
    task = pb.RelationsTask(labels=["in"], entity_labels=["city"])
    refusals = {
        "tests/finds": (given((0, 1)), "items[1].entities"),
        "tests/relates": (TEXT, "items[0].entities"),
    }
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card(), finds, relates]).working(),
    ):
        for model, (item, field) in refusals.items():
            refusal = await refused(
                client.inference.Extract(
                    pb.ExtractRequest(model=model, items=[TEXT, item], relations=task)
                )
            )
            assert (refusal.code, refusal.reason, refusal.field) == (
                INVALID,
                "INVALID_INPUT",
                field,
            )
        request = pb.ExtractRequest(
            model="tests/relates", items=[TEXT, given((0, 4), (1, 2))], relations=RELATIONS
        )
        assert len((await client.inference.Extract(request)).results) == 2
        await still_answers(client)


async def test_request_of_100_megabytes_is_refused_with_message(redis_url: str) -> None:
    async with router(redis_url) as client, FakeWorker(client.address, models=[card()]).working():
        refusal = await refused(client.inference.Encode(encode_request("x" * 100_000_000)))
        assert (refusal.code, refusal.reason) == (INVALID, "INVALID_INPUT")
        assert "67,108,864" in refusal.message
        assert "100,000," in refusal.message
        await still_answers(client)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"\x0a\x01\xff", "model"),
        (
            encode_request("a", "b").SerializeToString() + b"\x12\x04\x0a\x02\xc3\x28",
            "items[2].text",
        ),
        (encode_request("a").SerializeToString() + b"\x42\x01\xfe", "instruction"),
        (b"\xff\xff\xff", ""),
        (b"\x12\x7f\x0a", ""),
    ],
)
async def test_malformed_bytes_are_refused_naming_text(
    redis_url: str, body: bytes, field: str
) -> None:
    async with router(redis_url) as client, FakeWorker(client.address, models=[card()]).working():
        raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = client.channel.unary_unary(
            "/shoal.v1.InferenceService/Encode"
        )
        refusal = await refused(raw(body))
        assert (refusal.code, refusal.reason, refusal.field) == (INVALID, "INVALID_INPUT", field)
        if not field:
            assert "shoal.v1.EncodeRequest" in refusal.message
        await still_answers(client)


async def test_metadata_is_checked_and_request_id_is_returned(redis_url: str) -> None:
    async with router(redis_url) as client, FakeWorker(client.address, models=[card()]).working():
        refusal = await refused(
            client.inference.Encode(encode_request("a"), metadata=(("x-request-id", "x" * 200),))
        )
        assert (refusal.code, refusal.field) == (INVALID, "x-request-id")
        call = client.inference.Encode(encode_request("a"), metadata=(("x-request-id", "mine"),))
        await call
        assert ("x-request-id", "mine") in list(await call.trailing_metadata())


async def test_model_that_no_worker_finds_is_not_found(redis_url: str) -> None:
    failure = worker_pb2.Failure(
        reason="MODEL_NOT_FOUND",
        message="tests/none is in none of the model directories",
        field="model",
    )
    async with (
        router(redis_url) as client,
        FakeWorker(
            client.address, models=[card()], can_load=True, failure=failure
        ).working() as worker,
    ):
        for _ in range(2):  # the first waits for the worker's word, the second is refused at once
            refusal = await refused(client.encode("a", model="tests/none"))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        listed = (await client.models.ListModels(models_pb2.ListModelsRequest())).models
        assert [model.model for model in listed] == [MODEL], "a typo leaves no row"
        asked = (await client.models.GetModel(models_pb2.GetModelRequest(model="tests/none"))).model
        assert (asked.state, asked.last_error) == (models_pb2.MODEL_STATE_FAILED, failure.message)
        assert not worker.jobs
        await still_answers(client)


async def test_model_that_cannot_be_loaded_fails_its_requests_everywhere(redis_url: str) -> None:
    failure = worker_pb2.Failure(
        reason="MODEL_LOAD_FAILED", message="model.safetensors: tensor pooler.bias is missing"
    )
    async with (
        router(redis_url, "a") as a,
        router(redis_url, "b") as b,
        FakeWorker(a.address, "w1", can_load=True, failure=failure).working(),
        FakeWorker(b.address, "w2", can_load=True, failure=failure).working(),
    ):
        await b.sees("w1", "w2")
        refusals = await asyncio.gather(*(refused(client.encode("a")) for client in (a, b)))
        for refusal in refusals:
            assert (refusal.code, refusal.reason) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "MODEL_LOAD_FAILED",
            )
            assert "pooler.bias" in refusal.message
        listed = (await a.models.GetModel(models_pb2.GetModelRequest(model=MODEL))).model
        assert "pooler.bias" in listed.last_error


async def test_full_lane_refuses_with_retry_time(redis_url: str) -> None:
    async with router(redis_url, max_queued_tokens=100) as client:
        refusal = await refused(client.encode("x" * 1000))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refusal.retry_seconds > 0
        assert (await client.lane()).enqueued_jobs == 0


async def test_large_request_is_enqueued_whole_or_refused(redis_url: str) -> None:
    async with router(redis_url, max_queued_tokens=10_000) as client:
        refusal = await refused(client.encode(*["x" * 3000] * 40))
        assert refusal.reason == "QUEUE_FULL"
        async with FakeWorker(client.address, models=[card()]).working() as worker:
            await still_answers(client)
            assert [item.text for job in worker.jobs for item in job.encode.items] == ["good"]


async def test_wait_beyond_the_deadline_is_refused_where_the_speed_is_known(redis_url: str) -> None:
    async with (
        router(redis_url) as client,
        FakeWorker(client.address, models=[card()], tokens_per_second=200.0).working() as worker,
    ):
        await client.sees("w1")
        worker.hold()
        ahead = asyncio.create_task(client.encode(*["x" * 1500] * 20))
        await until(lambda: has_queued(client, 8000), "the work to be seen")
        refusal = await refused(client.encode("late", timeout=20.0))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refusal.retry_seconds > 1
        patient = asyncio.create_task(client.encode("patient", timeout=500))
        worker.resume()
        await ahead
        assert (await patient).dense.data == vector("patient")


async def has_queued(client: Client, tokens: int) -> bool:
    lane = await client.lane()
    return lane.queued_tokens + lane.leased_tokens >= tokens

"""Schemas: building them, reading the gliner2 package's form, sending them, and their results."""

from __future__ import annotations

import json
from typing import Any

import pytest
import shoal
from shoal.errors import InvalidInput
from shoal.extractions import LabelScore, Structure, Value
from shoal.requests import codec
from shoal.requests.extract import schema_bytes, schema_message
from shoal.schema import Schema, SchemaField
from shoal.v1 import inference_pb2 as pb

FORM: dict[str, Any] = {
    "entities": {
        "person": "who",
        "company": {"description": "that trades", "threshold": 0.25},
        "city": None,
    },
    "relations": ["works for"],
    "classifications": [
        {
            "task": "tone",
            "labels": {"calm": "no haste", "angry": ""},
            "multi_label": True,
            "cls_threshold": 0.5,
            "prompt": "how",
        }
    ],
    "structures": {
        "product": {
            "fields": [
                {"name": "name", "dtype": "str"},
                {"name": "colour", "choices": ["red", "blue"], "threshold": 0.5},
            ]
        }
    },
    "threshold": 0.75,
}
MESSAGE = pb.StructureTask(
    entities=[
        pb.SchemaLabel(label="person", description="who"),
        pb.SchemaLabel(label="company", description="that trades", threshold=0.25),
        pb.SchemaLabel(label="city"),
    ],
    relations=[pb.SchemaLabel(label="works for")],
    classifications=[
        pb.SchemaClassification(
            name="tone",
            labels=[
                pb.SchemaLabel(label="calm", description="no haste"),
                pb.SchemaLabel(label="angry"),
            ],
            multi_label=True,
            threshold=0.5,
            description="how",
        )
    ],
    structures=[
        pb.SchemaStructure(
            name="product",
            fields=[
                pb.SchemaField(name="name", kind=pb.SchemaField.KIND_STRING),
                pb.SchemaField(
                    name="colour",
                    kind=pb.SchemaField.KIND_LIST,
                    choices=["red", "blue"],
                    threshold=0.5,
                ),
            ],
        )
    ],
    threshold=0.75,
)


def test_schema_of_each_kind_of_task() -> None:
    assert schema_message(Schema.from_dict(FORM)) == MESSAGE
    assert Schema.from_json(json.dumps(FORM)) == Schema.from_dict(FORM)
    built = (
        shoal.Schema(threshold=0.75)
        .with_entities({"person": "who"})
        .with_entities({"company": {"description": "that trades"}}, threshold=0.25)
        .with_entities(["city"])
        .with_relations("works for")
        .with_classification(
            "tone",
            {"calm": "no haste", "angry": ""},
            multi_label=True,
            threshold=0.5,
            description="how",
        )
        .with_structure(
            "product",
            [("name", "str"), SchemaField(name="colour", choices=("red", "blue"), threshold=0.5)],
        )
    )
    assert built == Schema.from_dict(FORM)
    assert Schema.from_dict({"structures": {"a": ["b"]}}) == Schema().with_structure("a", ["b"])


@pytest.mark.parametrize(
    "form",
    [
        {"other": 1}, {"entities": {"a": {"other": 1}}}, {"entities": 3}, {"entities": {"a": 3}},
        {"classifications": {}},
        {"classifications": [{"other": 1}]}, {"structures": {"a": {"other": 1}}},
        {"structures": {"a": 3}}, {"structures": []},
        {"structures": {"a": [{"dtype": "str"}]}}, {"structures": {"a": [3]}},
        {"structures": {"a": [{"name": "b", "choices": 3}]}},
        [], "text", {"structures": {"a": [{"name": "b", "x": 1}]}},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_schema_is_refused(form: Any) -> None:
    with pytest.raises(InvalidInput):
        Schema.from_dict(form)
    with pytest.raises(InvalidInput):
        Schema.from_json(json.dumps(form))
    with pytest.raises(InvalidInput):
        Schema.from_json(json.dumps(form)[:-1] + "}}")


@pytest.mark.parametrize(
    "form",
    [
        {"entities": [3]}, {"threshold": "much"},
        {"structures": {"a": [{"name": "b", "dtype": "int"}]}},
        {"structures": {"a": [{"name": "b", "dtype": ["str"]}]}},
        {"classifications": [{"task": 3, "labels": ["a"]}]},
        {"entities": ["\ud800"]},
    ],
    ids=str,
)  # fmt: skip
def test_schema_that_does_not_fit_the_message_is_refused(form: Any) -> None:
    with pytest.raises(InvalidInput):
        schema_message(Schema.from_dict(form))


def test_repeated_bytes_are_counted_as_the_router_does() -> None:
    schemas = pytest.importorskip("services.router.admission.validation.schemas")
    assert schema_bytes(MESSAGE) == schemas.check(MESSAGE)[1]


def test_answers() -> None:
    value = pb.StructureValue(text="ship", score=0.5, start=0, end=4)
    fields = [
        pb.StructureField(name="name", values=[value]),
        pb.StructureField(
            name="colour", values=[pb.StructureValue(text="red", score=0.25)], list=True
        ),
        pb.StructureField(name="size"),
        pb.StructureField(name="flags", list=True),
    ]
    message = pb.Extraction(
        classifications=[
            pb.Classification(name="tone", labels=[pb.LabelScore(label="calm", score=0.5)])
        ],
        structures=[pb.Structure(name="product", fields=fields)],
    )
    [found] = codec.extract_result(pb.ExtractResponse(results=[message]))
    assert found.classifications[0].labels == (LabelScore("calm", 0.5),)
    wanted: dict[str, tuple[Value, ...] | Value | None] = {
        "name": Value("ship", 0.5, 0, 4),
        "colour": (Value("red", 0.25),),
        "size": None,
        "flags": (),
    }
    assert found.structures == (Structure("product", wanted),)
    assert found.json == {
        "product": [{"name": "ship", "colour": ["red"], "size": None, "flags": []}]
    }

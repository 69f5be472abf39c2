"""Answers that are JSON by a schema: every one parses and is valid, whatever a model with random
weights would rather write.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from libs.errors import InvalidInput, ShoalError, TaskNotSupported
from libs.models import ExtractResult
from libs.models.generation.decoding.rules import Bits, Ids
from libs.models.generation.grammars import FIELD, Grammars, parse_answer
from libs.models.generation.grammars import matching as module
from libs.models.generation.model import GenerativeModel
from libs.models.generation.texts import TextReader
from libs.models.interface.work import TextWork
from tests.generation.served import write, write_ending
from tests.generation.test_serving import load, outputs

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = {"type": "string", "maxLength": 12}


def object_schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


SCHEMAS: dict[str, dict[str, Any]] = {
    "scalars": object_schema(
        name=NAME,
        age={"type": "integer", "minimum": 0, "maximum": 150},
        paid={"type": "boolean"},
        note={"type": "null"},
    ),
    "choices": object_schema(
        kind={"enum": ["invoice", "receipt", 'a "quoted" one', "ünïcode"]}, version={"const": 3}
    ),
    "lists": object_schema(
        lines={
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": object_schema(text=NAME, sum={"enum": [1.5, 20, -3]}),
        }
    ),
    "optional": {
        "type": "object",
        "properties": {"a": NAME, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "either": object_schema(value={"anyOf": [{"type": "boolean"}, object_schema(deeper=NAME)]}),
    "patterns": object_schema(
        code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        day={"type": "string", "format": "date"},
    ),
    "defined": {
        **object_schema(first={"$ref": "#/$defs/name"}, last={"$ref": "#/$defs/name"}),
        "$defs": {"name": NAME},
    },
}
# A model with random weights never ends an answer without a fixed length.
ENDLESS = object_schema(text={"type": "string"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GenerativeModel:
    """Its rules forbid what JSON needs: nothing twice, no brace, and no end before a third
    token.
    """
    return loaded(
        tmp_path_factory.mktemp("language_model"), suppress_tokens=["}"], min_new_tokens=3
    )


def loaded(directory: Path, **generation: object) -> GenerativeModel:
    write_ending("qwen3", directory, **generation)
    return load(directory)


def work(text: str, schema: dict[str, Any] | None, most: int = 200) -> TextWork:
    return TextWork(
        [text], max_tokens=most, json_schema="" if schema is None else json.dumps(schema)
    )


def answers(model: GenerativeModel, works: list[TextWork]) -> list[Any]:
    """Return the results of jobs that join one after another."""
    jobs = [model.prepare(each) for each in works]
    found = []
    for job, own in zip(jobs, outputs(model, jobs), strict=True):
        result = model.finish(job, own)
        assert isinstance(result, ExtractResult)
        found += result.items
    return found


def test_answers_are_valid_alone_and_among_others(model: GenerativeModel) -> None:
    works = [
        work(f"text {number}", schema)
        for number, schema in enumerate([*SCHEMAS.values(), None] * 2)
    ]
    among = answers(model, works)
    assert len(among) == 16
    for each, own in zip(works, among, strict=True):
        assert answers(model, [each]) == [own]
        if each.json_schema:
            assert own.finish_reason == "stop"
            jsonschema.validate(
                json.loads(own.text),
                json.loads(each.json_schema),
                format_checker=jsonschema.FormatChecker(),
            )
            assert own.form == json.loads(own.text)
        else:
            assert own.form is None
    assert (model.generating, model.claimed_bytes) == (0, 0)


def test_beams_are_held_to_it(tmp_path: Path) -> None:
    works = [work(name, schema) for name, schema in SCHEMAS.items()]
    for each, own in zip(works, answers(loaded(tmp_path, num_beams=3), works), strict=True):
        assert own.finish_reason == "stop"
        jsonschema.validate(json.loads(own.text), json.loads(each.json_schema))


def test_long_answer_is_cut_off(model: GenerativeModel) -> None:
    (own,) = answers(model, [work("a text", ENDLESS, 30)])
    assert (own.finish_reason, own.form) == ("length", None)
    assert own.text.startswith('{"text": "')


def test_cancellation_returns_the_memory(model: GenerativeModel) -> None:
    jobs = [model.prepare(work(f"text {number}", ENDLESS, 100)) for number in range(4)]
    sequences = [sequence for job in jobs for sequence in job.sequences]
    model.forward("generate", sequences)
    assert model.claimed_bytes > 0
    model.drop(sequences)
    assert (model.generating, model.claimed_bytes) == (0, 0)


def test_sequence_that_is_written_again_begins_again(model: GenerativeModel) -> None:
    requested = work("a text", SCHEMAS["scalars"])
    job = model.prepare(requested)
    for _ in range(3):
        model.forward("generate", job.sequences)
        model.drop(job.sequences)
    (own,) = outputs(model, [job])
    result = model.finish(job, own)
    assert isinstance(result, ExtractResult)
    assert result.items == answers(model, [requested])


@pytest.fixture(scope="module")
def grammars(model: GenerativeModel) -> Grammars:
    reader = model._reader
    assert isinstance(reader, TextReader)
    return Grammars(
        reader.tokenizer,
        reader.language_model.settings.vocabulary or 0,
        reader.language_model.settings.stops,
    )


def ids_of(bits: Bits) -> Ids:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int32)


def walk(grammars: Grammars, schema: dict[str, Any], seed: int, longest: int = 400) -> list[int]:
    """Tokens that a grammar allows, one of each set by chance, until it stops."""
    grammar = grammars.compile_schema(json.dumps(schema))
    assert grammar is not None
    allows, chance, written = grammar.allows(), random.Random(seed), list[int]()
    while len(written) < longest:
        allowed = ids_of(allows(np.array(written, np.int32)))
        assert len(allowed)
        token = int(chance.choice(allowed))
        if token in grammars._stops:
            break
        written.append(token)
    return written


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_allowed_leads_to_a_valid_answer(
    name: str, model: GenerativeModel, grammars: Grammars
) -> None:
    for seed in range(20):
        written = walk(grammars, SCHEMAS[name], seed)
        jsonschema.validate(json.loads(model._reader.text(written)), SCHEMAS[name])


def test_grammar_rolls_back_tokens(grammars: Grammars) -> None:
    grammar = grammars.compile_schema(json.dumps(SCHEMAS["lists"]))
    assert grammar is not None
    beams, (first, second) = (
        grammar.allows(),
        (walk(grammars, SCHEMAS["lists"], seed) for seed in (1, 2)),
    )
    for length in range(min(len(first), len(second))):
        for text in (first, second):
            written = np.array(text[:length], np.int32)
            assert np.array_equal(beams(written), grammar.allows()(written))
    nothing = ids_of(beams(np.array([first[0], first[0]], np.int32)))  # tokens outside the grammar
    assert nothing.tolist() == grammars._stops


def test_schema_that_grew_too_complex_is_compiled_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.LIMITS, "max_lexer_states", 300)
    schema = object_schema(code={"type": "string", "pattern": "^(.*a.{300})$"})
    first = walk(grammars, schema, 1)
    assert len(first) < 400  # it was ended
    with pytest.raises(InvalidInput, match="could not be completed"):
        parse_answer('{"code": "', "stop")
    assert len(walk(grammars, schema, 1)) == len(first)


def test_few_schemas_are_kept(grammars: Grammars) -> None:
    for number in range(module.MAX_CACHED_SCHEMAS + 3):
        assert (
            grammars.compile_schema(json.dumps(object_schema(**{f"p{number}": NAME}))) is not None
        )
    assert len(grammars._matchers) == module.MAX_CACHED_SCHEMAS


def deep(times: int) -> dict[str, Any]:
    schema: dict[str, Any] = NAME
    for _ in range(times):
        schema = object_schema(a=schema)
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[" * 20_000, "is not valid JSON"),
        ('{"type": "array"}', "at #: an answer is an object"),
        ("[]", "at #: an answer is an object"),
        (
            object_schema(a={"type": "array", "uniqueItems": True}),
            "at #/properties/a: the keyword 'uniqueItems' is not supported",
        ),
        (
            object_schema(a={"anyOf": [NAME, {"multipleOf": 9973}]}),
            "at #/properties/a/anyOf/1: the keyword 'multipleOf' is not supported",
        ),
        (
            {**object_schema(a=NAME), "patternProperties": {"^a": NAME}},
            "at #: the keyword 'patternProperties' is not supported",
        ),
        (
            {**object_schema(a=NAME), "x-guidance": {"lenient": True}},
            "at #: the keyword 'x-guidance' is not supported",
        ),
        (
            object_schema(a={"$ref": "http://127.0.0.1/schema.json"}),
            r"at #/properties/a/\$ref: only references within the schema",
        ),
        (object_schema(a={"$ref": "#/$defs/none"}), "at #: "),
        (object_schema(a={"type": "strings"}), "at #: Invalid type: strings"),
        (
            object_schema(a={"type": "string", "pattern": "(?=a)b"}),
            "at #: regex parse error: .*look-around",
        ),
        (
            object_schema(a={"type": "string", "pattern": "a" * 300}),
            "at #/properties/a/pattern: a pattern has at most 256",
        ),
        (object_schema(a=False), "at #: Unsatisfiable"),
        (object_schema(**{f"p{number}": NAME for number in range(257)}), "more than 256 schemas"),
        (object_schema(a={"anyOf": [NAME] * 65}), "more than 64 branches"),
        (object_schema(a={"enum": [*range(1001)]}), "more than 1,000 values"),
        (
            object_schema(
                **{f"p{number}": {"type": "string", "pattern": "a"} for number in range(17)}
            ),
            "more than 16 patterns",
        ),
        (deep(17), "nested more than 16 times"),
        (object_schema(a={"const": "a" * 40_000}), "more than 32,768 bytes"),
    ],
)
def test_schemas_that_are_not_served_are_refused_with_their_place(
    schema: Any, reason: str, model: GenerativeModel
) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(InvalidInput, match=reason) as caught:
        model.prepare(TextWork(["a text"], json_schema=text))
    assert caught.value.field == FIELD


# Each was slow to compile, or to follow, before it had a limit; or took much memory.
HOSTILE: dict[str, dict[str, Any]] = {
    "repeated": object_schema(a={"type": "string", "pattern": "^((((a?){100}){100}){100}){100}$"}),
    "far back": object_schema(a={"type": "string", "pattern": "^(.*a.{500})$"}),
    "long": object_schema(
        a={"type": "string", "minLength": 10**9},
        b={"type": "array", "minItems": 10**9, "items": NAME},
    ),
    "itself": {**object_schema(a={"$ref": "#"})},
    "around": {
        **object_schema(a={"$ref": "#/$defs/b"}),
        "$defs": {"b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}},
    },
    "the same 64 times": {
        **object_schema(a={"$ref": "#/$defs/n"}),
        "$defs": {"n": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}}] * 64}},
    },
    "all of any": object_schema(
        a={
            "allOf": [
                {"anyOf": [object_schema(**{f"p{one}{two}": NAME}) for two in range(4)]}
                for one in range(12)
            ]
        }
    ),
    "numbers": object_schema(
        **{
            f"p{number}": {"type": "number", "minimum": number + 0.123456789, "maximum": 1e15}
            for number in range(200)
        }
    ),
    "any of patterns": object_schema(
        a={"anyOf": [{"type": "string", "pattern": f".*{one}.{{{one}}}"} for one in range(16)]}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_refused_or_end(name: str, model: GenerativeModel) -> None:
    refused = ""
    try:
        job = model.prepare(work("a text", HOSTILE[name], 60))
        (own,) = outputs(model, [job])
        model.finish(job, own)
    except ShoalError as error:
        refused = error.field
    assert refused in ("", FIELD)
    assert (model.generating, model.claimed_bytes) == (0, 0)


def test_models_that_cannot_refuse(
    tmp_path: Path, model: GenerativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = work("a text", SCHEMAS["scalars"])
    write("t5", tmp_path / "t5")
    with pytest.raises(TaskNotSupported, match="does not support JSON schemas") as caught:
        load(tmp_path / "t5").prepare(requested)
    assert caught.value.field == FIELD
    write("qwen3", tmp_path / "endless")
    with pytest.raises(TaskNotSupported, match="needs a token that ends an answer"):
        load(tmp_path / "endless").prepare(requested)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    write("qwen3", tmp_path / "missing", {"eos_token_id": 2})
    with pytest.raises(
        TaskNotSupported, match=r"llguidance is not installed: pip install 'shoal-mesh\[grammar\]'"
    ):
        load(tmp_path / "missing").prepare(requested)


def nested(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": [1, 2.5, "é", null, true]}', True),
        (nested(30), True),
        (nested(31), False),
        (nested(50_000), False),
        ('{"a": 1e999}', False),
        ('{"a": ' + "9" * 400 + "}", False),
        ('{"a": "\\ud800"}', False),
    ],
)
def test_struct_limits_of_answers(text: str, fits: bool) -> None:
    from services.worker.mesh.codec import _struct

    form = parse_answer(text, "stop")
    assert (form is not None) == fits
    if form is not None:
        made = _struct(form)
        assert type(made).FromString(made.SerializeToString()) == made


def test_cut_off_answer_has_no_json() -> None:
    assert parse_answer('{"a": 1}', "length") is None

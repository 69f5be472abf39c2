"""Calls of functions: the prompt is that of transformers' template, answers follow a grammar, and
their text is read back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import transformers
from shoal.extractions import ToolCall

from libs.errors import InvalidInput, TaskNotSupported
from libs.models import ExtractResult
from libs.models.generation.model import GenerativeModel
from libs.models.generation.tools import HERMES, LLAMA, tool_form
from libs.models.interface.work import Sampling, TextWork, Turn, never_cancelled
from tests.generation.chat_templates import HERMES_TOOLS, LLAMA_TOOLS
from tests.generation.served import _edit, write, write_ending
from tests.generation.test_serving import load, outputs

pytestmark = pytest.mark.filterwarnings("ignore")

SCHEMAS: dict[str, dict[str, Any]] = {
    "one": {
        "properties": {"a": {"enum": ["text", "another"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "two": {
        "type": "object",
        "properties": {"b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "description": name, "parameters": own}}
        for name, own in SCHEMAS.items()
    ]
)


def write_caller(directory: Path, template: str = HERMES_TOOLS) -> None:
    """A model that ends answers, with a template that has tools and room for a long prompt."""
    write_ending("qwen3", directory)
    for file, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        _edit(directory / file, {key: 2048})
    (directory / "chat_template.jinja").write_text(template)


def answers(model: GenerativeModel, work: TextWork) -> ExtractResult:
    job = model.prepare(work, never_cancelled)
    result = model.finish(job, outputs(model, [job])[0])
    assert isinstance(result, ExtractResult)
    return result


def requested(**more: Any) -> TextWork:
    seeds = tuple(bytes([number]) for number in range(6))
    values: dict[str, Any] = {
        "max_tokens": 120,
        "tools": TOOLS,
        "sampling": Sampling(temperature=1.0),
        "seeds": seeds,
    }
    return TextWork(["the text"] * 6, **(values | more))


@pytest.mark.parametrize("template", [HERMES_TOOLS, LLAMA_TOOLS])
def test_required_call_is_one_of_the_functions_by_its_schema(template: str, tmp_path: Path) -> None:
    write_caller(tmp_path, template)
    model = load(tmp_path)
    found = answers(model, requested(calls_tool=True, single_tool_call=True)).items
    assert all((len(item.tool_calls), item.text) == (1, "") for item in found)
    for item in found:
        jsonschema.validate(
            json.loads(item.tool_calls[0].arguments), SCHEMAS[item.tool_calls[0].name]
        )
    named = answers(model, requested(calls_tool=True, tool="two")).items
    assert {call.name for item in named for call in item.tool_calls} == {"two"}


def test_prompt_is_that_of_transformers(tmp_path: Path) -> None:
    write_caller(tmp_path)
    model, tokenizer = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = (Turn("user", "the text"), Turn("assistant", "", (ToolCall("one", '{"a": "text"}'),)))
    work = TextWork(["another"], instruction="the", tools=TOOLS, turns=turns, item_role="tool")
    (sequence,) = model.prepare(work, never_cancelled).sequences
    call = {"type": "function", "function": {"name": "one", "arguments": {"a": "text"}}}
    messages = [
        {"role": "system", "content": "the"},
        {"role": "user", "content": "the text"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "another"},
    ]
    prompt = tokenizer.apply_chat_template(
        messages, json.loads(TOOLS), tokenize=False, add_generation_prompt=True
    )
    assert "<tool_call>" in prompt
    assert sequence.ids.tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_schemas_are_checked_by_their_place_and_other_models_call_nothing(tmp_path: Path) -> None:
    write_caller(tmp_path / "calls")
    model = load(tmp_path / "calls")
    tools = json.loads(TOOLS)
    tools[1]["function"]["parameters"] = {"type": "object", "minProperties": 1}
    with pytest.raises(InvalidInput, match="minProperties") as caught:
        model.prepare(requested(tools=json.dumps(tools), calls_tool=True), never_cancelled)
    assert caught.value.field == "text.tools[1].function.parameters"
    write("qwen3", tmp_path / "none")
    with pytest.raises(TaskNotSupported, match="does not support function calls"):
        load(tmp_path / "none").prepare(requested(), never_cancelled)


def test_schemas_that_no_grammar_has_refuse_only_calls_that_must_follow_them(
    tmp_path: Path,
) -> None:
    write_caller(tmp_path)
    model = load(tmp_path)
    reader: Any = model._reader
    reader.tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    reader._grammars._vocabulary = reader.tokenizer.get_vocab_size()
    grammars, tools = reader._grammars, json.loads(TOOLS)
    assert grammars.compile_tools(requested(), HERMES) is not None
    tools[1]["function"]["parameters"] = {"type": "object", "minProperties": 1}
    assert grammars.compile_tools(requested(tools=json.dumps(tools)), HERMES) is None
    tools[0]["function"]["strict"] = True
    with pytest.raises(InvalidInput, match="minProperties"):
        grammars.compile_tools(requested(tools=json.dumps(tools)), HERMES)


def test_model_that_may_call_writes_text_or_whole_calls(tmp_path: Path) -> None:
    """Whatever tokens are drawn, what follows the mark of a call is one, and a text has none."""
    write_caller(tmp_path)
    model = load(tmp_path)
    reader: Any = model._reader
    reader.tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>"])
    vocabulary = reader.tokenizer.get_vocab_size()
    reader._grammars._vocabulary = vocabulary
    grammar = reader._grammars.compile_tools(requested(), HERMES)
    assert grammar is not None
    number = reader.tokenizer.token_to_id
    ids = [
        *reader.tokenizer.encode("<think>the text", add_special_tokens=False).ids,
        number("<tool_call>"),
    ]
    following = grammar.allows()

    def allowed() -> list[int]:
        bits = np.unpackbits(following(np.array(ids, np.int32)), bitorder="little")
        return [each for each in np.flatnonzero(bits).tolist() if each < vocabulary]

    chance = np.random.default_rng(3)
    while (now := allowed()) and not set(now) & set(reader._grammars._stops) and len(ids) < 300:
        ids.append(int(chance.choice(now)))
    text, (call, *_) = HERMES.read(reader.tokenizer.decode(ids, skip_special_tokens=False))
    assert text.startswith("<think>the text")
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def test_calls_are_parsed_and_other_text_stays_text() -> None:
    two = (
        '{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert HERMES.read(f"I look. <tool_call>\n{two}") == (
        "I look. ",
        (ToolCall("f", '{"a": "é"}'), ToolCall("g", "{}")),
    )
    for text in (
        "no call",
        '<tool_call>\n{"name": "f", "argu',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
    ):
        assert HERMES.read(text) == (text, ())
    assert LLAMA.read('{"name": "f", "parameters": {"a": 1}}') == ("", (ToolCall("f", '{"a": 1}'),))
    assert LLAMA.read('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}')[1] == (
        ToolCall("f", "{}"),
        ToolCall("g", "{}"),
    )
    for text in ("an answer", '{"a": 1}', "{" * 5000):
        assert LLAMA.read(text) == (text, ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, 'I <b> look <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        (LLAMA, ' {"name": "f", "parameters": {}}'),
    ],
)
def test_no_part_of_a_call_is_streamed(form: Any, text: str) -> None:
    before, calls = form.read(text)
    assert calls
    assert all(before.startswith(form.stable_text(text[:count])) for count in range(len(text) + 1))
    assert form.stable_text("a text <") == ("a text " if form is HERMES else "a text <")


def test_forms_are_known_by_the_template() -> None:
    assert tool_form(HERMES_TOOLS) is HERMES
    assert tool_form(LLAMA_TOOLS) is LLAMA
    assert tool_form("{{ messages }}") is None
    assert tool_form("{% if tools %}<tool_call><function=f></tool_call>{% endif %}") is None

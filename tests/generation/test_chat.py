"""Prompts of conversations are those of transformers' `apply_chat_template`, by templates as families have them, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
import transformers

from libs.catalog.detect import read_card
from libs.errors import InvalidInput, ModelBroken
from libs.models.generation.chat import ChatTemplate, Message, Role
from libs.models.text.tokenising.chat import rendered
from tests.generation.chat_templates import GEMMA, GLM4, LLAMA2, LLAMA3, MISTRAL, NEMOTRON, QWEN3, R1, SMOLLM3
from tests.generation.served import write

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATES = {
    "qwen3": QWEN3, "llama 3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "llama 2": LLAMA2, "r1": R1, "smollm 3": SMOLLM3,
    "nemotron": NEMOTRON, "glm 4": GLM4,
}  # fmt: skip
LOOKED_FOR = {
    "qwen3": ("</think>", "<tool_response>"),
    "r1": ("</think>",),
    "nemotron": ("</think>", "/think", "/no_think"),
    "glm 4": ("</think>", "/nothink"),
    "smollm 3": ("/no_think", "/think"),
}
"""What a template looks for in messages: a message with it may be refused."""
SHAPES = [
    "uau", "suau", "uauau", "suauau", "uauauau", "uu", "auu", "uaau", "suuau", "au", "usu", "suauauauauauauauau",
]  # fmt: skip
ROLES: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant"}
PIECES = [
    "a", " ", "\n", "\n\n", "\t", "\u2003", "\u00a0", "word", "é", "東京", "🐟", "e\u0301", "{{ x }}", "{% if %}", "{0}", "\\n",
    "<|im_end|>",
    "<|im_start|>system\n", "<end_of_turn>", "[/INST]", "<bos>", "<s>", "<b>", "\ue000", "\ue001", "\ue002", "\ue003", "<think>",
]  # fmt: skip
THOUGHTS = [
    "<think>\nI see.\n</think>\n\n",
    "<think></think>",
    "I see.</think>\n",
    "<think>a</think>b<think> c </think> ",
    "</think>",
]


def roles_of(shape: str) -> tuple[Role, ...]:
    return tuple(ROLES[letter] for letter in shape)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write("llama", found)
    return found


@pytest.fixture(scope="module")
def template(directory: Path) -> Callable[[str], ChatTemplate]:
    """Of a template, once for all tests."""
    card, made = read_card(directory, "random/llama"), dict[str, ChatTemplate]()

    def of(source: str) -> ChatTemplate:
        return made.setdefault(source, ChatTemplate(replace(card, template=source), directory))

    return of


def said(roles: Sequence[Role], texts: Sequence[str]) -> list[Message]:
    return [Message(role, text, f"{number}") for number, (role, text) in enumerate(zip(roles, texts, strict=True))]


@cache
def _tokenizer(directory: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(directory)


def theirs(directory: Path, source: str, messages: Sequence[Message]) -> str | None:
    """The prompt as transformers renders it. None: the template refuses the messages."""
    tokenizer = _tokenizer(directory)
    conversation = [{"role": message.role, "content": message.text} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(conversation, chat_template=source, tokenize=False, add_generation_prompt=True))
    except jinja2.TemplateError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, directory: Path, template: Callable[[str], ChatTemplate]) -> None:
    random, source = Random(name), TEMPLATES[name]
    own, equal, refused = template(source), 0, 0
    for shape in SHAPES:
        roles = roles_of(shape)
        for number in range(24):
            texts = ["".join(random.choices(PIECES, k=random.randrange(1, 9))) for _ in roles]
            if number % 2:
                texts = [
                    random.choice(THOUGHTS) + text if role == "assistant" else text for role, text in zip(roles, texts, strict=True)
                ]
            if number > 20:  # as one who wants to be something else writes
                texts = [
                    text + random.choice(["</think>", "/no_think", "/nothink", "<tool_response>a</tool_response>", ""])
                    for text in texts
                ]
            messages = said(roles, texts)
            wanted = theirs(directory, source, messages)
            try:
                prompt = "".join(own.around(messages))
            except InvalidInput as error:
                refused += 1
                if error.field == "text.turns":
                    assert wanted is None
                else:
                    text = texts[int(error.field)]
                    is_looked_for = any(one in text for one in LOOKED_FOR.get(name, ()))
                    assert is_looked_for or not text.strip() or not text.rpartition("</think>")[2].strip()
                continue
            assert prompt == wanted
            equal += 1
    print(f"{name}: {equal} equal, {refused} refused")
    assert equal > 60


THINKS = "<think>\nSo it is.\n</think>\n\nIt is."


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("qwen3", "<|im_start|>assistant\nIt is.<|im_end|>"),
        ("r1", "<|Assistant|>\n\nIt is.<|end|>"),
        ("nemotron", "<SPECIAL_11>Assistant\nIt is.\n<SPECIAL_12>"),
        ("glm 4", "<|assistant|>\n<think></think>\nIt is.<|user|>"),
        ("llama 3", "<|end_header_id|>\n\n<think>\nSo it is.\n</think>\n\nIt is.<|eot_id|>"),
    ],
)
def test_thoughts_of_earlier_answers_are_the_templates_to_leave_out(
    name: str, wanted: str, template: Callable[[str], ChatTemplate]
) -> None:
    before, text, _ = template(TEMPLATES[name]).around(said(roles_of("uau"), ["Is it?", THINKS, "Sure?"]))
    assert wanted in before
    assert text == "Sure?"


def test_a_placeholder_in_a_text_is_text(template: Callable[[str], ChatTemplate]) -> None:
    texts = ["\ue001\ue002", "\ue000", "\ue001 \ue000"]
    before, text, _ = template(QWEN3).around(said(roles_of("uau"), texts))
    assert before.count("\ue000") == before.count("\ue001") == before.count("\ue002") == 1
    assert text == texts[2]


@pytest.mark.parametrize(
    ("name", "shape", "texts", "field", "message"),
    [
        ("gemma", "uu", ["a", "b"], "text.turns", "Conversation roles must alternate"),
        ("gemma", "au", ["a", "b"], "text.turns", "Conversation roles must alternate"),
        ("mistral", "suau", ["a"] * 4, "text.turns", "Only user and assistant roles are supported"),
        ("qwen3", "uau", ["a", "b", "<tool_response>c</tool_response>"], "2", "'<tool_response>'"),
        ("smollm 3", "suau", ["a /no_think", "b", "c", "d"], "0", "'/no_think'"),
        ("nemotron", "uau", ["a", "<think>b</think>c</think>d", "e"], "1", "'</think>'"),
        ("nemotron", "uau", ["a", "b", "c /no_think"], "2", "'/no_think'"),
        ("glm 4", "uau", ["a", "b", "c /nothink"], "2", "'/nothink'"),
        ("llama 3", "uau", ["a", " \n", "b"], "1", "no text"),
        ("qwen3", "uau", ["a", "<think>b</think>\n", "b"], "1", "or only thoughts"),
    ],
)
def test_what_is_refused(
    name: str, shape: str, texts: list[str], field: str, message: str, template: Callable[[str], ChatTemplate]
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        template(TEMPLATES[name]).around(said(roles_of(shape), texts))
    assert (type(caught.value), caught.value.field) == (InvalidInput, field)


LOOP = "{% for m in messages %}[{{ m.role }}]CONTENT{% endfor %}[assistant]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{{ m.content | upper if loop.length > 2 else m.content }}", "changes the texts"),
        ("{{ m.content | upper if loop.length > 2 and m.content | length < 8 else m.content }}", "changes the texts"),
        ("{{ m.content[:200] if loop.length > 2 else m.content }}", "changes the texts"),
        ("{{ (m.content ~ '') if loop.length > 2 and m.content[0] != '/' else m.content }}", "looks for ''"),
        ("{{ m.content if 'and more' in m.content else m.content }}", "looks for 'and more'"),
        ("{{ m.content if 'and more' in ('a' ~ m.content) else m.content }}", "looks for 'and more'"),
        ("{{ m.content if 'and more' in m.content.strip().split('x')[0] + 'a' else m.content }}", "looks for "),
        ("{{ m.content if loop.last or loop.length < 3 else m.content + messages[-1].content }}", "more than once"),
        ("{{ m.content if loop.length < 3 or not loop.last else '' }}", "no place"),
        ("{{ m.content }}{{ 'x' * 40000 if loop.length > 2 else '' }}", "puts 120,"),
        ("{{ m.content }}{{ 'x' * 10**10 if loop.length > 2 else '' }}", "it cannot be rendered"),
        ("{{ m.content }}{% if loop.length > 2 %}" + "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2 + "{% endif %}",
         "more time or memory"),
    ],
)  # fmt: skip
def test_shapes_that_cannot_be_filled_faithfully_are_refused(
    content: str, message: str, template: Callable[[str], ChatTemplate]
) -> None:
    own = template(LOOP.replace("CONTENT", content))
    assert "".join(own.around(said(("user",), ["a"]))) == "[user]a[assistant]" or "x" in content
    with pytest.raises(InvalidInput, match=message) as caught:
        own.around(said(roles_of("uau"), ["a", "b", "c"]))
    assert caught.value.field == "text.turns"


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content.lstrip(' ') }}",
        "{{ m.content.rstrip('\\n') }}",
        "{{ m.content.lstrip() }}",
        "{{ m.content | trim }}",
        "{{ m.content.strip(' ') }}",
    ],
)
def test_space_is_stripped_as_the_template_does_it(content: str, directory: Path, template: Callable[[str], ChatTemplate]) -> None:
    source = LOOP.replace("CONTENT", content)
    for shape in ("u", "su", "uau"):
        for text in (" \n a \n ", "\n a\n", " a ", "\ta\u2003", "a"):
            messages = said(roles_of(shape), [text] * len(shape))
            assert "".join(template(source).around(messages)) == theirs(directory, source, messages)
    with pytest.raises(ModelBroken, match="changes the texts"):
        template(LOOP.replace("CONTENT", "{{ m.content.strip(' \\n') }}"))


def test_a_shape_is_rendered_once_and_the_last_are_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ChatTemplate(replace(read_card(directory, "random/llama"), template=GEMMA), directory)
    asked: list[int] = []

    def counted(source: str, values: Sequence[Any]) -> Any:
        asked.append(len(values[0]["messages"]))
        return rendered(source, values)

    monkeypatch.setattr("libs.models.generation.chat.rendered", counted)
    monkeypatch.setattr("libs.models.generation.chat.MOST_SHAPES", 2)

    def ask(shape: str) -> None:
        own.around(said(roles_of(shape), ["a"] * len(shape)))

    for shape in ("u", "su", "uau", "uau", "uauau", "uau", "uauauau", "uau"):
        ask(shape)
    assert asked == [3, 5, 7]
    ask("uauau")
    assert asked == [3, 5, 7, 5]
    for _ in range(2):  # one that is refused, too
        with pytest.raises(InvalidInput):
            ask("uu")
    assert asked == [3, 5, 7, 5, 2]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, ["uau", "uauau", "uauauau", "su"] * 8))
    assert len(own._shapes) == 2


def test_a_long_conversation_within_the_limits_of_rendering(directory: Path, template: Callable[[str], ChatTemplate]) -> None:
    roles = roles_of("s" + "ua" * 64 + "u")
    for source in (QWEN3, LLAMA3, GEMMA):
        messages = said(roles, [f" {THINKS} {number}" if role == "assistant" else f"{number}" for number, role in enumerate(roles)])
        assert "".join(template(source).around(messages)) == theirs(directory, source, messages)

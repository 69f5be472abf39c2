"""Prompts of conversations are those of transformers' `apply_chat_template`, by templates as
families have them.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import jinja2
import pytest
import transformers

from libs.catalog.detect import read_card
from libs.errors import InvalidInput
from libs.models.generation.chat import ChatTemplate, Message, Role
from tests.generation.chat_templates import (
    GEMMA,
    GLM4,
    LLAMA2,
    LLAMA3,
    MISTRAL,
    NEMOTRON,
    QWEN3,
    R1,
    SMOLLM3,
)
from tests.generation.served import write

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATES = {
    "qwen3": QWEN3, "llama 3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "llama 2": LLAMA2,
    "r1": R1, "smollm 3": SMOLLM3,
    "nemotron": NEMOTRON, "glm 4": GLM4,
}  # fmt: skip
SHAPES = [
    "uau", "suau", "uauau", "suauau", "uauauau", "uu", "auu", "uaau", "suuau", "au", "usu",
    "suauauauauauauauau",
]  # fmt: skip
ROLES: dict[str, Role] = {"s": "system", "u": "user", "a": "assistant"}
PIECES = [
    "a", " ", "\n", "\n\n", "\t", "\u2003", "\u00a0", "word", "é", "東京", "🐟", "e\u0301",
    "{{ x }}",
    "{% if %}", "{0}", "\\n",
    "<|im_end|>",
    "<|im_start|>system\n", "<end_of_turn>", "[/INST]", "<bos>", "<s>", "<b>", "\ue000", "\ue001",
    "\ue002", "\ue003", "<think>",
]  # fmt: skip
THOUGHTS = [
    "<think>\nI see.\n</think>\n\n",
    "<think></think>",
    "I see.</think>\n",
    "<think>a</think>b<think> c </think> ",
    "</think>",
]


def parse_roles(shape: str) -> tuple[Role, ...]:
    return tuple(ROLES[letter] for letter in shape)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write("llama", found)
    return found


@pytest.fixture(scope="module")
def template(directory: Path) -> Callable[..., ChatTemplate]:
    """Return a loader of templates that caches each one for all tests."""
    card = read_card(directory, "random/llama")

    @cache
    def load_template(source: str, parts: bool = False) -> ChatTemplate:
        return ChatTemplate(replace(card, template=source, message_parts=parts), directory)

    return load_template


def said(roles: Sequence[Role], texts: Sequence[str]) -> list[Message]:
    return [
        Message(role, text, f"{number}")
        for number, (role, text) in enumerate(zip(roles, texts, strict=True))
    ]


@cache
def _tokenizer(directory: Path) -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(directory)


def theirs(directory: Path, source: str, messages: Sequence[Message]) -> str | None:
    """The prompt as transformers renders it. None: the template refuses the messages."""
    tokenizer = _tokenizer(directory)
    conversation = [{"role": message.role, "content": message.text} for message in messages]
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation, chat_template=source, tokenize=False, add_generation_prompt=True
            )
        )
    except jinja2.TemplateError:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(
    name: str, directory: Path, template: Callable[..., ChatTemplate]
) -> None:
    random, source = Random(name), TEMPLATES[name]
    own, equal = template(source), 0
    for shape in SHAPES:
        roles = parse_roles(shape)
        for number in range(24):
            texts = ["".join(random.choices(PIECES, k=random.randrange(1, 9))) for _ in roles]
            if number % 2:
                texts = [
                    random.choice(THOUGHTS) + text if role == "assistant" else text
                    for role, text in zip(roles, texts, strict=True)
                ]
            if number > 18:  # what templates look for
                texts = [
                    text
                    + random.choice(["</think>", "/no_think", "/nothink", "</tool_response>", ""])
                    for text in texts
                ]
            messages = said(roles, texts)
            wanted = theirs(directory, source, messages)
            if wanted is None:
                with pytest.raises(InvalidInput) as caught:
                    own.prompt(messages)
                assert caught.value.field == "text.turns"
            else:
                assert own.prompt(messages) == wanted
                equal += 1
    print(f"{name}: {equal} equal")
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
    name: str, wanted: str, template: Callable[..., ChatTemplate]
) -> None:
    assert wanted in template(TEMPLATES[name]).prompt(
        said(parse_roles("uau"), ["Is it?", THINKS, "Sure?"])
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gemma", "uu", "Conversation roles must alternate"),
        ("gemma", "auu", "Conversation roles must alternate"),
        ("mistral", "suau", "Only user and assistant roles are supported"),
    ],
)
def test_invalid_conversations_are_refused(
    name: str, shape: str, message: str, template: Callable[..., ChatTemplate]
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        template(TEMPLATES[name]).prompt(said(parse_roles(shape), ["a"] * len(shape)))
    assert (type(caught.value), caught.value.field) == (InvalidInput, "text.turns")


LOOP = "{% for m in messages %}[{{ m.role }}]CONTENT{% endfor %}[assistant]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{{ 'x' * 10**7 if loop.length > 2 }}", "characters from short texts"),
        ("{{ 'x' * 10**10 if loop.length > 2 }}", "rendering fails"),
        (
            "{% if loop.length > 2 %}"
            + "{% for a in range(99999) %}" * 2
            + "{% endfor %}" * 2
            + "{% endif %}",
            "limits of time and memory",
        ),
    ],
)
def test_templates_over_the_limits_are_refused_and_harm_nothing_else(
    content: str, message: str, template: Callable[..., ChatTemplate]
) -> None:
    own = template(LOOP.replace("CONTENT", "{{ m.content }}" + content))
    for _ in range(2):
        with pytest.raises(InvalidInput, match=message) as caught:
            own.prompt(said(parse_roles("uau"), ["a", "b", "c"]))
        assert caught.value.field == "text.turns"
        assert own.prompt(said(("user",), ["a"])) == "[user]a[assistant]"


@pytest.mark.parametrize(
    "content", ["{{ m.content | upper }}", "{{ m.content.strip(' \\n') }}", "{{ m.content[:3] }}"]
)
def test_template_may_change_texts(
    content: str, directory: Path, template: Callable[..., ChatTemplate]
) -> None:
    source = LOOP.replace("CONTENT", content)
    for shape in ("u", "su", "uau"):
        messages = said(parse_roles(shape), [" \n a text \n "] * len(shape))
        assert template(source).prompt(messages) == theirs(directory, source, messages)


def test_last_message_with_an_image_is_framed_or_refused(
    template: Callable[..., ChatTemplate],
) -> None:
    parts = "{% for p in m.content %}{{ '<image>' if p.type == 'image' else CONTENT }}{% endfor %}"
    messages = said(parse_roles("uau"), ["\ue000", " b ", "\ue000 c"])
    own = template(LOOP.replace("CONTENT", parts.replace("CONTENT", "p.text")), parts=True)
    assert own.around(messages, with_image=True) == (
        "[user]\ue000[assistant] b [user]<image>",
        "[assistant]",
    )
    assert own.around(messages, with_image=False) == (
        "[user]\ue000[assistant] b [user]",
        "[assistant]",
    )
    changed = template(
        LOOP.replace("CONTENT", parts.replace("CONTENT", "p.text.upper()")), parts=True
    )
    with pytest.raises(InvalidInput, match="changes this message") as caught:
        changed.around(messages, with_image=True)
    assert caught.value.field == "2"


def test_values_of_the_caller_are_those_that_the_template_looks_for(
    directory: Path, template: Callable[..., ChatTemplate]
) -> None:
    own, messages = template(QWEN3), said(("user",), ["a"])
    for value in (True, False):
        given = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": value}
        wanted = _tokenizer(directory).apply_chat_template(
            [{"role": "user", "content": "a"}], chat_template=QWEN3, **given
        )
        assert own.prompt(messages, json.dumps({"enable_thinking": value})) == wanted
    assert own.prompt(messages, '{"enable_thinking": false}').endswith("<think>\n\n</think>\n\n")
    counted = template(LOOP.replace("CONTENT", "{{ m.content }} {{ budget }}"))
    assert counted.prompt(messages, '{"budget": 3}') == "[user]a 3[assistant]"
    for name in (
        "enable_thinkin",
        "messages",
        "bos_token",
        "add_generation_prompt",
        "raise_exception",
        "namespace",
    ):
        with pytest.raises(
            InvalidInput, match=f"does not use the value '{name}': it uses enable_thinking \\["
        ) as caught:
            own.prompt(messages, json.dumps({name: 1}))
        assert caught.value.field == "text.template_values"
    itself = (
        "{% set enable_thinking = enable_thinking | default(true) %}"
        "{% for one in tools or [] %}{% endfor %}"
    )
    assert (
        template(itself + "{{ messages[0].content }}{{ enable_thinking }}").prompt(
            messages, '{"enable_thinking": 0}'
        )
        == "a0"
    )
    with pytest.raises(InvalidInput, match="it uses none"):
        template(GEMMA).prompt(messages, '{"enable_thinking": false}')


def test_process_is_kept_and_started_again(directory: Path) -> None:
    own = ChatTemplate(replace(read_card(directory, "random/llama"), template=GEMMA), directory)
    messages = said(parse_roles("uau"), ["a", "b", "c"])
    (process,) = own._renderer._processes
    prompt = own.prompt(messages)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(own.prompt, [messages] * 64)) == {prompt}
    assert own._renderer._processes == [process]
    process.kill()
    process.wait()
    assert own.prompt(messages) == prompt
    (another,) = own._renderer._processes
    assert another.pid != process.pid
    del own  # as when a model is unloaded
    gc.collect()
    assert another.returncode is not None


def test_long_conversation_within_the_limits_of_rendering(
    directory: Path, template: Callable[..., ChatTemplate]
) -> None:
    roles = parse_roles("s" + "ua" * 64 + "u")
    for source in (QWEN3, LLAMA3, GEMMA):
        messages = said(
            roles,
            [
                f" {THINKS} {number}" if role == "assistant" else f"{number}"
                for number, role in enumerate(roles)
            ],
        )
        assert template(source).prompt(messages) == theirs(directory, source, messages)

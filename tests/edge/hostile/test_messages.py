"""The cost of a conversation with very many messages, and the renaming of paths in errors without
new patterns.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from shoal.errors import ShoalError
from shoal.transport.methods import ENCODE
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.edge.dialects.generation.common import (
    Conversation,
    ConversationTurn,
    GenerationRequest,
    MessageContent,
)
from services.edge.messages.base import (
    MAX_MESSAGE_CHARACTERS,
    Answer,
    Fields,
    HttpError,
    MeshCall,
    item_fields,
    single_field,
)
from services.edge.messages.limits import MAX_MESSAGES, MAX_PARTS
from services.edge.messages.names import AliasTarget
from services.router.admission.validation import limits
from tests.edge.hostile.process import (
    MAX_DELAY_SECONDS,
    MAX_GROWTH_BYTES,
    MIB,
    edge_process,
    measured_delay,
)
from tests.edge.parts import MODEL, Script, edge
from tests.support.peak import Peak

CHAT = "/v1/chat/completions"


def question(fields: Fields) -> MeshCall:
    return MeshCall(ENCODE, pb.EncodeRequest(), lambda reply: Answer(b""), fields)


def conversation(count: int, parts: int = 0) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": "a"}] * parts if parts else "a"
    return {"model": MODEL, "messages": [{"role": "user", "content": content}] * count}


async def refuse_turns() -> None:
    raise InvalidInput("text.turns[127].text is empty", field="text.turns[127].text")


@pytest.mark.parametrize("size", [2 * MIB, 8 * MIB])
async def test_very_long_conversation_does_not_delay_other_callers(size: int) -> None:
    message = b'{"role":"user","content":"a"}'
    count = size // (len(message) + 1)
    body = b'{"model":"org/model","messages":[' + b",".join([message] * count) + b"]}"
    async with edge_process(Script(act=refuse_turns)) as process:
        peak, begin = Peak(process.pid), process.cpu_seconds
        async with measured_delay(process) as delays:
            reply = await process.http.post(CHAT, body)
            answered = len(delays)
            while len(delays) < answered + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert reply.status == 413
        assert peak.grown < MAX_GROWTH_BYTES
        assert (
            process.cpu_seconds - begin < 1.0
        )  # 7 s and 27 s, when each message was a pattern of its path
        assert max(delays) < 5 * MAX_DELAY_SECONDS  # 8 s and 26 s


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, conversation(MAX_MESSAGES + 1), "messages"),
        (CHAT, conversation(1, MAX_PARTS + 1), "messages[0].content"),
        ("/api/chat", conversation(MAX_MESSAGES + 1), "messages"),
        (
            "/api/generate",
            {"model": MODEL, "prompt": "a", "images": ["a"] * (MAX_PARTS + 1)},
            "images",
        ),
    ],
)
async def test_lists_above_the_routers_limits_are_refused(
    path: str, body: dict[str, Any], field: str
) -> None:
    script = Script()
    async with edge(script) as http:
        reply = await http.post(path, body)
        assert reply.status == 400
        assert f"{field} has more than" in json.dumps(reply.json)
    assert not script.requests


def test_message_limits_equal_the_routers() -> None:
    assert (
        limits.TURNS.most + 2 == MAX_MESSAGES
    )  # a system message before the turns, and the user's last one
    assert limits.PARTS.most == MAX_PARTS


async def test_longest_conversation_is_accepted_and_its_errors_use_the_callers_names() -> None:
    script = Script(act=refuse_turns)
    async with edge(script) as http:
        body = conversation(MAX_MESSAGES)
        body["messages"][0] = {"role": "system", "content": "b"}
        reply = await http.post(CHAT, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, "messages[128].content")
    assert len(script.requests[0].text.turns) == MAX_MESSAGES - 2


def test_no_pattern_is_compiled_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*of_pattern: object) -> None:
        raise AssertionError(f"compiled {of_pattern[0]!r}")

    reported = [MessageContent("a", f"messages[0].content[{place}].text") for place in range(3)]
    turns: Sequence[ConversationTurn] = [
        ConversationTurn("user", reported, f"messages[{place}].content") for place in range(3)
    ]
    fields = GenerationRequest(
        AliasTarget(MODEL), Conversation([], reported, turns), (None, "max_tokens")
    ).fields()
    monkeypatch.setattr(re, "_compile", refuse)
    asked = question(fields)
    assert (
        asked.renamed("items[0].parts[2].image.data is empty")
        == "messages[0].content[2].text is empty"
    )
    assert asked.renamed("items[0].parts[9] is empty") == "messages[0].content[2].text is empty"
    assert asked.renamed("text.turns[1].text is empty") == "messages[1].content is empty"
    assert asked.renamed("text.turns[9].text is empty") == "messages is empty"
    assert asked.renamed("text.turns: too many") == "messages: too many"
    assert asked.renamed("text.max_tokens is 0") == "max_tokens is 0"


@pytest.mark.parametrize(
    ("given", "renamed"),
    [
        ("items[3].text is empty", "input[3] is empty"),
        ("items[3].image.data is empty", "input[3] is empty"),
        ("items[3].parts[1].text is empty", "input[3] is empty"),
        ("items is empty", "input is empty"),
        ("there are items of both kinds", "there are items of both kinds"),
        ("my.items[3] and items[4]", "my.items[3] and input[4]"),
        ("items[3].textual", "input[3].textual"),
        ("see items[3].", "see input[3]."),
    ],
)
def test_paths_are_renamed_to_the_callers_fields(given: str, renamed: str) -> None:
    assert question(item_fields("items", "input")).renamed(given) == renamed


@pytest.mark.parametrize("name", [r"a\1", r"\g<9>", "a[]b", "{0}", "("])
def test_callers_names_are_not_interpreted_as_patterns(name: str) -> None:
    """Tensors of KServe's protocol may have any name."""
    assert (
        question(single_field("items", name)).renamed("items[0].text is empty").endswith("is empty")
    )
    assert (
        question(item_fields("items", name)).renamed("items[0].text is empty").endswith("is empty")
    )


@pytest.mark.parametrize(
    "text", ["a" * MIB, "a.a" * MIB, "items[1]" * MIB, "items[0]." * MIB, "a[1][1]" * MIB]
)
def test_long_messages_are_truncated(text: str) -> None:
    problem = HttpError.from_error(ShoalError(text), question(item_fields("items", "input")))
    assert len(problem.message) <= MAX_MESSAGE_CHARACTERS + 1

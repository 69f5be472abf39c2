"""Bounds of the largest answers of tokens at an edge: memory, and other callers' waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import grpc
import pytest
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.edge.dialects.tei_v1 import TOKENIZED_BYTES
from services.edge.messages.pieces import ENTRIES_AT_ONCE, PIECE_BYTES, encode_list, group_pieces
from services.edge.teiv1 import tei_pb2 as tei
from services.local.settings import free_port
from services.router.admission.validation import limits
from services.router.admission.validation.answer_bounds import check_tokens
from tests.edge.hostile.process import (
    MAX_DELAY_SECONDS,
    MAX_GROWTH_BYTES,
    edge_process,
    measured_delay,
)
from tests.edge.parts import MODEL, Script, edge, tokenized
from tests.edge.test_server import until
from tests.edge.test_tei_grpc import Channel, serving
from tests.support.peak import Peak

LOADED_MACHINE: Final = 5
"""The factor of allowed delays on slow cores that other processes use, too."""
MAX_FACTOR: Final = 16
"""Memory that an identified caller's request may cost, in multiples of its bytes, in addition to
MAX_GROWTH_BYTES.
"""
MAX_TEXT: Final = "!" * limits.TOKENIZED_TEXT.most
"""Each byte is a token."""
TEXTS: Final = [MAX_TEXT] * 8
"""The largest request that a router accepts: its answer has 20 bytes a token."""
BODIES: Final[dict[str, tuple[str, dict[str, Any], int]]] = {
    "TEI": (f"/tei/{MODEL}/tokenize", {"inputs": TEXTS}, len(TEXTS)),
    "vLLM": ("/tokenize", {"model": MODEL, "prompt": MAX_TEXT, "return_token_strs": True}, 1),
    "Cohere": ("/v1/tokenize", {"model": MODEL, "text": MAX_TEXT}, 1),
}


def test_texts_are_the_most_that_a_router_answers() -> None:
    check_tokens(pb.TokenizeRequest(texts=TEXTS, return_tokens=True), None, readable=1 << 40)
    with pytest.raises(InvalidInput):
        check_tokens(
            pb.TokenizeRequest(texts=[*TEXTS, MAX_TEXT], return_tokens=True), None, readable=1 << 40
        )


@pytest.mark.parametrize("name", BODIES)
async def test_answer_of_very_many_tokens_costs_little_memory_and_delays_no_other_caller(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content, texts = BODIES[name]
    body = json.dumps(content).encode()
    special = name == "TEI"
    made = tokenized(
        pb.TokenizeRequest(
            texts=[MAX_TEXT] * texts, add_special_tokens=special, return_tokens=name != "Cohere"
        )
    )
    # Made before delays are measured, since the scripted router and the measuring caller share this
    # process.
    monkeypatch.setattr("tests.edge.parts.tokenized", lambda request: made)
    async with edge_process(Script()) as process:
        peak = Peak(process.pid)
        async with measured_delay(process) as delays:
            reply = await process.http.post(path, body)
        assert reply.status == 200
        assert reply.body.count(b"33") >= texts * len(MAX_TEXT), "each token has its id"
        assert peak.grown < MAX_FACTOR * len(body) + MAX_GROWTH_BYTES
        assert max(delays) < MAX_DELAY_SECONDS * LOADED_MACHINE


async def test_tei_s_grpc_answers_the_longest_text_within_the_bound() -> None:
    address = f"127.0.0.1:{free_port()}"
    message = tei.EncodeRequest(inputs=MAX_TEXT, add_special_tokens=True)
    options = [("grpc.max_receive_message_length", -1)]
    async with (
        edge_process(Script(), SHOAL_TEI_GRPC_ADDRESSES=f"{address}={MODEL}") as process,
        grpc.aio.insecure_channel(address, options) as channel,
    ):
        peak = Peak(process.pid)
        async with measured_delay(process) as delays:
            reply = await Channel(channel).one("Tokenize/Tokenize", message)
        assert len(reply.tokens) == len(MAX_TEXT) + 2
        assert peak.grown < MAX_FACTOR * message.ByteSize() + MAX_GROWTH_BYTES
        assert max(delays) < MAX_DELAY_SECONDS * LOADED_MACHINE


async def test_long_texts_of_a_stream_are_not_asked_for_in_one_request(
    messages_read: Callable[[], int],
) -> None:
    async def answer_later() -> None:
        """Wait until the next request can have several messages."""
        asked = sum(len(request.texts) for request in script.requests)
        await until(lambda: messages_read() >= min(12, asked + 3))

    script = Script(act=answer_later)
    async with serving(script) as tei_at:
        messages = [tei.EncodeRequest(inputs=MAX_TEXT[: len(MAX_TEXT) // 2])] * 12
        replies = await tei_at.many("Tokenize/TokenizeStream", messages)
    assert [len(reply.tokens) for reply in replies] == [len(MAX_TEXT) // 2] * 12
    assert all(sum(map(len, request.texts)) <= TOKENIZED_BYTES for request in script.requests)
    assert len(script.requests) < 12


@pytest.mark.parametrize(
    "found",
    [
        pb.Tokenization(ids=[1], starts=[0], ends=[3]),
        pb.Tokenization(ids=[1, 2], starts=[0], ends=[1, 2]),
    ],
)
async def test_tokens_beyond_their_text_are_an_error_before_the_answer_begins(
    found: pb.Tokenization, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beyond(request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(results=[found])

    monkeypatch.setattr("tests.edge.parts.tokenized", beyond)
    async with edge(Script()) as http:
        for path, content, _ in BODIES.values():
            field = next(name for name in ("inputs", "prompt", "text") if name in content)
            assert (await http.post(path, {**content, field: "ab"})).status == 500


@pytest.mark.parametrize("count", [0, 1, ENTRIES_AT_ONCE, ENTRIES_AT_ONCE + 1, 40_000])
def test_pieces_are_the_json_of_the_whole_list(count: int) -> None:
    pieces = list(group_pieces(encode_list({"id": number} for number in range(count))))
    assert json.loads(b"".join(pieces)) == [{"id": number} for number in range(count)]
    assert all(PIECE_BYTES <= len(piece) < 2 * PIECE_BYTES for piece in pieces[:-1])

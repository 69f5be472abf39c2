"""`tokenize` and `detokenize` of both clients, against a real gRPC server."""

from __future__ import annotations

import numpy as np
import pytest
import shoal
from shoal.errors import InputTooLong, InternalError, InvalidInput, ModelChanged
from shoal.requests import codec
from shoal.v1 import inference_pb2 as pb

from tests.api.fake_router import MAX_CHARACTERS, MODEL, FakeRouter


def test_tokens_of_a_list_and_of_one_text(router: FakeRouter) -> None:
    with shoal.Client(router.address) as client:
        result = client.tokenize(MODEL, ["ab", "", "x" * 60], return_tokens=True)
        assert (len(result), result.counts, result.max_tokens, result.revision) == (
            3,
            [2, 0, 60],
            MAX_CHARACTERS,
            "r1",
        )
        first, _, last = result
        assert (first.ids.tolist(), first.starts.tolist(), first.ends.tolist(), first.names) == (
            [97, 98],
            [0, 1],
            [1, 2],
            ("_a", "_b"),
        )
        assert first.ids.dtype == np.dtype(np.uint32)
        assert not first.ids.flags.writeable
        assert (last.count, last.kept_tokens, last.kept_end) == (60, MAX_CHARACTERS, MAX_CHARACTERS)
        assert not first.is_special(0)
        (alone,) = client.tokenize(MODEL, "abc", count_only=True)
        assert (alone.count, len(alone.ids)) == (3, 0)
        assert repr(result) == "TokenizeResult(3 texts, 62 tokens)"


async def test_asynchronous_client_has_the_same_methods(router: FakeRouter) -> None:
    async with shoal.AsyncClient(router.address) as client:
        assert (await client.tokenize(MODEL, "ab"))[0].ids.tolist() == [97, 98]
        assert (await client.detokenize(MODEL, [[97], [98, 99]])).texts == ("a", "bc")


def test_ids_of_one_sequence_or_of_several(router: FakeRouter) -> None:
    with shoal.Client(router.address) as client:
        ids = client.tokenize(MODEL, ["ab", "c"])
        assert client.detokenize(MODEL, [tokens.ids for tokens in ids]).texts == ("ab", "c")
        assert client.detokenize(MODEL, ids[0].ids, skip_special_tokens=True).texts == ("ab",)
        assert router.calls[-1].request.skip_special_tokens  # type: ignore[attr-defined]
        assert client.detokenize(MODEL, []).texts == ()
        assert len(client.tokenize(MODEL, [])) == 0


def test_long_lists_are_split_by_bytes_and_ids_and_merged_in_order(router: FakeRouter) -> None:
    texts = [f"{number} é" for number in range(1000)]
    done: list[tuple[int, int]] = []
    with shoal.Client(router.address, request_items=100) as client:
        result = client.tokenize(
            MODEL, texts, on_progress=lambda part, total: done.append((part, total))
        )
        back = client.detokenize(MODEL, [tokens.ids for tokens in result])
    assert list(back.texts) == texts
    assert done[-1] == (1000, 1000)
    assert len(done) == 10
    large = ["é" * 300_000] * 3
    with shoal.Client(router.address) as client:
        before = len(router.calls)
        ids = [tokens.ids for tokens in client.tokenize(MODEL, large)]
        assert len(router.calls) - before == 3, "600,000 bytes each"
        before = len(router.calls)
        client.detokenize(MODEL, [one[:100_000] for one in ids])
        assert len(router.calls) - before == 3, "a request has at most 131,072 ids"


def test_refused_text_is_named_by_its_place_in_the_callers_list(router: FakeRouter) -> None:
    with shoal.Client(router.address, request_items=2) as client:
        with pytest.raises(InputTooLong) as caught:
            client.tokenize(MODEL, ["a", "b", "c", "x" * 60], truncation="none")
        assert caught.value.field == "texts[3]"
        for texts, field in ((["a", 3], "texts[1]"), (["a", "b", "\ud800"], "texts[2]")):
            with pytest.raises(InvalidInput) as invalid:
                client.tokenize(MODEL, texts)  # type: ignore[arg-type]
            assert invalid.value.field == field
        with pytest.raises(InvalidInput) as invalid:
            client.detokenize(MODEL, [[1], [2, -1]])
        assert invalid.value.field == "sequences[1]"
        with pytest.raises(InvalidInput):
            client.tokenize(MODEL, ["a"], truncation="middle")  # type: ignore[arg-type]


def test_tokens_of_two_revisions_are_not_one_answer(router: FakeRouter) -> None:
    router.revision = lambda number: f"r{number}"
    with shoal.Client(router.address, request_items=1) as client, pytest.raises(ModelChanged):
        client.tokenize(MODEL, ["a", "b"])


def test_response_with_lists_of_different_length_is_an_internal_error() -> None:
    wrong = pb.Tokenization(count=2, ids=[1, 2], starts=[0], ends=[1, 2])
    with pytest.raises(InternalError):
        codec.tokenize_result(pb.TokenizeResponse(results=[wrong]))

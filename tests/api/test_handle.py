"""`ModelHandle`: plain values of both clients, and clients that outlive loops, forks and
pickles.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import shoal
from shoal import Chunking, ModelHandle
from shoal.handle import TextChunk
from shoal.tasks import Role

from tests.api.fake_router import MODEL, FakeRouter, make_vector

TEXTS = ["first text", "Second", "the third one is longer"]


@pytest.fixture
def handle(router: FakeRouter) -> Iterator[ModelHandle]:
    made = ModelHandle(
        MODEL, address=router.address, tenant="search", token="t0ken", query_instruction="find: "
    )
    yield made
    made.close()


async def test_every_verb_returns_the_clients_result(
    handle: ModelHandle, router: FakeRouter
) -> None:
    with shoal.Client(router.address) as client:
        three = client.encode(MODEL, TEXTS, representations=["dense", "sparse", "multi_vector"])
        scores = client.score(MODEL, "first", TEXTS, top_n=2)
        entities = client.entities(MODEL, TEXTS, ["name"])
    sparse = [(columns.tolist(), weights.tolist()) for columns, weights in three.sparse]
    vectors = [rows.tolist() for rows in three.multi_vector]
    assert handle.dense(TEXTS) == await handle.adense(TEXTS) == three.dense.tolist()
    assert handle.sparse(TEXTS) == await handle.asparse(TEXTS) == sparse
    assert handle.multi_vector(TEXTS) == await handle.amulti_vector(TEXTS) == vectors
    assert handle.forms(TEXTS, ["sparse", "dense"]) == {
        "sparse": sparse,
        "dense": three.dense.tolist(),
    }
    assert await handle.aforms(TEXTS, ["multi_vector"]) == {"multi_vector": vectors}
    ranking = [(int(index), float(scores.scores[index])) for index in scores.ranking]
    assert handle.rank("first", TEXTS, 2) == await handle.arank("first", TEXTS, 2) == ranking
    found = handle.extract(TEXTS, "entities", ["name"])
    assert found == await handle.aextract(TEXTS, "entities", ["name"])
    assert [[one["start"] for one in each] for each in found] == [
        [one.start for one in each.entities] for each in entities
    ]
    await handle.aclose()


def test_instruction_is_for_queries(handle: ModelHandle, router: FakeRouter) -> None:
    roles: list[Role | None] = ["query", "document", None]
    for role in roles:
        handle.dense(TEXTS, role)
    requests: list[Any] = [call.request for call in router.calls]
    assert [request.instruction for request in requests] == ["find: ", "", ""]


def test_options_are_arguments_of_the_calls(router: FakeRouter) -> None:
    ModelHandle(MODEL, address=router.address, options={"dimensions": 5, "adapter": "legal"}).dense(
        TEXTS
    )
    request: Any = router.calls[0].request
    assert (request.dimensions, request.adapter) == (5, "legal")
    with pytest.raises(TypeError, match="colour"):
        ModelHandle(MODEL, address=router.address, options={"colour": "red"}).dense(TEXTS)


async def test_empty_list_is_an_empty_answer_without_a_call(
    handle: ModelHandle, router: FakeRouter
) -> None:
    answers: list[list[Any]] = [
        handle.dense([]),
        handle.sparse([]),
        handle.multi_vector([]),
        handle.rank("first", []),
    ]
    answers += [handle.extract([], "entities"), await handle.adense([])]
    assert answers == [[]] * 6
    assert router.calls == []


async def test_chunks_are_those_of_the_client(handle: ModelHandle, router: FakeRouter) -> None:
    found = handle.chunks(TEXTS, Chunking("tokens", 8, 2, late=True), embed=True)
    wanted = [
        [
            TextChunk(chunk.start, chunk.end, chunk.text, chunk.tokens, vector)
            for chunk, vector in zip(own, handle.dense([chunk.text for chunk in own]), strict=True)
        ]
        for own in client_chunks(router, TEXTS)
    ]
    assert found == wanted
    assert await handle.achunks(TEXTS, Chunking("tokens", 8, 2, late=True), embed=True) == wanted
    assert [chunk.text for chunk in found[0]] == ["first", "text"]
    request: Any = router.calls[0].request
    assert (request.chunking.max_tokens, request.chunking.overlap) == (8, 2)
    assert request.chunking.late
    await handle.aclose()


def client_chunks(router: FakeRouter, texts: list[str]) -> list[list[shoal.Chunk]]:
    with shoal.Client(router.address) as client:
        return list(client.encode(MODEL, texts, chunking=Chunking()).chunks)


async def test_chunks_without_vectors_request_the_models_main_form(
    handle: ModelHandle, router: FakeRouter
) -> None:
    found = handle.chunks(TEXTS)
    assert found == await handle.achunks(TEXTS)
    assert {chunk.vector for own in found for chunk in own} == {None}
    request: Any = router.calls[0].request
    assert list(request.representations) == []
    await handle.aclose()


async def test_empty_text_has_no_chunks(handle: ModelHandle, router: FakeRouter) -> None:
    assert handle.chunks([]) == await handle.achunks([]) == []
    assert handle.chunks(["", ""]) == await handle.achunks(["", ""]) == [[], []]
    assert router.calls == []
    chunking = Chunking(contexts=["a", "b", "c"])
    found = handle.chunks(["one two", "", "three"], chunking)
    assert found == await handle.achunks(["one two", "", "three"], chunking)
    assert [[chunk.text for chunk in own] for own in found] == [["one", "two"], [], ["three"]]
    request: Any = router.calls[0].request
    assert [(item.text, item.context) for item in request.items] == [
        ("one two", "a"),
        ("three", "c"),
    ]
    await handle.aclose()


def test_unknown_kind_to_find_is_refused(handle: ModelHandle) -> None:
    with pytest.raises(
        ValueError, match="find must be one of entities, labels, relations, not 'verbs'"
    ):
        handle.extract(TEXTS, "verbs")  # type: ignore[arg-type]


def test_each_event_loop_has_a_client(handle: ModelHandle) -> None:
    assert (
        asyncio.run(handle.adense(TEXTS))
        == asyncio.run(handle.adense(TEXTS))
        == handle.dense(TEXTS)
    )
    assert len(handle._async_clients) == 1, "that of the closed loop is forgotten"
    with pytest.raises(RuntimeError):
        _ = handle.async_client


def test_threads_share_a_client(handle: ModelHandle) -> None:
    seen: list[shoal.Client] = []
    threads = [threading.Thread(target=lambda: seen.append(handle.client)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(map(id, seen))) == 1


async def test_closed_handle_connects_again(handle: ModelHandle) -> None:
    first = handle.client
    handle.close()
    handle.close()
    assert handle.dense(TEXTS[:1]) == [make_vector(TEXTS[0]).tolist()]
    assert handle.client is not first
    await handle.adense(TEXTS)
    await handle.aclose()
    await handle.aclose()
    assert await handle.adense(TEXTS) == handle.dense(TEXTS)
    await handle.aclose()


def test_copy_is_the_same_and_a_pickle_has_no_token(
    handle: ModelHandle, router: FakeRouter
) -> None:
    handle.dense(TEXTS)
    assert copy.copy(handle) is copy.deepcopy(handle) is handle
    data = pickle.dumps(handle)
    assert b"t0ken" not in data
    again = pickle.loads(data)
    assert again.dense(TEXTS, "query") == handle.dense(TEXTS, "query")
    assert (again.model, again.query_instruction) == (MODEL, "find: ")
    metadata = [dict(call.metadata) for call in router.calls]
    assert [one["x-shoal-tenant"] for one in metadata] == ["search"] * 3
    assert ["authorization" in one for one in metadata] == [True, False, True]
    again.close()


def seen_by_child(handle: ModelHandle, parents: int, to: multiprocessing.SimpleQueue[bool]) -> None:
    to.put(id(handle.client) != parents)


def test_child_makes_its_own_client(router: FakeRouter) -> None:
    handle = ModelHandle(MODEL, address=router.address)
    answers: multiprocessing.SimpleQueue[bool] = multiprocessing.get_context("fork").SimpleQueue()
    client = handle.client  # kept alive, so that its id is not reused
    child = multiprocessing.get_context("fork").Process(
        target=seen_by_child, args=(handle, id(client), answers)
    )
    child.start()
    child.join(120)
    assert child.exitcode == 0
    assert answers.get()

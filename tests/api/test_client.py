"""Both clients, against a real gRPC server."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import pickle
from typing import Any

import grpc
import numpy as np
import pytest
import shoal
from shoal import errors
from shoal.v1 import inference_pb2

from tests.api.conftest import Connect
from tests.api.fake_router import MODEL, FakeRouter, Refusal, make_vector
from tests.support.waiting import wait_until

TEXTS = ["first text", "Second", "the third one is longer"]
QUICK = shoal.RetryPolicy(first_delay=0.01, longest_delay=0.05)


async def held(router: FakeRouter, calls: int) -> None:
    """Wait until the router holds `calls` calls."""
    await asyncio.to_thread(wait_until, lambda: router.active >= calls, what=f"{calls} calls")


async def test_encode_gives_a_row_for_each_item(connect: Connect, router: FakeRouter) -> None:
    result = await connect(router.address).do("encode", MODEL, TEXTS)
    np.testing.assert_array_equal(result.dense, [make_vector(text) for text in TEXTS])
    assert (result.revision, result.usage.input_tokens) == ("r1", 8)
    assert result.timings.forward_seconds == 0.01
    assert result.representations == ("dense",)
    with pytest.raises(
        ValueError,
        match=(
            r"this result has no sparse representation, only: dense; request it with "
            r'representations=\["sparse"\]'
        ),
    ):
        _ = result.sparse


async def test_every_argument_is_sent(connect: Connect, router: FakeRouter) -> None:
    result = await connect(router.address).do(
        "encode",
        MODEL,
        (text for text in TEXTS),
        role="query",
        representations=["dense", "sparse", "multi_vector"],
        data_type="bfloat16",
        dimensions=5,
        normalize=False,
        instruction="find: ",
        truncation="none",
        adapter="legal",
        pool="l4-spot",
        priority="bulk",
    )
    request = router.calls[0].request
    sent = str(request)
    for wanted in (
        "ROLE_QUERY",
        "BFLOAT16",
        "dimensions: 5",
        "normalize: false",
        '"find: "',
        "TRUNCATION_NONE",
        '"legal"',
        '"l4-spot"',
        "BULK",
    ):
        assert wanted in sent
    assert result.dense.shape == (3, 5)
    assert [len(row) for row in result.multi_vector] == [2, 1, 5]
    assert result.sparse.to_scipy().toarray()[1, ord("S")] == 1.5


async def test_single_item_is_a_list_of_one(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    assert (await client.do("encode", MODEL, "alone")).dense.shape == (1, 12)
    assert (await client.do("encode", MODEL, "alone", representations="dense")).dense.shape == (
        1,
        12,
    )


async def test_score_and_ranking(connect: Connect, router: FakeRouter) -> None:
    documents = ["none of it", "a red fox", "a fox"]
    result = await connect(router.address).do(
        "score", MODEL, "red fox", documents, top_n=2, scale="logit"
    )
    assert result.scores.tolist() == [0.0, 2.0, 1.0]
    assert result.ranking.tolist() == [1, 2]
    assert "SCORE_SCALE_LOGIT" in str(router.calls[0].request)


async def test_entities_and_labels(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    found = await client.do(
        "entities",
        MODEL,
        "in Bern and Rome",
        ["place"],
        threshold=0.5,
        flat=True,
        aggregation="max",
    )
    assert [(entity.text, entity.label) for entity in found[0].entities] == [
        ("Bern", "place"),
        ("Rome", "place"),
    ]
    assert "in Bern and Rome"[found[0].entities[1].start : found[0].entities[1].end] == "Rome"
    found = await client.do(
        "classify",
        MODEL,
        ["abc", "xyz"],
        ["ab", "xy"],
        multi_label=True,
        hypothesis="It is {}.",
        among_labels=True,
    )
    assert [item.labels[0].label for item in found] == ["ab", "xy"]
    assert "among_labels: true" in str(router.calls[-1].request)
    same = await client.do("extract", MODEL, ["abc", "xyz"], shoal.Classify(labels=["ab", "xy"]))
    assert same.results == found.results
    assert 'hypothesis: "It is {}."' in str(router.calls[1].request)


async def test_relations(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    found = await client.do(
        "relations",
        MODEL,
        ["Ada met Bob", "nobody"],
        ["met"],
        entity_labels=["person"],
        threshold=0.25,
    )
    relation = found[0].relations[0]
    assert (relation.head.text, relation.label, relation.tail.text, relation.score) == (
        "Ada",
        "met",
        "Bob",
        0.75,
    )
    assert found[1].relations == ()
    sent = router.calls[-1].request
    assert isinstance(sent, inference_pb2.ExtractRequest)
    assert sent.relations == inference_pb2.RelationsTask(
        labels=["met"], entity_labels=["person"], threshold=0.25
    )
    await client.do("relations", MODEL, "Ada met Bob", ["met"])
    assert not router.calls[-1].request.relations.HasField("threshold")  # type: ignore[attr-defined]


async def test_relations_between_given_entities(connect: Connect, router: FakeRouter) -> None:
    """Entities are given by position, with a label, or as another model's result.

    Each item keeps its entities when a call is split.
    """
    client = connect(router.address, request_items=1)
    known = shoal.Entity(start=8, end=11, label="person", score=0.5, text="Bob")
    await client.do(
        "relations",
        MODEL,
        ["Ada met Bob", "nobody"],
        ["met"],
        entities=[[(0, 3), (4, 7, "verb"), known], []],
    )
    sent = {call.request.items[0].text: call.request.items[0] for call in router.calls}  # type: ignore[attr-defined]
    assert [(one.start, one.end, one.label) for one in sent["Ada met Bob"].entities] == [
        (0, 3, ""),
        (4, 7, "verb"),
        (8, 11, "person"),
    ]
    assert not sent["nobody"].entities
    for wrong, field in (
        ([[(0, 3)]], "entities"),
        ([[], [(0, 1), (-1, 3)]], "items[1].entities[1]"),
        ([[(1,)], []], "items[0].entities[0]"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            await client.do("relations", MODEL, ["Ada met Bob", "nobody"], ["met"], entities=wrong)
        assert caught.value.field == field


async def test_every_task_has_its_message(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    tasks = {
        "relations": shoal.Relations(labels=["in"]),
        "regions": shoal.Regions(labels=["cat"], threshold=0.25),
        "structure": shoal.Schema().with_entities(["person"]),
        "text": shoal.ReadText(kind="ocr", max_tokens=9),
    }
    for name, task in tasks.items():
        await client.do("extract", MODEL, [b"\x89PNG"], task)
        assert router.calls[-1].request.WhichOneof("task") == name
    assert "KIND_OCR" in str(router.calls[-1].request)
    assert router.calls[-1].request.items[0].image.data == b"\x89PNG"  # type: ignore[attr-defined]


async def test_turns_are_roles_and_texts(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    turns: list[shoal.tasks.Turn] = [
        ("user", "Who was Ada?"),
        ("assistant", "A mathematician."),
        ("system", "Be short."),
    ]
    await client.do("extract", MODEL, ["When?"], shoal.ReadText(turns=turns))
    sent = router.calls[-1].request.text.turns  # type: ignore[attr-defined]
    assert [(turn.role, turn.text) for turn in sent] == [
        (1, "Who was Ada?"),
        (2, "A mathematician."),
        (3, "Be short."),
    ]
    for wrong, field in (
        (("critic", "a"), "text.turns[1].role"),
        ("ab", "text.turns[1]"),
        (("user",), "text.turns[1]"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            await client.do("extract", MODEL, ["When?"], shoal.ReadText(turns=[turns[0], wrong]))  # type: ignore[list-item]
        assert caught.value.field == field
    await client.do(
        "extract",
        MODEL,
        ["When?"],
        shoal.ReadText(template_values={"enable_thinking": False, "n": 3}),
    )
    assert json.loads(router.calls[-1].request.text.template_values) == {  # type: ignore[attr-defined]
        "enable_thinking": False,
        "n": 3,
    }
    with pytest.raises(errors.InvalidInput) as caught:
        await client.do(
            "extract", MODEL, ["When?"], shoal.ReadText(template_values={"n": float("nan")})
        )
    assert caught.value.field == "text.template_values"


async def test_sampling_tools_and_seeds_are_sent(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    call = shoal.ToolCall("add", '{"a": 1}')
    tool = {"type": "function", "function": {"name": "add"}}
    task = shoal.ReadText(
        temperature=0.5,
        top_k=3,
        seed=7,
        stop="\n",
        top_logprobs=0,
        tools=[tool],
        tool_choice="add",
        turns=[("user", "1 + 1?"), ("assistant", "", [call])],
        item_role="tool",
    )
    await client.do("extract", MODEL, ["2", "3"], task)
    sent: Any = router.calls[-1].request
    assert [item.seed for item in sent.items] == [7, 7]
    assert (
        sent.text.sampling.temperature,
        sent.text.sampling.top_k,
        sent.text.sampling.HasField("top_p"),
    ) == (0.5, 3, False)
    assert (
        list(sent.text.stop),
        sent.text.HasField("top_logprobs"),
        sent.text.tool,
        sent.text.item_role,
    ) == (
        ["\n"],
        True,
        "add",
        4,
    )
    assert json.loads(sent.text.tools) == [tool]
    assert sent.text.turns[1].tool_calls[0].arguments == '{"a": 1}'
    await client.do("extract", MODEL, ["2"], shoal.ReadText())
    sent = router.calls[-1].request
    assert not sent.items[0].HasField("seed")
    assert not sent.text.HasField("sampling")
    for wrong, field in (
        ({"seed": -1}, "seed"),
        ({"tools": [{"a": {1}}]}, "text.tools"),
        ({"item_role": "critic"}, "text.item_role"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            await client.do("extract", MODEL, ["2"], shoal.ReadText(**wrong))
        assert caught.value.field == field


async def test_models_and_mesh(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    assert [model.state for model in await client.do("models.list")] == [
        "failed",
        "downloading",
        "resident",
    ]
    model = await client.do("models.get", MODEL)
    assert (model.card.tasks, model.card.representations) == (
        ("encode", "score"),
        ("dense", "multi_vector"),
    )
    assert (await client.do("models.load", MODEL, pool="cpu")).places[0].worker_id == "w1"
    assert await client.do("models.evict", MODEL) == ["w1"]
    assert (await client.do("models.pin", MODEL)).places[0].pinned
    assert not (await client.do("models.pin", MODEL, False)).places[0].pinned
    mesh = await client.do("mesh")
    assert (mesh.router_id, mesh.workers[0].resident, mesh.lanes[0].queued_tokens) == (
        "router-1",
        (MODEL,),
        1234,
    )
    assert await client.do("healthy")
    assert not await client.do("healthy", "shoal.v1.ModelService")
    with pytest.raises(errors.ModelNotFound, match="other/model"):
        await client.do("models.get", "other/model")


async def test_long_list_is_split_and_bounded_and_merged_in_order(
    connect: Connect, router: FakeRouter
) -> None:
    texts = [f"text number {number}" for number in range(95)]
    seen: list[tuple[int, int]] = []
    client = connect(router.address, request_items=10, concurrency=3)
    router.gate.clear()
    work = asyncio.create_task(
        client.do(
            "encode", MODEL, texts, on_progress=lambda done, total: seen.append((done, total))
        )
    )
    await held(router, 3)
    assert len(router.calls) == 3
    router.gate.set()
    result = await work
    np.testing.assert_array_equal(result.dense, [make_vector(text) for text in texts])
    assert router.most_active == 3
    assert len(router.calls) == 10
    assert len({call.request_id for call in router.calls}) == 10
    assert [total for _, total in seen] == [95] * 10
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (95, 95)
    assert result.usage.input_tokens == 95 * 3


async def test_long_texts_are_split_by_their_length(connect: Connect, router: FakeRouter) -> None:
    await connect(router.address, request_characters=100).do(
        "encode", MODEL, ["x" * 60, "y" * 30, "z" * 500, "w"]
    )
    sizes = sorted(len(call.request.items) for call in router.calls)  # type: ignore[attr-defined]
    assert sizes == [1, 1, 2]


async def test_long_query_is_sent_with_fewer_documents(
    connect: Connect, router: FakeRouter
) -> None:
    """A router admits this many: a model may read the query with each of them, 393 KB here."""
    result = await connect(router.address, request_items=10_000).do(
        "score", MODEL, "東" * 131_072, ["d"] * 600
    )
    requests = [call.request for call in router.calls]
    assert [
        len(one.documents) for one in requests if isinstance(one, inference_pb2.ScoreRequest)
    ] == [300, 300]
    assert len(result.scores) == 600


async def test_split_scores_are_ranked_together(connect: Connect, router: FakeRouter) -> None:
    documents = [f"word{number} red" if number % 7 == 3 else "nothing" for number in range(25)]
    result = await connect(router.address, request_items=4).do(
        "score", MODEL, "red", documents, top_n=3
    )
    assert result.ranking.tolist() == [3, 10, 17]
    assert len(result.scores) == 25


async def test_first_failure_ends_the_other_parts(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address, request_items=1, concurrency=4)
    router.gate.clear()
    work = asyncio.create_task(client.do("encode", MODEL, ["a"] * 50))
    await held(router, 4)
    invalid = Refusal(
        grpc.StatusCode.INVALID_ARGUMENT, "INPUT_TOO_LONG", "items[0].text is long", "items[0].text"
    )
    router.refusals = [invalid] * 50
    router.gate.set()
    with pytest.raises(errors.InputTooLong) as caught:
        await asyncio.wait_for(work, 60)
    assert len(router.calls) < 50
    assert caught.value.field.startswith("items[")


async def test_field_path_counts_in_the_callers_list(connect: Connect, router: FakeRouter) -> None:
    router.refusals = [
        Refusal(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_INPUT",
            "items[1].text is empty",
            "items[1].text",
        )
    ]
    client = connect(router.address, request_items=3, concurrency=1)
    with pytest.raises(errors.InvalidInput) as caught:
        await client.do("encode", MODEL, ["a"] * 3 + ["b", "c", "d"])
    assert caught.value.field == "items[1].text"
    original = FakeRouter.begin_call
    router.calls.clear()

    def second_fails(
        self: FakeRouter,
        method: str,
        request: inference_pb2.EncodeRequest,
        context: grpc.ServicerContext,
    ) -> int:
        if request.items[0].text == "b":  # not by count: a call that was given up may still arrive
            self.refusals = [
                Refusal(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "INVALID_INPUT",
                    "items[1].text is empty",
                    "items[1].text",
                )
            ]
        return original(self, method, request, context)

    router.begin_call = second_fails.__get__(router)  # type: ignore[method-assign]
    with pytest.raises(errors.InvalidInput, match=r"items\[4\].text is empty") as caught:
        await client.do("encode", MODEL, ["a"] * 3 + ["b", "c", "d"])
    assert caught.value.field == "items[4].text"


ID, OTHER = "0123456789abcdef", "fedcba9876543210"


async def test_embedding_id_is_required_and_returned(connect: Connect, router: FakeRouter) -> None:
    router.embedding_id = lambda number: f"{ID}.float32"
    handle = connect(router.address)
    result = await handle.do("encode", MODEL, TEXTS, expect_embedding_id=ID)
    assert result.embedding_id == f"{ID}.float32"
    assert router.calls[0].request.expect_embedding_id == ID  # type: ignore[attr-defined]
    skipping = await handle.do("encode", MODEL, [*TEXTS, ""], on_invalid="skip")
    assert skipping.embedding_id == f"{ID}.float32"
    assert (await handle.do("encode", MODEL, [])).embedding_id == ""


@pytest.mark.parametrize("found", ["", f"{OTHER}.float32", f"{ID}.int8-1"])
async def test_vectors_that_an_old_mesh_did_not_check_are_refused(
    connect: Connect, router: FakeRouter, found: str
) -> None:
    router.embedding_id = lambda number: found
    with pytest.raises(errors.EmbeddingIdMismatch, match=f"expect_embedding_id is {ID}.float32"):
        await connect(router.address).do(
            "encode", MODEL, TEXTS, expect_embedding_id=f"{ID}.float32"
        )


async def test_mismatch_of_the_mesh_is_an_exception(connect: Connect, router: FakeRouter) -> None:
    router.refusals = [
        Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            "EMBEDDING_ID_MISMATCH",
            "both ids",
            "expect_embedding_id",
        )
    ]
    with pytest.raises(errors.EmbeddingIdMismatch, match="both ids") as raised:
        await connect(router.address).do("encode", MODEL, TEXTS, expect_embedding_id=ID)
    assert raised.value.field == "expect_embedding_id"
    assert len(router.calls) == 1


async def test_parts_with_two_embedding_ids_are_refused(
    connect: Connect, router: FakeRouter
) -> None:
    texts = [f"text {number}" for number in range(2000)]
    router.embedding_id = lambda number: f"{ID}.{'float32' if number % 2 else 'int8-1'}"
    assert (await connect(router.address).do("encode", MODEL, texts)).embedding_id == ID
    router.embedding_id = lambda number: f"{ID if number % 2 else OTHER}.float32"
    with pytest.raises(errors.ModelChanged, match=f"{ID} and {OTHER}"):
        await connect(router.address).do("encode", MODEL, texts)


async def test_parts_of_two_revisions_are_refused(connect: Connect, router: FakeRouter) -> None:
    router.revision = lambda number: f"r{number}"
    with pytest.raises(errors.ModelChanged):
        await connect(router.address, request_items=2).do("encode", MODEL, TEXTS)


async def test_invalid_argument_is_reported_with_its_field(
    connect: Connect, router: FakeRouter
) -> None:
    client = connect(router.address)
    for arguments, options, field in (
        ((["good", 5],), {}, "items[1]"),
        ((["good", "half \ud800"],), {}, "items[1].text"),
        ((["good"],), {"role": "reader"}, "role"),
        ((["good"],), {"representations": ["dense", "thick"]}, "representations"),
        ((["good"],), {"data_type": "float8"}, "data_type"),
        ((["good"],), {"dimensions": -1}, "dimensions"),
        ((["good"],), {"instruction": 3}, "instruction"),
        ((["good"],), {"priority": "bulk", "normalize": "yes"}, "normalize"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            await client.do("encode", MODEL, *arguments, **options)
        assert caught.value.field == field
        assert field.partition(".")[0] in caught.value.message
    with pytest.raises(errors.InvalidInput, match="on_invalid"):
        await client.do("encode", MODEL, [], on_invalid="drop")
    with pytest.raises(ValueError, match="timeout"):
        await client.do("encode", MODEL, "x", timeout=0)
    assert not router.calls


@pytest.mark.parametrize(
    ("verb", "values", "options"),
    [
        ("encode", [TEXTS], {"window_overlap": 5}),
        ("score", ["query", TEXTS], {"truncate": "end"}),
        ("tokenize", [TEXTS], {"on_invalid": "skip"}),
        ("detokenize", [[1, 2]], {"adapter": "legal"}),
    ],
)
async def test_option_of_another_verb_is_refused(
    connect: Connect, router: FakeRouter, verb: str, values: list[Any], options: dict[str, Any]
) -> None:
    name = next(iter(options))
    with pytest.raises(TypeError, match=rf"{verb}\(\) got an unexpected keyword .* '{name}'"):
        await connect(router.address).do(verb, MODEL, *values, **options)
    assert router.calls == []


@pytest.mark.parametrize("kind", [shoal.Client, shoal.AsyncClient])
def test_help_names_the_options_of_a_verb(kind: type[Any]) -> None:
    for verb, name in (
        (kind.encode, "truncation"),
        (kind.score, "window_overlap"),
        (kind.tokenize, "pool"),
        (kind.extract_stream, "timeout"),
    ):
        assert inspect.signature(verb).parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"{name}: " in verb.__doc__


async def test_tenant_and_token_and_deadline_are_sent(connect: Connect, router: FakeRouter) -> None:
    tokens = iter(["one", "two"])
    client = connect(router.address, tenant="search", token=lambda: next(tokens), timeout=90.0)
    await client.do("encode", MODEL, "x")
    await client.do("encode", MODEL, "x", timeout=40.0)
    assert [call.metadata["x-shoal-tenant"] for call in router.calls] == ["search", "search"]
    assert [call.metadata["authorization"] for call in router.calls] == ["Bearer one", "Bearer two"]
    assert 41.0 < router.calls[0].seconds_left <= 91.0  # gRPC rounds deadlines up.
    assert router.calls[1].seconds_left <= 41.0
    assert router.calls[0].metadata["user-agent"].startswith("shoal-python/")
    assert router.calls[0].metadata["x-shoal-max-answer-bytes"] == "-1", (
        "its channels read messages of any size"
    )


async def test_closed_client_says_so(connect: Connect, router: FakeRouter) -> None:
    client = connect(router.address)
    await client.do("encode", MODEL, "x")
    await client.close()
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await client.do("encode", MODEL, "x")


@pytest.mark.parametrize("dimensions", [0, 5])
async def test_empty_list_is_an_empty_answer(
    connect: Connect, router: FakeRouter, dimensions: int
) -> None:
    client = connect(router.address)
    encoded = await client.do("encode", MODEL, [], dimensions=dimensions)
    assert (encoded.dense.shape, encoded.dense.dtype, encoded.representations) == (
        (0, dimensions),
        np.float32,
        ("dense",),
    )
    assert encoded.dequantize().shape == (0, dimensions)
    forms = await client.do(
        "encode", MODEL, [], representations=["sparse", "multi_vector"], dimensions=dimensions
    )
    assert (forms.sparse.shape, len(forms.multi_vector), forms.multi_vector.values.shape) == (
        (0, 0),
        0,
        (0, dimensions),
    )
    for data_type, width in (
        ("int8", 8),
        ("uint8", 8),
        ("binary", 1),
        ("float16", 8),
        ("bfloat16", 8),
    ):
        stored = await client.do("encode", MODEL, [], data_type=data_type, dimensions=8)
        assert (stored.dense.shape, stored.dequantize().shape) == ((0, width), (0, 8))
    scored = await client.do("score", MODEL, "query", [])
    assert (scored.scores.tolist(), scored.ranking.tolist(), scored.usage.input_tokens) == (
        [],
        [],
        0,
    )
    for verb, labels in (("entities", ["place"]), ("classify", ["a"]), ("relations", ["met"])):
        assert list(await client.do(verb, MODEL, [], labels)) == []
    assert not router.calls


LONG = "much too long " * 10


async def test_invalid_items_are_skipped_and_reported(connect: Connect, router: FakeRouter) -> None:
    """One empty text, one that is none and one too long among many; each has a row that says
    nothing.
    """
    texts = [f"text {number}" for number in range(100)]
    mixed: list[object] = [*texts]
    mixed[3], mixed[17], mixed[60], mixed[99] = "", None, LONG, LONG
    client = connect(router.address, request_items=25)
    forms = ("dense", "sparse", "multi_vector")
    result = await client.do(
        "encode", MODEL, mixed, on_invalid="skip", truncation="none", representations=forms
    )
    assert [(one.index, one.reason) for one in result.skipped] == [
        (3, "INVALID_INPUT"), (17, "INVALID_INPUT"), (60, "INPUT_TOO_LONG"), (99, "INPUT_TOO_LONG"),
    ]  # fmt: skip
    assert [one.message for one in result.skipped] == [
        "items[3] is empty",
        "items[17] is None, a missing value; it must be a str, or an image: a Path, the bytes of "
        "a file, a PIL.Image or a uint8 array",
        "items[60].text is too long",
        "items[99].text is too long",
    ]
    bad = {one.index for one in result.skipped}
    good = [index for index in range(100) if index not in bad]
    assert np.isnan(result.dense[sorted(bad)]).all()
    np.testing.assert_array_equal(result.dense[good], [make_vector(texts[index]) for index in good])
    assert [len(result.multi_vector[index]) for index in range(100)] == [
        0 if index in bad else 2 for index in range(100)
    ]
    assert [len(result.sparse[index][0]) > 0 for index in range(100)] == [
        index not in bad for index in range(100)
    ]
    assert len(router.calls) == 4 + 2 * 2  # a part with an item that is refused is two more
    with pytest.raises(errors.InvalidInput, match=r"items\[3\]"):
        await client.do("encode", MODEL, [*texts[:3], "", *texts[4:]])


async def test_skipping_has_the_same_meaning_for_every_verb(
    connect: Connect, router: FakeRouter
) -> None:
    client = connect(router.address)
    documents = ["a fox", "", "a red fox", LONG]
    scored = await client.do(
        "score", MODEL, "red fox", documents, on_invalid="skip", truncation="none"
    )
    np.testing.assert_array_equal(scored.scores, [1, np.nan, 2, np.nan])
    assert scored.ranking.tolist() == [2, 0]
    assert [one.index for one in scored.skipped] == [1, 3]
    found = await client.do("entities", MODEL, ["", "in Bern"], ["place"], on_invalid="skip")
    assert [[entity.text for entity in item.entities] for item in found] == [[], ["Bern"]]
    assert [one.index for one in found.skipped] == [0]
    given = [[(0, 1)], [(0, 3), (8, 11)]]
    related = await client.do(
        "relations", MODEL, ["", "Ada met Bob"], ["met"], entities=given, on_invalid="skip"
    )
    assert len(related[1].relations) == 1
    assert len(router.calls[-1].request.items[0].entities) == 2  # type: ignore[attr-defined]
    nothing = await client.do("encode", MODEL, ["", ""], on_invalid="skip", dimensions=3)
    assert np.isnan(nothing.dense).all()
    assert nothing.dense.shape == (2, 3)
    quantised = await client.do("encode", MODEL, ["a", ""], on_invalid="skip", data_type="int8")
    np.testing.assert_array_equal(np.isnan(quantised.dequantize()).all(axis=1), [False, True])


async def test_error_not_about_an_item_is_raised_even_when_skipping(
    connect: Connect, router: FakeRouter
) -> None:
    client = connect(router.address)
    for refusal in (
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", "model is required", "model"),
        Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT", "items[7] is odd", "items[7]"),
        Refusal(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "no", "items[0]"),
    ):
        router.refusals = [refusal]
        with pytest.raises(errors.ShoalError):
            await client.do("encode", MODEL, ["a", "b"], on_invalid="skip")
    assert len(router.calls) == 3


async def test_where_every_item_is_refused_the_requests_are_bounded(
    connect: Connect, router: FakeRouter
) -> None:
    result = await connect(router.address).do(
        "encode", MODEL, [LONG] * 64, on_invalid="skip", truncation="none"
    )
    assert len(result.skipped) == 64
    assert len(router.calls) == 64
    assert sum(str(call.request).count("much too long") for call in router.calls) <= 64 * 7 * 10


async def test_arrays_are_read_only_unless_asked_otherwise(
    connect: Connect, router: FakeRouter
) -> None:
    forms = ("dense", "sparse", "multi_vector")
    for options in ({}, {"request_items": 1}):
        client = connect(router.address, **options)
        for data_type in ("float32", "bfloat16"):
            arguments = ("encode", MODEL, ["one text", "another"])
            fixed = await client.do(*arguments, representations=forms, data_type=data_type)
            free = await client.do(
                *arguments, representations=forms, data_type=data_type, writable=True
            )
            parts = [
                (one.dense, one.sparse.data, one.sparse.indices, one.multi_vector.values)
                for one in (fixed, free)
            ]
            assert [
                any(array.flags.writeable for array in parts[0]),
                all(array.flags.writeable for array in parts[1]),
            ] == [
                False,
                True,
            ]
            for before, after in zip(*parts, strict=True):
                np.testing.assert_array_equal(before, after)
        scored = await client.do("score", MODEL, "one", ["one", "two"], writable=True)
        scored.scores[0] = 7
        assert scored.ranking.flags.writeable


def test_repr_of_results_is_short(router: FakeRouter) -> None:
    with shoal.Client(router.address) as client:
        found = client.encode(MODEL, ["a"] * 500, representations=["dense", "sparse"])
        assert repr(found).startswith(
            "EncodeResult(dense=Vectors(500 x 12 float32), sparse=Sparse(500 x 200, "
        )
        assert repr(found).endswith("input_tokens=500, revision='r1')")
        ranked = client.score(MODEL, "a", [f"a {number}" for number in range(500)])
        assert repr(ranked).startswith("ScoreResult(documents=500, best={")
        named = client.entities(MODEL, ["Anna lives in Bern."] * 500)
        assert "items=500" in repr(named)
        for result in (found, ranked, named):
            assert len(repr(result)) < 1000
    assert repr(shoal.Extraction()) == "Extraction()"
    assert (
        repr(shoal.Extraction(text="a", finish_reason="stop"))
        == "Extraction(text='a', finish_reason='stop')"
    )


@pytest.mark.parametrize("kind", [shoal.Client, shoal.AsyncClient])
def test_client_shows_its_address_and_a_picklable_alternative(
    kind: type[shoal.Client] | type[shoal.AsyncClient],
) -> None:
    client = kind("127.0.0.1:1", token="secret")
    assert repr(client) == f"{kind.__name__}('127.0.0.1:1')"
    assert repr(shoal.ModelHandle("org/model", address="127.0.0.1:1", token="secret")) == (
        "ModelHandle('org/model', address='127.0.0.1:1')"
    )
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(
            TypeError,
            match=rf"{kind.__name__} holds connections .* shoal\.ModelHandle\(model, address=",
        ):
            attempt(client)

"""TEI's gRPC API over real channels, and ports with a fixed model, in front of a real gRPC server
with scripted answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from shoal.errors import Unauthenticated
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from libs.errors import (
    InvalidInput,
    NoCapacity,
    QueueFull,
    ShoalError,
    TaskNotSupported,
    WorkerLost,
)
from libs.serving import Security
from libs.serving.watched import Watched
from services.edge.app import running
from services.edge.asgi import State
from services.edge.intake.budget import Budget
from services.edge.intake.callers import Callers
from services.edge.intake.reading import BodyIntake
from services.edge.messages.names import AliasNames, AliasTarget
from services.edge.ports.tei_grpc import MAX_TOGETHER, MESSAGE_BYTES, TeiServer
from services.edge.routers import Routers
from services.edge.settings import Settings
from services.edge.teiv1 import tei_pb2 as tei
from services.local.settings import free_port
from tests.edge.parts import (
    MODEL,
    WIDTH,
    Http,
    Script,
    card,
    dense,
    edge,
    ragged,
    routing,
    scores,
    sparse,
    vectors,
)
from tests.edge.test_server import until
from tests.support.certificates import Certificates

CODE = grpc.StatusCode
CALL_SECONDS = 50
"""The deadline of a call, below the edge's default."""
NAMES = AliasNames(
    {
        "embed": AliasTarget(MODEL),
        "rerank": AliasTarget("org/ranker"),
        "predict": AliasTarget("org/classifier"),
    }
)
SERVICES = {f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")}


class Channel:
    """A client without stubs, so that the paths are those of TEI's clients."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def _types(self, path: str) -> tuple[Any, Any]:
        service, _, name = path.rpartition("/")
        method = descriptor_pool.Default().FindMethodByName(f"tei.v1.{service}.{name}")
        kinds = (
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
        )
        return kinds[0].SerializeToString, kinds[1].FromString

    async def one(self, path: str, request: Message, **more: Any) -> Any:
        write, read = self._types(path)
        return await self.channel.unary_unary(f"/tei.v1.{path}", write, read)(
            request, timeout=CALL_SECONDS, **more
        )

    async def many(self, path: str, requests: Sequence[Message]) -> list[Any]:
        write, read = self._types(path)
        return [
            reply
            async for reply in self.channel.stream_stream(f"/tei.v1.{path}", write, read)(
                iter(requests), timeout=CALL_SECONDS
            )
        ]

    async def all(self, path: str, requests: Sequence[Message]) -> Any:
        write, read = self._types(path)
        return await self.channel.stream_unary(f"/tei.v1.{path}", write, read)(
            iter(requests), timeout=CALL_SECONDS
        )


@asynccontextmanager
async def serving(script: Script, model: str = "", **settings: Any) -> AsyncIterator[Channel]:
    address = f"127.0.0.1:{free_port()}"
    given: dict[str, Any] = {"aliases": Watched.fixed(NAMES), "tei_grpc": ((address, model),)}
    async with edge(script, **(given | settings)), grpc.aio.insecure_channel(address) as channel:
        yield Channel(channel)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    found: grpc.StatusCode = caught.value.code()
    return found


async def test_embed() -> None:
    rows = vectors(1)
    timings = pb.Timings(
        total_seconds=0.25,
        queue_seconds=0.1,
        wait_seconds=0.05,
        prepare_seconds=0.01,
        forward_seconds=0.02,
    )
    script = Script(
        encode=lambda request: pb.EncodeResponse(
            dense=dense(rows), usage=pb.Usage(input_tokens=5), timings=timings
        )
    )
    async with serving(script) as tei_at:
        reply = await tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="Ü a"))
        assert np.array_equal(np.array(reply.embeddings, np.float32), rows[0])
        assert reply.metadata == tei.Metadata(
            compute_chars=3,
            compute_tokens=5,
            total_time_ns=250_000_000,
            tokenization_time_ns=10_000_000,
            queue_time_ns=150_000_000,
            inference_time_ns=20_000_000,
        )
        message = script.requests[0]
        assert (message.model, message.normalize, message.truncation) == (
            MODEL,
            True,
            pb.TRUNCATION_NONE,
        )
        left = tei.TRUNCATION_DIRECTION_LEFT
        options: dict[str, Any] = {
            "truncate": True,
            "normalize": False,
            "truncation_direction": left,
            "prompt_name": "query",
            "dimensions": 4,
        }
        await tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="a", **options))
        message = script.requests[1]
        assert (message.normalize, message.truncation, message.role) == (
            False,
            pb.TRUNCATION_START,
            pb.ROLE_QUERY,
        )
        assert message.dimensions == 4


async def test_texts_that_were_cut_are_counted_in_trailing_metadata() -> None:
    usage = pb.Usage(input_tokens=5)
    script = Script(
        encode=lambda request: pb.EncodeResponse(
            dense=dense(vectors(len(request.items))), usage=usage
        )
    )
    async with serving(script) as tei_at:
        write, read = tei_at._types("Embed/Embed")
        call = tei_at.channel.unary_unary("/tei.v1.Embed/Embed", write, read)
        request = tei.EmbedRequest(inputs="a", truncate=True)
        for cut in (0, 1):
            usage.truncated_items = cut
            calling = call(request, timeout=CALL_SECONDS)
            await calling
            found = dict(iter(await calling.trailing_metadata()))
            assert found.get("x-shoal-truncated-inputs") == ("1" if cut else None)
        streaming = tei_at.channel.stream_stream("/tei.v1.Embed/EmbedStream", write, read)(
            iter([request]), timeout=CALL_SECONDS
        )
        assert len([reply async for reply in streaming]) == 1
        assert dict(iter(await streaming.trailing_metadata()))["x-shoal-truncated-inputs"] == "1"


async def test_sparse_and_all() -> None:
    rows = vectors(2)

    def encode(request: pb.EncodeRequest) -> pb.EncodeResponse:
        if list(request.representations) == [pb.REPRESENTATION_SPARSE]:
            return pb.EncodeResponse(sparse=sparse({3: 0.5, 7: 1.5}))
        return pb.EncodeResponse(multi_vector=ragged(rows))

    async with serving(Script(encode=encode)) as tei_at:
        reply = await tei_at.one("Embed/EmbedSparse", tei.EmbedSparseRequest(inputs="a"))
        assert [(one.index, one.value) for one in reply.sparse_embeddings] == [(3, 0.5), (7, 1.5)]
        reply = await tei_at.one("Embed/EmbedAll", tei.EmbedAllRequest(inputs="a"))
        assert np.array_equal(
            np.array([one.embeddings for one in reply.token_embeddings], np.float32), rows
        )


async def test_stream_is_answered_in_order_and_in_batches(
    messages_read: Callable[[], int],
) -> None:
    def encode(request: pb.EncodeRequest) -> pb.EncodeResponse:
        rows = np.array([[float(item.text)] * WIDTH for item in request.items], np.float32)
        return pb.EncodeResponse(dense=dense(rows), usage=pb.Usage(input_tokens=len(request.items)))

    async def answer_later() -> None:
        """Wait until the next request can have as many messages as may share one."""
        asked = sum(len(request.items) for request in script.requests)
        await until(lambda: messages_read() >= min(1500, asked + MAX_TOGETHER + 1))

    script = Script(encode=encode, act=answer_later)
    async with serving(script) as tei_at:
        texts = [str(number) for number in range(1500)]
        replies = await tei_at.many(
            "Embed/EmbedStream", [tei.EmbedRequest(inputs=text, truncate=True) for text in texts]
        )
        assert [reply.embeddings[0] for reply in replies] == list(range(1500))
        assert len(script.requests) <= 1 + math.ceil(1499 / MAX_TOGETHER)
        script.requests.clear()
        script.act = None
        mixed = [
            tei.EmbedRequest(inputs=str(number), truncate=number % 2 == 0) for number in range(20)
        ]
        replies = await tei_at.many("Embed/EmbedStream", mixed)
        assert [reply.embeddings[0] for reply in replies] == list(range(20))
        assert {request.truncation for request in script.requests} == {
            pb.TRUNCATION_END,
            pb.TRUNCATION_NONE,
        }
        assert all(len(request.items) == 1 for request in script.requests)
        assert await tei_at.many("Embed/EmbedStream", []) == []


async def test_large_messages_of_a_stream_are_processed_in_order() -> None:
    script = Script()
    async with serving(script) as tei_at:
        texts = ["x" * (3 << 20)] * 6
        assert (
            len(
                await tei_at.many(
                    "Embed/EmbedStream", [tei.EmbedRequest(inputs=text) for text in texts]
                )
            )
            == 6
        )
        assert (
            await code_of(tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="x" * MESSAGE_BYTES)))
            == CODE.RESOURCE_EXHAUSTED
        )


async def test_predictions() -> None:
    labels = [pb.LabelScore(label="good", score=0.75), pb.LabelScore(label="bad", score=0.25)]
    script = Script(
        extract=lambda request: pb.ExtractResponse(
            results=[pb.Extraction(labels=labels)] * len(request.items)
        ),
        score=lambda request: scores(0.5),
    )
    async with serving(script) as tei_at:
        reply = await tei_at.one("Predict/Predict", tei.PredictRequest(inputs="a"))
        assert [(one.label, one.score) for one in reply.predictions] == [
            ("good", 0.75),
            ("bad", 0.25),
        ]
        assert script.requests[0].model == "org/classifier"
        assert (
            len(await tei_at.many("Predict/PredictStream", [tei.PredictRequest(inputs="a")] * 5))
            == 5
        )
        reply = await tei_at.one("Predict/PredictPair", tei.PredictPairRequest(inputs=["q", "a"]))
        assert [(one.label, one.score) for one in reply.predictions] == [("LABEL_0", 0.5)]
        pairs = [tei.PredictPairRequest(inputs=["q", "a"]), tei.PredictPairRequest(inputs=["a"])]
        assert [
            len(reply.predictions)
            for reply in await tei_at.many("Predict/PredictPairStream", pairs)
        ] == [1, 2]
        for request in (tei.PredictPairRequest(inputs=["a", "b", "c"]), tei.PredictPairRequest()):
            assert (
                await code_of(tei_at.one("Predict/PredictPair", request)) == CODE.INVALID_ARGUMENT
            )
        raw = tei.PredictRequest(inputs="a", raw_scores=True)
        assert await code_of(tei_at.one("Predict/Predict", raw)) == CODE.INVALID_ARGUMENT


async def test_ranks() -> None:
    script = Script(score=lambda request: scores(0.25, 0.5))
    async with serving(script) as tei_at:
        reply = await tei_at.one(
            "Rerank/Rerank", tei.RerankRequest(query="q", texts=["a", "b"], return_text=True)
        )
        assert [(rank.index, rank.text, rank.score) for rank in reply.ranks] == [
            (1, "b", 0.5),
            (0, "a", 0.25),
        ]
        assert reply.metadata.compute_chars == 3
        assert (script.requests[0].model, script.requests[0].scale) == (
            "org/ranker",
            pb.SCORE_SCALE_PROBABILITY,
        )
        parts = [
            tei.RerankStreamRequest(query="q", text=text, raw_scores=True) for text in ("a", "b")
        ]
        reply = await tei_at.all("Rerank/RerankStream", parts)
        assert [(rank.index, rank.HasField("text")) for rank in reply.ranks] == [
            (1, False),
            (0, False),
        ]
        assert script.requests[1].scale == pb.SCORE_SCALE_LOGIT
        assert await code_of(tei_at.all("Rerank/RerankStream", [])) == CODE.INVALID_ARGUMENT
        parts[1].query = "other"
        assert await code_of(tei_at.all("Rerank/RerankStream", parts)) == CODE.INVALID_ARGUMENT


async def test_info_describes_the_model_of_the_alias_or_of_the_address() -> None:
    script = Script(
        models=[card(), card("org/ranker", tasks=[models_pb2.TASK_SCORE], revision="r1")]
    )
    async with serving(script) as tei_at:
        reply = await tei_at.one("Info/Info", tei.InfoRequest())
        assert (reply.model_id, reply.model_type, reply.max_input_length) == (
            MODEL,
            tei.MODEL_TYPE_EMBEDDING,
            256,
        )
        assert not reply.HasField("model_sha")
    async with serving(script, "org/ranker") as tei_at:
        reply = await tei_at.one("Info/Info", tei.InfoRequest())
        assert (reply.model_id, reply.model_type, reply.model_sha) == (
            "org/ranker",
            tei.MODEL_TYPE_RERANKER,
            "r1",
        )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("items[0].text is empty", field="items[0].text"), CODE.INVALID_ARGUMENT),
        (TaskNotSupported("no vectors"), CODE.FAILED_PRECONDITION),
        (WorkerLost("lost"), CODE.FAILED_PRECONDITION),
        (QueueFull("full", retry_after=1.0), CODE.RESOURCE_EXHAUSTED),
        (NoCapacity("none", retry_after=1.0), CODE.UNAVAILABLE),
    ],
)
async def test_errors_of_the_router(error: ShoalError, code: grpc.StatusCode) -> None:
    async def act() -> None:
        raise error

    async with serving(Script(act=act)) as tei_at:
        assert await code_of(tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="a"))) == code
        assert (
            await code_of(tei_at.many("Embed/EmbedStream", [tei.EmbedRequest(inputs="a")] * 3))
            == code
        )


async def test_unsupported_request_is_refused() -> None:
    async with serving(Script(), aliases=Watched.fixed(AliasNames({}))) as tei_at:
        assert (
            await code_of(tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="a")))
            == CODE.INVALID_ARGUMENT
        )
    script = Script()
    async with serving(script) as tei_at:
        for request in (
            tei.EmbedRequest(inputs="a", truncation_direction=7),  # type: ignore[arg-type]
            tei.EmbedRequest(inputs="a", dimensions=0),
            tei.EmbedRequest(inputs="a", prompt_name="nobody"),
        ):
            assert await code_of(tei_at.one("Embed/Embed", request)) == CODE.INVALID_ARGUMENT
        prompted = tei.EncodeRequest(inputs="a", prompt_name="query")
        assert await code_of(tei_at.one("Tokenize/Tokenize", prompted)) == CODE.INVALID_ARGUMENT
        for body in (b"\xff\xff", b"\x0a\x02\xff\xff"):
            assert (
                await code_of(tei_at.channel.unary_unary("/tei.v1.Embed/Embed", bytes)(body))
                == CODE.INVALID_ARGUMENT
            )
        for metadata, code in (
            ((("x-request-id", "a b"),), CODE.INVALID_ARGUMENT),
            ((("authorization", "Basic a"),), CODE.UNAUTHENTICATED),
        ):
            assert (
                await code_of(
                    tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="a"), metadata=metadata)
                )
                == code
            )
        assert not script.requests


async def test_credential_and_id_are_passed_to_the_router() -> None:
    script = Script()
    async with serving(script) as tei_at:
        metadata = (
            ("authorization", "Bearer token"),
            ("x-request-id", "id-1"),
            ("x-shoal-tenant", "acme"),
        )
        await tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="a"), metadata=metadata)
        seen = script.metadata[0]
        assert (seen["authorization"], seen["x-request-id"], seen["x-shoal-tenant"]) == (
            "Bearer token",
            "id-1",
            "acme",
        )
        assert script.seconds[0] < CALL_SECONDS + 5  # not the default of 60


async def test_caller_is_identified_before_its_message_is_read() -> None:
    asked: list[Any] = []

    async def refuse(metadata: Any) -> str:
        asked.append(dict(metadata))
        raise Unauthenticated("the token is not known")

    intake = BodyIntake(Budget(1 << 20), Callers(refuse, lambda: 0.0))
    server = TeiServer(cast(Routers, None), lambda: NAMES, State(), intake=intake)
    await server.start("127.0.0.1:0", Security())
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            metadata = (("authorization", "Bearer token"),)
            for path in ("Embed/Embed", "Embed/EmbedStream", "Rerank/RerankStream"):
                call: Any = channel.stream_stream(f"/tei.v1.{path}")(
                    timeout=CALL_SECONDS, metadata=metadata
                )  # and sends nothing
                assert await code_of(call.read()) == CODE.UNAUTHENTICATED
    finally:
        await server.stop(0)
    assert [each["authorization"] for each in asked] == [
        "Bearer token"
    ]  # and remembered: no time passes


async def test_call_that_ends_without_a_message_is_refused() -> None:
    async with serving(Script()) as tei_at:
        call: Any = tei_at.channel.stream_unary("/tei.v1.Embed/Embed")(
            iter(()), timeout=CALL_SECONDS
        )
        assert await code_of(call) == CODE.INVALID_ARGUMENT


async def test_disconnect_cancels_the_call() -> None:
    started = asyncio.Event()

    async def act() -> None:
        started.set()
        await asyncio.sleep(60)

    script = Script(act=act)
    async with serving(script) as tei_at:
        call = asyncio.create_task(tei_at.one("Embed/Embed", tei.EmbedRequest(inputs="a")))
        await started.wait()
        call.cancel()
        await until(lambda: script.cancelled)


async def test_reflection_and_health() -> None:
    async with serving(Script()) as tei_at:
        stub = reflection_pb2_grpc.ServerReflectionStub(tei_at.channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="tei.v1.Embed"),
        ]
        listed, described = [reply async for reply in stub.ServerReflectionInfo(iter(asked))]
        assert {one.name for one in listed.list_services_response.service} >= SERVICES
        file = descriptor_pb2.FileDescriptorProto.FromString(
            described.file_descriptor_response.file_descriptor_proto[0]
        )
        assert (file.package, {service.name for service in file.service}) == (
            "tei.v1",
            {name.rpartition(".")[2] for name in SERVICES},
        )
        health = health_pb2_grpc.HealthStub(tei_at.channel)
        for name in ("", "tei.v1.Embed"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


NUMBERS = {
    "EmbedRequest": "inputs truncate normalize truncation_direction prompt_name dimensions",
    "EmbedResponse": "embeddings metadata",
    "EmbedSparseRequest": "inputs truncate truncation_direction prompt_name",
    "SparseValue": "index value",
    "EmbedSparseResponse": "sparse_embeddings metadata",
    "EmbedAllRequest": "inputs truncate truncation_direction prompt_name",
    "EmbedAllResponse": "token_embeddings metadata",
    "PredictRequest": "inputs truncate raw_scores truncation_direction",
    "PredictPairRequest": "inputs truncate raw_scores truncation_direction",
    "Prediction": "score label",
    "RerankRequest": "query texts truncate raw_scores return_text truncation_direction",
    "RerankStreamRequest": "query text truncate raw_scores return_text truncation_direction",
    "Rank": "index text score",
    "EncodeRequest": "inputs add_special_tokens prompt_name",
    "SimpleToken": "id text special start stop",
    "DecodeRequest": "ids skip_special_tokens",
    "Metadata": (
        "compute_chars compute_tokens total_time_ns tokenization_time_ns queue_time_ns "
        "inference_time_ns"
    ),
    "InfoResponse": "version sha docker_label model_id model_sha model_dtype model_type "
    "max_concurrent_requests max_input_length "
    "max_batch_tokens max_batch_requests max_client_batch_size tokenization_workers",
}
"""The fields of TEI's messages in the order of their numbers, which its clients use."""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_on_the_wire(name: str) -> None:
    found = sorted(
        tei.DESCRIPTOR.message_types_by_name[name].fields, key=lambda field: field.number
    )
    assert [field.number for field in found] == list(range(1, len(found) + 1))
    assert [field.name for field in found] == NUMBERS[name].split()


async def test_ports_with_a_fixed_model() -> None:
    ports = [free_port(), free_port()]
    doors = ((f"127.0.0.1:{ports[0]}", MODEL), (f"127.0.0.1:{ports[1]}", "rerank"))
    script = Script(models=[card()], score=lambda request: scores(0.25, 0.5))
    async with edge(script, tei_http=doors, aliases=Watched.fixed(NAMES)):
        one, other = (Http(address) for address, _ in doors)
        assert (await one.post("/embed", {"inputs": "a"})).status == 200
        assert (await one.post("/", {"inputs": "a"})).status == 200
        assert (await one.post("/v1/embeddings", {"model": "any", "input": "a"})).status == 200
        assert {getattr(request, "model", "") for request in script.requests} == {MODEL}
        assert (await one.get("/info")).json["model_id"] == MODEL
        for path in ("/", "/health", "/ping"):
            assert (await one.get(path)).status == 200
        reply = await other.post("/rerank", {"query": "q", "texts": ["a", "b"], "raw_scores": True})
        assert [rank["index"] for rank in reply.json] == [1, 0]
        assert (script.requests[-1].model, script.requests[-1].scale) == (
            "org/ranker",
            pb.SCORE_SCALE_LOGIT,
        )
        reply = await one.post("/tokenize", {"inputs": "a", "add_special_tokens": False})
        assert (reply.status, script.requests[-1].model) == (200, MODEL)
        assert reply.json == [[{"id": 97, "text": "a", "special": False, "start": 0, "stop": 1}]]


async def test_tokens_of_texts_and_texts_of_tokens() -> None:
    async with serving(Script()) as tei_at:
        reply = await tei_at.one(
            "Tokenize/Tokenize", tei.EncodeRequest(inputs="é!", add_special_tokens=True)
        )
        found = [
            (one.id, one.text, one.special, one.HasField("start"), one.start, one.stop)
            for one in reply.tokens
        ]
        assert found == [
            (1, "<s>", True, False, 0, 0),
            (0xE9, "é", False, True, 0, 2),
            (33, "!", False, True, 2, 3),
            (2, "</s>", True, False, 0, 0),
        ]
        messages = [tei.EncodeRequest(inputs=text) for text in "abc"]
        replies = await tei_at.many("Tokenize/TokenizeStream", messages)
        assert [[one.id for one in reply.tokens] for reply in replies] == [[97], [98], [99]]
        decoded = await tei_at.many(
            "Tokenize/DecodeStream", [tei.DecodeRequest(ids=[1, 97]), tei.DecodeRequest(ids=[98])]
        )
        assert [reply.text for reply in decoded] == ["a", "b"]


def test_settings() -> None:
    found = Settings.from_env(
        {
            "SHOAL_TEI_HTTP_ADDRESSES": "127.0.0.1:1=org/a, 127.0.0.1:2=b",
            "SHOAL_TEI_GRPC_ADDRESSES": "127.0.0.1:3,127.0.0.1:4=org/c",
        }
    )
    assert found.tei_http == (("127.0.0.1:1", "org/a"), ("127.0.0.1:2", "b"))
    assert found.tei_grpc == (("127.0.0.1:3", ""), ("127.0.0.1:4", "org/c"))
    assert found.describe()["tei_grpc"] == "127.0.0.1:3, 127.0.0.1:4=org/c"
    for name, value in (
        ("SHOAL_TEI_HTTP_ADDRESSES", "127.0.0.1:1"),
        ("SHOAL_TEI_HTTP_ADDRESSES", "here=org/a"),
        ("SHOAL_TEI_GRPC_ADDRESSES", "here"),
    ):
        with pytest.raises(InvalidInput) as caught:
            Settings.from_env({name: value})
        assert caught.value.field == name
    with pytest.raises(InvalidInput, match=r"0\.0\.0\.0:3"):
        Settings.from_env({"SHOAL_TEI_GRPC_ADDRESSES": "0.0.0.0:3"})


async def test_callers_certificates_name_their_tenant(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    router, gate = certificates.issue("router"), certificates.issue("client/*")
    script = Script()
    upstream = {
        "SHOAL_ROUTERS_CA": certificates.ca,
        "SHOAL_ROUTERS_CERT": gate.certificate,
        "SHOAL_ROUTERS_KEY": gate.key,
    }
    own = {
        "SHOAL_TLS_CERT": router.certificate,
        "SHOAL_TLS_KEY": router.key,
        "SHOAL_TLS_CLIENT_CA": certificates.ca,
    }
    port = free_port()
    async with routing(
        script, Security(cert=router.certificate, key=router.key, client_ca=certificates.ca)
    ) as address:
        environ = {name: str(value) for name, value in (upstream | own).items()}
        addresses = {
            "SHOAL_HTTP_ADDRESS": "127.0.0.1:0",
            "SHOAL_TEI_GRPC_ADDRESSES": f"127.0.0.1:{port}={MODEL}",
        }
        settings = Settings.from_env(
            environ | addresses | {"SHOAL_ROUTERS": f"localhost:{address.rpartition(':')[2]}"}
        )
        async with running(replace(settings, grace_seconds=0.1)):
            for name, code in (("client/search", None), ("worker", CODE.PERMISSION_DENIED)):
                credentials = certificates.channel_credentials(certificates.issue(name))
                async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                    call = Channel(channel).one("Embed/Embed", tei.EmbedRequest(inputs="a"))
                    if code is None:
                        await call
                    else:
                        assert await code_of(call) == code
            async with grpc.aio.secure_channel(
                f"localhost:{port}", certificates.channel_credentials()
            ) as channel:
                call = Channel(channel).one("Embed/Embed", tei.EmbedRequest(inputs="a"))
                assert await code_of(call) == CODE.UNAVAILABLE
    assert [call.tenant for call in script.calls] == ["search"]


async def test_beyond_this_machine_routers_must_authenticate(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    port = free_port()
    async with routing(Script()) as router:
        settings = Settings(
            edge_id="edge",
            address="127.0.0.1:0",
            tei_grpc=((f"0.0.0.0:{port}", MODEL),),
            security=certificates.security(),
            routers=(router,),
            grace_seconds=0.1,
        )
        async with (
            running(settings),
            grpc.aio.secure_channel(
                f"localhost:{port}", certificates.channel_credentials()
            ) as channel,
        ):
            assert (
                await code_of(Channel(channel).one("Embed/Embed", tei.EmbedRequest(inputs="a")))
                == CODE.UNAVAILABLE
            )

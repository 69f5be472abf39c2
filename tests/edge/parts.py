"""A fake router for tests of the edge, a real gRPC server with scripted answers, and an HTTP client
on sockets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
from shoal.v1 import caller_pb2_grpc, inference_pb2_grpc, models_pb2, models_pb2_grpc, tensor_pb2
from shoal.v1 import inference_pb2 as pb

from libs.errors import ModelNotFound
from libs.serving import Security, Service, current_call, serving
from libs.serving.calls.call import Call
from services.edge.app import running
from services.edge.routers import PROBE_ID
from services.edge.settings import Settings
from services.router.operators.callers import CallerService
from services.router.service import stream_calls

MODEL = "org/model"
WIDTH = 8
Context = grpc.aio.ServicerContext[Any, Any]


def vectors(count: int, width: int = WIDTH) -> np.ndarray:
    """Return float32 [count, width], the numbers of the answers below."""
    return np.random.default_rng(7).standard_normal((count, width)).astype(np.float32)


def dense(rows: np.ndarray) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=rows.shape, data=rows.astype("<f4").tobytes()
    )


@dataclass
class Script:
    """The answers of a router, and the requests that it received. `act` is called before each
    answer; it may wait or raise a ShoalError.
    """

    act: Callable[[], Awaitable[None]] | None = None
    encode: Callable[[pb.EncodeRequest], pb.EncodeResponse] | None = None
    score: Callable[[pb.ScoreRequest], pb.ScoreResponse] | None = None
    extract: Callable[[pb.ExtractRequest], pb.ExtractResponse] | None = None
    write: Callable[[pb.ExtractRequest], AsyncIterator[pb.ExtractStreamResponse]] | None = None
    models: list[models_pb2.Model] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    metadata: list[Mapping[str, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cancelled: int = 0

    async def note(self, request: Any, context: Context) -> None:
        call = current_call()
        if call.request_id == PROBE_ID:
            return
        self.requests.append(request)
        self.calls.append(call)
        self.metadata.append(
            {key: str(value) for key, value in context.invocation_metadata() or ()}
        )
        self.seconds.append(context.time_remaining() or 0.0)
        if self.act is not None:
            try:
                await self.act()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise


def tokenized(request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    """Return a token per character, with the character's number as id. Special tokens 1 and 2
    surround a text.
    """
    special = request.add_special_tokens or not request.HasField("add_special_tokens")
    results = []
    for text in request.texts:
        ids = [*([1] if special else []), *map(ord, text), *([2] if special else [])]
        places = [(0, 0), *((index, index + 1) for index in range(len(text))), (0, 0)]
        places = places if special else places[1:-1]
        names = [
            *(["<s>"] if special else []),
            *(f"_{letter}" for letter in text),
            *(["</s>"] if special else []),
        ]
        results.append(
            pb.Tokenization(
                count=len(ids),
                ids=ids,
                starts=[start for start, _ in places],
                ends=[end for _, end in places],
                tokens=names if request.return_tokens else [],
                special_before=int(special),
                special_after=int(special),
                kept_tokens=len(ids),
            )
        )
    return pb.TokenizeResponse(
        results=results,
        max_tokens=512,
        usage=pb.Usage(input_tokens=sum(one.count for one in results)),
    )


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        await self.script.note(request, context)
        if self.script.encode is not None:
            return self.script.encode(request)
        return pb.EncodeResponse(
            dense=dense(vectors(len(request.items))), usage=pb.Usage(input_tokens=5)
        )

    def Multiplex(self, request_iterator: Any, context: Context) -> Any:
        raise NotImplementedError("the interceptor answers the calls of the stream")

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        await self.script.note(request, context)
        if self.script.score is not None:
            return self.script.score(request)
        scores = np.linspace(0.1, 0.9, len(request.documents), dtype=np.float32)
        best = list(range(len(scores)))[::-1][: request.top_n or len(scores)]
        return pb.ScoreResponse(
            scores=tensor_pb2.Tensor(
                data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=scores.shape, data=scores.tobytes()
            ),
            ranking=best,
            usage=pb.Usage(input_tokens=9),
            model_revision="r1",
        )

    async def Extract(self, request: pb.ExtractRequest, context: Context) -> pb.ExtractResponse:
        await self.script.note(request, context)
        assert self.script.extract is not None
        return self.script.extract(request)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self.script.note(request, context)
        return tokenized(request)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        await self.script.note(request, context)
        texts = ["".join(chr(token) for token in one.ids if token > 2) for one in request.sequences]
        return pb.DetokenizeResponse(texts=texts, usage=pb.Usage(input_tokens=7))

    async def EncodeStream(
        self, request: pb.EncodeRequest, context: Context
    ) -> AsyncIterator[pb.EncodeResponse]:
        yield pb.EncodeResponse()
        raise NotImplementedError

    async def ExtractStream(
        self, request: pb.ExtractRequest, context: Context
    ) -> AsyncIterator[pb.ExtractStreamResponse]:
        await self.script.note(request, context)
        assert self.script.write is not None
        try:
            async for reply in self.script.write(request):
                yield reply
        except asyncio.CancelledError:
            self.script.cancelled += 1
            raise


class Models(models_pb2_grpc.ModelServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def ListModels(
        self, request: models_pb2.ListModelsRequest, context: Context
    ) -> models_pb2.ListModelsResponse:
        await self.script.note(request, context)
        return models_pb2.ListModelsResponse(models=self.script.models)

    async def GetModel(
        self, request: models_pb2.GetModelRequest, context: Context
    ) -> models_pb2.GetModelResponse:
        await self.script.note(request, context)
        for model in self.script.models:
            if model.model == request.model:
                return models_pb2.GetModelResponse(model=model)
        raise ModelNotFound(f"no worker knows {request.model}", field="model")

    async def LoadModel(
        self, request: models_pb2.LoadModelRequest, context: Context
    ) -> models_pb2.LoadModelResponse:
        raise NotImplementedError

    async def EvictModel(
        self, request: models_pb2.EvictModelRequest, context: Context
    ) -> models_pb2.EvictModelResponse:
        raise NotImplementedError

    async def PinModel(
        self, request: models_pb2.PinModelRequest, context: Context
    ) -> models_pb2.PinModelResponse:
        raise NotImplementedError


def card(model: str = MODEL, **more: Any) -> models_pb2.Model:
    """Return a resident model with the task encode."""
    values: dict[str, Any] = {
        "tasks": [models_pb2.TASK_ENCODE],
        "representations": [pb.REPRESENTATION_DENSE],
        "dimensions": WIDTH,
        "max_tokens": 256,
    }
    kind = models_pb2.ModelCard(model=model, **(values | more))
    return models_pb2.Model(model=model, state=models_pb2.MODEL_STATE_RESIDENT, card=kind)


@asynccontextmanager
async def routing(script: Script, security: Security | None = None) -> AsyncIterator[str]:
    """Serve a router's services at the yielded address."""
    inference = Inference(script)
    services = [
        Service(
            "shoal.v1.InferenceService",
            partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference),
            stream_calls=stream_calls(inference),
        ),
        Service(
            "shoal.v1.CallerService",
            partial(caller_pb2_grpc.add_CallerServiceServicer_to_server, CallerService()),
        ),
        Service(
            "shoal.v1.ModelService",
            partial(models_pb2_grpc.add_ModelServiceServicer_to_server, Models(script)),
        ),
    ]
    async with serving("127.0.0.1:0", services, security=security, grace_seconds=0.1) as server:
        await server.set_health(True)
        yield server.address


@asynccontextmanager
async def edge(
    script: Script, security: Security | None = None, **settings: Any
) -> AsyncIterator[Http]:
    """Run an edge in front of such a router; yield its HTTP client."""
    async with routing(script, security) as router:
        given = Settings(
            edge_id="edge", address="127.0.0.1:0", routers=(router,), grace_seconds=5.0
        )
        async with running(replace(given, **settings)) as address:
            yield Http(address)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Http:
    """An HTTP/1.1 client that uses one connection per request and no library."""

    address: str

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send("GET", path, b"", headers)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(
            "POST", path, content, {"content_type": "application/json", **headers}
        )

    async def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        reader, writer = await self.open()
        try:
            writer.write(head(method, path, {"content-length": str(len(body)), **headers}) + body)
            return await read_reply(reader, method)
        finally:
            writer.close()


def head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        *(f"{name}: {value}" for name, value in named.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_reply(reader: asyncio.StreamReader, method: str = "GET") -> Reply:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = text.strip().split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if method == "HEAD":
        return Reply(int(status.split()[1]), headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return Reply(int(status.split()[1]), headers, b"".join(parts))
    return Reply(
        int(status.split()[1]),
        headers,
        await reader.readexactly(int(headers.get("content-length", "0"))),
    )


def scores(*values: float) -> pb.ScoreResponse:
    """Return an answer with these scores and all documents ranked."""
    array = np.array(values, np.float32)
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes()
    )
    return pb.ScoreResponse(
        scores=tensor,
        ranking=np.argsort(-array, kind="stable").tolist(),
        usage=pb.Usage(input_tokens=9),
    )


def sparse(*rows: Mapping[int, float], columns: int = 100) -> tensor_pb2.SparseMatrix:
    indices = np.array([column for row in rows for column in row], "<u4")
    values = np.array([value for row in rows for value in row.values()], "<f4")
    offsets = np.cumsum([0, *map(len, rows)]).tolist()
    tensor = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=values.shape, data=values.tobytes()
    )
    return tensor_pb2.SparseMatrix(
        columns=columns, offsets=offsets, indices=indices.tobytes(), values=tensor
    )


def ragged(*rows: np.ndarray) -> tensor_pb2.Ragged:
    return tensor_pb2.Ragged(
        values=dense(np.concatenate(rows)), offsets=np.cumsum([0, *map(len, rows)]).tolist()
    )

"""Bodies of HTTP requests through every dialect of the edge, and conversion of router replies to
answers.

Bodies are generated from the types in the table of routes, so a new dialect in the table is tried
automatically. Dialects are pure, so neither routers nor sockets are needed.
"""

from __future__ import annotations

import json
import random as chance
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import orjson
from google.protobuf.message import Message
from msgspec import inspect
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2, tensor_pb2

from services.edge.messages.base import Answer, HttpError, MeshCall, Received, Route, StreamedCall
from services.edge.messages.names import AliasNames
from services.edge.messages.names import AliasTarget as Alias
from services.edge.routes import RouteTable
from tests.edge.parts import tokenized
from tests.fuzz import messages, mutate
from tests.fuzz.target import Broken, Random, Target, plain

MODEL: Final = "org/model"
ROUTES: Final = RouteTable().routes
NAMES: Final = AliasNames({"embed": Alias(MODEL), "rerank": Alias(MODEL), "predict": Alias(MODEL)})
WORDS: Final[Sequence[object]] = (
    MODEL, "org/model:query", "query", "document", "base64", "float", "int8", "ubinary", "binary",
    "uint8", "END", "NONE", "start",
    "dense", "sparse", "multivector", "float16", "search_query", "\ud800", ["a", "b"], [["a", "b"]],
    {"text": "a"},
    {"image": "data:image/png;base64,AAAA"}, "https://a/b.png", [1, 2], [[1, 2]], 10**400, -1, 0,
)  # fmt: skip
_TASKS: Final = [
    models_pb2.TASK_ENCODE,
    models_pb2.TASK_SCORE,
    models_pb2.TASK_ENTITIES,
    models_pb2.TASK_CLASSIFY,
]
MAX_STEPS: Final = 5
_PIECES: Final = {
    "model": MODEL,
    "encoding_format": "base64",
    "truncate": True,
    "source_sentence": "a",
    "role": "query",
}
"""Field values that pass more checks than random ones."""


def _example(random: Random, kind: Any, name: str = "", depth: int = 4) -> object:
    """Return a value of a type that msgspec describes."""
    match kind:
        case inspect.StructType():
            return {
                field.encode_name: _example(random, field.type, field.encode_name, depth - 1)
                for field in kind.fields
                if field.required or (depth > 0 and random.random() < 0.15)
            }
        case inspect.UnionType():
            types = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            return _example(random, random.choice(types or list(kind.types)), name, depth)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            return [
                _example(random, kind.item_type, name, depth - 1)
                for _ in range(random.choice((1, 1, 2, 3)))
            ]
        case inspect.DictType():
            return {
                mutate.text(random): _example(random, kind.value_type, name, depth - 1)
                for _ in range(random.randrange(3))
            }
        case inspect.LiteralType():
            return random.choice(list(kind.values))
        case inspect.StrType():
            return _PIECES.get(name, random.choice(("a", "a shoal of fish", "", "é")))
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.IntType():
            return random.choice((1, 2, 8, mutate.edge(random)))
        case inspect.FloatType():
            return random.choice((0.5, 1.0))
        case inspect.NoneType():
            return None
        case _:
            return mutate.value(random, 2)


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    """Return a byte for the route, one for flags (1: msgpack), and the body."""
    if known and random.random() < 0.1:
        return mutate.mutated(random, random.choice(known), others=known)
    number = random.randrange(len(ROUTES))
    route = ROUTES[number]
    is_msgpack = random.random() < 0.2
    if route.body is None:
        body = b"" if random.random() < 0.7 else random.randbytes(random.randrange(20))
    else:
        kinds = route.body if isinstance(route.body, tuple) else (route.body,)
        made = _example(random, inspect.type_info(random.choice(kinds)))
        for _ in range(random.choice((0, 0, 1, 1, 2))):
            made = mutate.changed(random, made, WORDS)
        body = _packed(made) if is_msgpack else json.dumps(made).encode()
        if random.random() < 0.15:
            body = mutate.mutated(random, body)
    return bytes([number % 256, int(is_msgpack) | random.randrange(128) << 1]) + body


def _packed(made: object) -> bytes:
    try:
        return msgspec.msgpack.encode(made)
    except (OverflowError, UnicodeEncodeError):
        return b"\x81\xa5items\x90"


def _try(data: bytes) -> None:
    if len(data) < 2:
        return
    route, flags = ROUTES[data[0] % len(ROUTES)], data[1]
    kind = "application/msgpack" if flags & 1 else "application/json"
    received = Received(data[2:], NAMES, MODEL, kind, kind, "id")
    random = chance.Random(data)
    dialect = route.dialect
    try:
        step: MeshCall | StreamedCall | Answer = route.ask(received)
        for _ in range(MAX_STEPS):
            if isinstance(step, StreamedCall):
                _try_stream(step, random)
                return
            if isinstance(step, Answer):
                _check_answer(step)
                return
            if step.dialect is not None:
                dialect = step.dialect
            step.message.SerializeToString()
            if random.random() < 0.1:
                problem = HttpError(
                    "MODEL_NOT_FOUND",
                    step.renamed("items[0].text is wrong"),
                    field=step.renamed("items[0].text"),
                )
                fallback = step.fallback(problem)
                if fallback is None:
                    raise problem
                step = fallback
                continue
            is_right = random.random() < 0.85
            try:
                step = step.convert(_reply(random, step, is_right=is_right))
            except (LookupError, ValueError):
                if is_right:
                    raise
                return  # a router's fault, which the edge reports as INTERNAL
        raise Broken(f"{route.path}: more than {MAX_STEPS} questions")
    except HttpError as problem:
        _check_problem(route, (problem.dialect or dialect).error(problem), problem)


def _try_stream(stream: StreamedCall, random: Random) -> None:
    """Try streamed text, including restarts, a different final text, or a missing result."""
    stream.message.SerializeToString()
    texts = ["", "a", " shoal", " of fish", "\n\n", "data: é"]
    reported = b""
    try:
        for _ in range(random.randrange(4)):
            one = pb.ExtractDelta(text=random.choice(texts), restarted=random.random() < 0.2)
            reported += stream.render(pb.ExtractStreamResponse(deltas=[one]))
        results = [_extraction(random) for _ in range(random.random() < 0.9)]
        reported += stream.render(
            pb.ExtractStreamResponse(response=pb.ExtractResponse(results=results))
        )
    except HttpError as problem:
        reported += stream.fail(problem)
    except IndexError:
        reported += stream.fail(HttpError("INTERNAL", "a router's fault"))
    pieces = (
        reported.decode().split("\n\n")
        if stream.media_type.startswith(b"text/event-stream")
        else reported.decode().splitlines()
    )
    for piece in filter(None, pieces):
        if piece != "data: [DONE]":
            json.loads(piece.removeprefix("data: "))


def _reply(random: Random, question: MeshCall, *, is_right: bool) -> Message:
    """Return a router's reply; `is_right` gives it the requested shape."""
    kind = question.method.parse(b"")
    message: Any = question.message
    if isinstance(kind, pb.EncodeResponse):
        count = len(message.items) if is_right else random.randrange(4)
        return _encoded(random, count, message if is_right else pb.EncodeRequest())
    if isinstance(kind, pb.ScoreResponse):
        count = len(message.documents) if is_right else random.randrange(4)
        scores = np.linspace(-1, 1, count, dtype="<f4")
        ranking = (
            list(range(count))[: message.top_n or count]
            if is_right
            else [random.randrange(5) for _ in range(3)]
        )
        return pb.ScoreResponse(
            scores=_tensor(scores), ranking=ranking, usage=pb.Usage(input_tokens=3)
        )
    if isinstance(kind, pb.ExtractResponse):
        return pb.ExtractResponse(
            results=[
                _extraction(random)
                for _ in (message.items if is_right else range(random.randrange(3)))
            ]
        )
    if isinstance(kind, pb.TokenizeResponse):
        return tokenized(
            message if is_right else pb.TokenizeRequest(texts=["text"] * random.randrange(3))
        )
    if isinstance(kind, pb.DetokenizeResponse):
        return pb.DetokenizeResponse(
            texts=["text"] * (len(message.sequences) if is_right else random.randrange(3))
        )
    if isinstance(kind, models_pb2.ListModelsResponse):
        return models_pb2.ListModelsResponse(
            models=[_model(random) for _ in range(random.randrange(3))]
        )
    if isinstance(kind, models_pb2.GetModelResponse):
        return models_pb2.GetModelResponse(model=_model(random))
    return type(kind)()


def _tensor(
    rows: Any, kind: tensor_pb2.DataType = tensor_pb2.DATA_TYPE_FLOAT32
) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(data_type=kind, shape=rows.shape, data=rows.tobytes())


def _encoded(random: Random, count: int, message: pb.EncodeRequest) -> pb.EncodeResponse:
    made = pb.EncodeResponse(usage=pb.Usage(input_tokens=3), model_revision="r")
    wanted = set(message.representations) or {pb.REPRESENTATION_DENSE}
    numbers = np.random.default_rng(random.randrange(9))
    if pb.REPRESENTATION_DENSE in wanted or random.random() < 0.1:
        if message.data_type == tensor_pb2.DATA_TYPE_INT8:
            made.dense.CopyFrom(
                _tensor(numbers.integers(-9, 9, (count, 8)).astype("i1"), message.data_type)
            )
            made.dense.scale = np.ones(count, "<f4").tobytes()
        elif message.data_type == tensor_pb2.DATA_TYPE_BINARY:
            packed = numbers.integers(0, 256, (count, 1)).astype("u1")
            made.dense.CopyFrom(
                tensor_pb2.Tensor(
                    data_type=message.data_type, shape=[count, 8], data=packed.tobytes()
                )
            )
        elif message.data_type == tensor_pb2.DATA_TYPE_FLOAT16:
            made.dense.CopyFrom(
                _tensor(numbers.standard_normal((count, 8)).astype("<f2"), message.data_type)
            )
        else:
            made.dense.CopyFrom(_tensor(numbers.standard_normal((count, 8)).astype("<f4")))
    if pb.REPRESENTATION_MULTI_VECTOR in wanted:
        values = _tensor(numbers.standard_normal((2 * count, 4)).astype("<f4"))
        made.multi_vector.CopyFrom(
            tensor_pb2.Ragged(values=values, offsets=list(range(0, 2 * count + 1, 2)))
        )
    if pb.REPRESENTATION_SPARSE in wanted:
        indices = np.tile(np.array([1, 5], "<u4"), count)
        values = _tensor(np.ones(2 * count, "<f4"))
        offsets = list(range(0, 2 * count + 1, 2))
        made.sparse.CopyFrom(
            tensor_pb2.SparseMatrix(
                columns=9, offsets=offsets, indices=indices.tobytes(), values=values
            )
        )
    return made


def _extraction(random: Random) -> pb.Extraction:
    made = messages.message(random, pb.Extraction, {})
    assert isinstance(made, pb.Extraction)
    return made


def _model(random: Random) -> models_pb2.Model:
    tasks = random.sample(_TASKS, random.randrange(4))
    card = models_pb2.ModelCard(
        model=MODEL, tasks=tasks, dimensions=8, max_tokens=random.choice((0, 256)), revision="r"
    )
    return models_pb2.Model(
        model=MODEL,
        state=models_pb2.MODEL_STATE_RESIDENT,
        card=card if random.random() < 0.9 else None,
    )


def _check_answer(answer: Answer) -> None:
    if not 200 <= answer.status < 300:
        raise Broken(f"an answer with the status {answer.status}")
    _check_body(answer)


def _check_problem(route: Route, answer: Answer, problem: HttpError) -> None:
    if (
        not 400 <= answer.status < 500 and problem.reason != "INTERNAL"
    ):  # reported for replies that cannot be read
        raise Broken(f"{route.path}: {problem.reason} became {answer.status}: {problem.message}")
    _check_body(answer)


def _check_body(answer: Answer) -> None:
    body = answer.body if isinstance(answer.body, bytes) else b"".join(answer.body)
    for name, value in answer.headers:
        if b"\n" in name + value or b"\r" in name + value:
            raise Broken(f"a header with a line break: {name!r}")
    try:
        if b"msgpack" in answer.media_type:
            msgspec.msgpack.decode(body)
        elif b"json" in answer.media_type and body:
            orjson.loads(body)
    except (ValueError, msgspec.DecodeError) as error:
        raise Broken(f"an answer that cannot be read: {error}: {body[:200]!r}") from None


TARGETS: Final = (Target("dialects", _make, plain(_try), guided=True, share=3.0),)

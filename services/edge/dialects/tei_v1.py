"""TEI's gRPC API, `tei.v1`: convert its messages to mesh calls and the replies to its messages.
Pure.

The format is that of https://github.com/huggingface/text-embeddings-inference (package tei.v1).
Messages do not name a model: the address or the aliases `embed`, `rerank` and `predict` determine
it. `truncate` defaults to false. Texts of a stream with equal other fields share one call of the
mesh (`BatchedMethod.key`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message
from shoal.requests import codec
from shoal.transport.methods import DETOKENIZE, ENCODE, EXTRACT, GET_MODEL, SCORE, TOKENIZE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects.tei import VERSION
from services.edge.dialects.tokens import check_results, tei_tokens
from services.edge.messages.base import (
    Answer,
    MeshCall,
    Received,
    invalid,
    item_fields,
    single_field,
)
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import decoded, dense_rows
from services.edge.messages.reading import named_or_default, read_role, text_item
from services.edge.teiv1 import tei_pb2

GRPC: Final = b"application/grpc"
CODES: Final = {
    "INVALID_INPUT": "INVALID_ARGUMENT",
    "INPUT_TOO_LONG": "INVALID_ARGUMENT",
    "TASK_NOT_SUPPORTED": "FAILED_PRECONDITION",
    "MODEL_LOAD_FAILED": "FAILED_PRECONDITION",
    "MODEL_UNREACHABLE": "FAILED_PRECONDITION",
    "EMBEDDING_ID_MISMATCH": "FAILED_PRECONDITION",
    "WORKER_LOST": "FAILED_PRECONDITION",
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "PERMISSION_DENIED": "PERMISSION_DENIED",
    "MODEL_NOT_FOUND": "NOT_FOUND",
    "TOO_LARGE": "RESOURCE_EXHAUSTED",
    "OUT_OF_MEMORY": "RESOURCE_EXHAUSTED",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "RATE_LIMITED": "RESOURCE_EXHAUSTED",
    "NO_CAPACITY": "UNAVAILABLE",
    "DRAINING": "UNAVAILABLE",
    "NOT_READY": "UNAVAILABLE",
    "CANNOT_CONNECT": "UNAVAILABLE",
    "TLS_FAILED": "UNAVAILABLE",
    "DEADLINE_PASSED": "DEADLINE_EXCEEDED",
    "NO_SUCH_ROUTE": "UNIMPLEMENTED",
}
"""The gRPC status of each error reason; INTERNAL for all others."""
TOKENIZED_BYTES: Final = 256 << 10
"""Maximum size of texts that are tokenised together: a token of one byte takes 20 bytes of a
router's answer, which has at most 16 MiB.
"""
Ask = Callable[[Sequence[Any], Received], MeshCall]
"""Returns the mesh call for messages with equal keys. The pieces of its Answer's body are the
serialised replies to the messages, in order.
"""
_TEXT: Final = single_field("items", "inputs")


@dataclass(frozen=True, slots=True)
class BatchedMethod:
    """A gRPC method of TEI, of which several messages can be sent to the mesh together.

    Attributes:
        request: The type of its messages.
        ask: Converts several messages to one request to the mesh.
        agree: The fields that must be equal in messages that are sent together; empty: each message
            is sent alone.
        together_bytes: Maximum bytes of messages that are sent together; a larger message is sent
            alone.
    """

    request: type[Message]
    ask: Ask
    agree: tuple[str, ...] = ()
    together_bytes: int = sys.maxsize

    def key(self, message: Any) -> tuple[object, ...]:
        """Return a key that is equal for messages that can share a call."""
        return tuple(
            (
                message.HasField(name) if _has_presence(message, name) else True,
                getattr(message, name),
            )
            for name in self.agree
        )


def _has_presence(message: Message, name: str) -> bool:
    return bool(message.DESCRIPTOR.fields_by_name[name].has_presence)


def _replies(messages: Sequence[Message]) -> Answer:
    return Answer(iter([message.SerializeToString() for message in messages]), media_type=GRPC)


def embed(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert Embed: a dense float32 vector for each message. Raises HttpError."""
    first = requests[0]
    message = _encode(requests, received, pb.REPRESENTATION_DENSE)
    message.normalize = first.normalize if first.HasField("normalize") else True
    if first.HasField("dimensions"):
        if not 1 <= first.dimensions < 1 << 31:
            raise invalid(f"dimensions is {first.dimensions}; it must be at least 1", "dimensions")
        message.dimensions = first.dimensions

    def convert(reply: pb.EncodeResponse) -> Answer:
        rows = np.ascontiguousarray(dense_rows(reply.dense), np.float32)
        encoded = zip(rows, _shares(requests, reply), strict=True)
        return _replies(
            [
                tei_pb2.EmbedResponse(embeddings=row.tolist(), metadata=share)
                for row, share in encoded
            ]
        )

    return MeshCall(ENCODE, message, convert, fields=_TEXT)


def embed_sparse(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert EmbedSparse: a sparse vector for each message. Raises HttpError."""

    def convert(reply: pb.EncodeResponse) -> Answer:
        matrix = decoded(codec.sparse, reply.sparse)
        answers = []
        for (columns, weights), share in zip(matrix, _shares(requests, reply), strict=True):
            pairs = zip(columns.tolist(), np.asarray(weights, np.float32).tolist(), strict=True)
            values = [tei_pb2.SparseValue(index=column, value=weight) for column, weight in pairs]
            answers.append(tei_pb2.EmbedSparseResponse(sparse_embeddings=values, metadata=share))
        return _replies(answers)

    return MeshCall(
        ENCODE, _encode(requests, received, pb.REPRESENTATION_SPARSE), convert, fields=_TEXT
    )


def embed_all(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert EmbedAll: a vector for each token, by models that have them. Raises HttpError."""

    def convert(reply: pb.EncodeResponse) -> Answer:
        ragged = decoded(codec.ragged, reply.multi_vector)
        answers = []
        for index, share in enumerate(_shares(requests, reply)):
            rows = np.asarray(ragged[index], np.float32)
            tokens = [tei_pb2.TokenEmbedding(embeddings=row.tolist()) for row in rows]
            answers.append(tei_pb2.EmbedAllResponse(token_embeddings=tokens, metadata=share))
        return _replies(answers)

    return MeshCall(
        ENCODE, _encode(requests, received, pb.REPRESENTATION_MULTI_VECTOR), convert, fields=_TEXT
    )


def predict(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert Predict: the scores of the model's labels for each text. Raises HttpError."""
    return _labels([request.inputs for request in requests], requests, received)


def predict_pair(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert PredictPair, one message: the scores of the labels for a pair of texts. Raises
    HttpError.
    """
    (request,) = requests
    if len(request.inputs) == 1:
        return _labels([request.inputs[0]], requests, received)
    if len(request.inputs) != 2:
        raise invalid(f"inputs has {len(request.inputs)} texts; it must have one or two", "inputs")
    _refuse_raw(request)
    named = _named(received, "predict")
    message = pb.ScoreRequest(
        model=named.model,
        query=text_item(request.inputs[0], "inputs"),
        documents=[text_item(request.inputs[1], "inputs")],
        scale=pb.SCORE_SCALE_PROBABILITY,
        truncation=_truncation(request),
        adapter=named.adapter,
    )

    def convert(reply: pb.ScoreResponse) -> Answer:
        score = float(decoded(codec.score_result, reply).scores[0])
        prediction = tei_pb2.Prediction(score=score, label="LABEL_0")
        metadata = _metadata(reply, sum(map(len, request.inputs)), reply.usage.input_tokens)
        return _replies([tei_pb2.PredictResponse(predictions=[prediction], metadata=metadata)])

    fields = {**single_field("documents", "inputs"), "query.text": "inputs", "query": "inputs"}
    return MeshCall(SCORE, message, convert, fields=fields)


def rerank(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert Rerank, one message: the texts ranked by their scores for a query. Raises
    HttpError.
    """
    (request,) = requests
    named = _named(received, "rerank")
    message = pb.ScoreRequest(
        model=named.model,
        query=text_item(request.query, "query"),
        documents=[text_item(text, f"texts[{index}]") for index, text in enumerate(request.texts)],
        scale=pb.SCORE_SCALE_LOGIT if request.raw_scores else pb.SCORE_SCALE_PROBABILITY,
        truncation=_truncation(request),
        adapter=named.adapter,
    )

    def convert(reply: pb.ScoreResponse) -> Answer:
        found = decoded(codec.score_result, reply)
        ranks = []
        for index in found.ranking:
            rank = tei_pb2.Rank(index=int(index), score=float(found.scores[index]))
            if request.return_text:
                rank.text = request.texts[int(index)]
            ranks.append(rank)
        characters = len(request.query) + sum(map(len, request.texts))
        metadata = _metadata(reply, characters, reply.usage.input_tokens)
        return _replies([tei_pb2.RerankResponse(ranks=ranks, metadata=metadata)])

    fields = item_fields("documents", "texts")
    return MeshCall(SCORE, message, convert, fields=fields)


def rerank_stream(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert RerankStream with all of its messages. Raises HttpError."""
    if not requests:
        raise invalid("the stream is empty: send a message for each text", "text")
    first = requests[0]
    names = ("query", "truncate", "raw_scores", "return_text", "truncation_direction")
    for name in names:
        if any(getattr(request, name) != getattr(first, name) for request in requests):
            raise invalid(f"{name} must be the same in all messages of the stream", name)
    whole = tei_pb2.RerankRequest(
        texts=[request.text for request in requests],
        **{name: getattr(first, name) for name in names},
    )
    return rerank([whole], received)


def info(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert Info: the model and its limits. Raises HttpError."""
    named = _named(received, "embed")

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        card = reply.model.card
        kind = tei_pb2.MODEL_TYPE_EMBEDDING
        if models_pb2.TASK_ENCODE not in card.tasks:
            is_classifier = models_pb2.TASK_CLASSIFY in card.tasks
            kind = tei_pb2.MODEL_TYPE_CLASSIFIER if is_classifier else tei_pb2.MODEL_TYPE_RERANKER
        found = tei_pb2.InfoResponse(
            version=VERSION,
            model_id=named.model,
            model_dtype=card.data_type or "float32",
            model_type=kind,
            max_concurrent_requests=10_000,
            max_input_length=card.max_tokens,
            max_batch_tokens=max(16_384, card.max_tokens),
            max_client_batch_size=10_000,
            tokenization_workers=1,
        )
        if card.revision:
            found.model_sha = card.revision
        return _replies([found])

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert)


def tokenize(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert Tokenize: the tokens of each text with their offsets. Raises HttpError."""
    first = requests[0]
    if first.HasField("prompt_name"):
        raise invalid("prompt_name is not supported: put the prompt before the text", "prompt_name")
    message = pb.TokenizeRequest(
        model=_named(received, "embed").model,
        texts=[request.inputs for request in requests],
        add_special_tokens=first.add_special_tokens,
        return_tokens=first.add_special_tokens,  # names of special tokens
    )

    def convert(reply: pb.TokenizeResponse) -> Answer:
        check_results(message.texts, reply)
        answers = []
        for text, found in zip(message.texts, reply.results, strict=True):
            encoded = tei_pb2.EncodeResponse()
            for token in tei_tokens(text, found):
                encoded.tokens.add(**token)
            answers.append(encoded.SerializeToString())
        return Answer(iter(answers), media_type=GRPC)

    return MeshCall(TOKENIZE, message, convert, fields={"texts[]": "inputs", "texts": "inputs"})


def decode(requests: Sequence[Any], received: Received) -> MeshCall:
    """Convert Decode: the text of each message's token ids. Raises HttpError."""
    message = pb.DetokenizeRequest(
        model=_named(received, "embed").model,
        sequences=[pb.TokenIds(ids=request.ids) for request in requests],
        skip_special_tokens=requests[0].skip_special_tokens,
    )

    def convert(reply: pb.DetokenizeResponse) -> Answer:
        return _replies([tei_pb2.DecodeResponse(text=text) for text in reply.texts])

    return MeshCall(
        DETOKENIZE,
        message,
        convert,
        fields={
            "sequences[].ids[]": lambda index: f"ids[{index}]",
            "sequences[]": "ids",
            "sequences": "ids",
        },
    )


def _encode(
    requests: Sequence[Any], received: Received, form: pb.Representation
) -> pb.EncodeRequest:
    first = requests[0]
    named = _named(received, "embed")
    return pb.EncodeRequest(
        model=named.model,
        items=[text_item(request.inputs, "inputs") for request in requests],
        representations=[form],
        role=read_role(
            named, prompt_name=first.prompt_name if first.HasField("prompt_name") else None
        ),
        dimensions=named.dimensions,
        truncation=_truncation(first),
        adapter=named.adapter,
    )


def _labels(texts: Sequence[str], requests: Sequence[Any], received: Received) -> MeshCall:
    _refuse_raw(requests[0])
    named = _named(received, "predict")
    message = pb.ExtractRequest(
        model=named.model,
        items=[text_item(text, "inputs") for text in texts],
        classify=pb.ClassifyTask(),
        truncation=_truncation(requests[0]),
        adapter=named.adapter,
    )

    def convert(reply: pb.ExtractResponse) -> Answer:
        answers = []
        for result, share in zip(reply.results, _shares(requests, reply), strict=True):
            found = [tei_pb2.Prediction(score=one.score, label=one.label) for one in result.labels]
            answers.append(tei_pb2.PredictResponse(predictions=found, metadata=share))
        return _replies(answers)

    return MeshCall(EXTRACT, message, convert, fields=_TEXT)


def _refuse_raw(request: Any) -> None:
    if request.raw_scores:
        raise invalid("raw_scores is not supported: labels have probabilities", "raw_scores")


def _named(received: Received, default: str) -> AliasTarget:
    return named_or_default(received, received.model, default)


def _truncation(request: Any) -> pb.Truncation:
    sides = {
        tei_pb2.TRUNCATION_DIRECTION_RIGHT: pb.TRUNCATION_END,
        tei_pb2.TRUNCATION_DIRECTION_LEFT: pb.TRUNCATION_START,
    }
    side = sides.get(request.truncation_direction)
    if side is None:
        raise invalid(
            f"truncation_direction is {request.truncation_direction}; it must be 0 or 1",
            "truncation_direction",
        )
    return side if request.truncate else pb.TRUNCATION_NONE


def _shares(requests: Sequence[Any], reply: Any) -> list[tei_pb2.Metadata]:
    """Return the metadata of each message. The mesh reports the tokens of the whole batch, which
    are divided in proportion to characters.
    """
    lengths = [
        len(one.inputs) if isinstance(one.inputs, str) else sum(map(len, one.inputs))
        for one in requests
    ]
    every = max(1, sum(lengths))
    return [
        _metadata(reply, length, round(reply.usage.input_tokens * length / every))
        for length in lengths
    ]


def _metadata(reply: Any, characters: int, used: int) -> tei_pb2.Metadata:
    timings: pb.Timings = reply.timings

    def nanoseconds(seconds: float) -> int:
        return max(0, round(seconds * 1e9))

    return tei_pb2.Metadata(
        compute_chars=characters,
        compute_tokens=used,
        total_time_ns=nanoseconds(timings.total_seconds),
        tokenization_time_ns=nanoseconds(timings.prepare_seconds),
        queue_time_ns=nanoseconds(timings.queue_seconds + timings.wait_seconds),
        inference_time_ns=nanoseconds(timings.forward_seconds),
    )


_OPTIONS: Final = ("truncate", "truncation_direction", "prompt_name")
_EMBED: Final = BatchedMethod(tei_pb2.EmbedRequest, embed, (*_OPTIONS, "normalize", "dimensions"))
_SPARSE: Final = BatchedMethod(tei_pb2.EmbedSparseRequest, embed_sparse, _OPTIONS)
_ALL: Final = BatchedMethod(tei_pb2.EmbedAllRequest, embed_all, _OPTIONS)
_PREDICT: Final = BatchedMethod(
    tei_pb2.PredictRequest, predict, ("truncate", "truncation_direction", "raw_scores")
)
_PAIR: Final = BatchedMethod(tei_pb2.PredictPairRequest, predict_pair)
_TOKENS: Final = BatchedMethod(
    tei_pb2.EncodeRequest, tokenize, ("add_special_tokens", "prompt_name"), TOKENIZED_BYTES
)
_IDS: Final = BatchedMethod(tei_pb2.DecodeRequest, decode, ("skip_special_tokens",))
SERVICES: Final[dict[str, dict[str, BatchedMethod]]] = {
    "tei.v1.Info": {"Info": BatchedMethod(tei_pb2.InfoRequest, info)},
    "tei.v1.Embed": {
        "Embed": _EMBED,
        "EmbedStream": _EMBED,
        "EmbedSparse": _SPARSE,
        "EmbedSparseStream": _SPARSE,
        "EmbedAll": _ALL,
        "EmbedAllStream": _ALL,
    },
    "tei.v1.Predict": {
        "Predict": _PREDICT,
        "PredictStream": _PREDICT,
        "PredictPair": _PAIR,
        "PredictPairStream": _PAIR,
    },
    "tei.v1.Rerank": {
        "Rerank": BatchedMethod(tei_pb2.RerankRequest, rerank),
        "RerankStream": BatchedMethod(tei_pb2.RerankStreamRequest, rerank_stream),
    },
    "tei.v1.Tokenize": {
        "Tokenize": _TOKENS,
        "TokenizeStream": _TOKENS,
        "Decode": _IDS,
        "DecodeStream": _IDS,
    },
}
"""All methods by service and name. RerankStream is called with all of its messages."""

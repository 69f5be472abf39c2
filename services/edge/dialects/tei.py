"""TEI's HTTP API (text-embeddings-inference 1.9). Pure. Hugging Face's pipelines, on the same base
URL, are in huggingface.py.

TEI's requests do not name a model. So it is in the path, `/tei/{model}/embed` (base URL
`…/tei/org/name`), or the bare paths use the aliases `embed`, `rerank` and `predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from shoal.requests import codec
from shoal.transport.methods import ENCODE, EXTRACT, GET_MODEL, SCORE
from shoal.v1 import inference_pb2 as pb
from shoal.v1 import models_pb2

from services.edge.dialects import openai
from services.edge.messages.base import (
    Answer,
    Dialect,
    Fields,
    Headers,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
    retry_headers,
    single_field,
)
from services.edge.messages.limits import ITEMS
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import decoded, dense_rows, join_rows, rows_per_piece
from services.edge.messages.reading import (
    named_or_default,
    read,
    read_count,
    read_role,
    read_truncation,
    text_item,
)

VERSION: Final = "1.9.3"
"""The TEI version with this API."""
_TYPES: Final = {
    400: "Empty",
    401: "Unauthenticated",
    403: "PermissionDenied",
    404: "NotFound",
    413: "Validation",
    422: "Validation",
    424: "Backend",
    429: "Overloaded",
    503: "Unhealthy",
    504: "Backend",
}
_STATUS: Final = {
    "INVALID_INPUT": 422,
    "INPUT_TOO_LONG": 422,
    "TASK_NOT_SUPPORTED": 424,
    "MODEL_LOAD_FAILED": 424,
    "WORKER_LOST": 424,
}


def error(problem: HttpError) -> Answer:
    """Return TEI's flat form, with its statuses and error types."""
    status = _STATUS.get(problem.reason, problem.status)
    if status == 422 and "is empty" in problem.message:
        status = 400
    body = encode_json({"error": problem.message, "error_type": _TYPES.get(status, "Backend")})
    return Answer(body, status, headers=retry_headers(problem))


TEI: Final = Dialect("tei", error)
Request = (
    pb.EncodeRequest
    | pb.ScoreRequest
    | pb.ExtractRequest
    | pb.TokenizeRequest
    | pb.DetokenizeRequest
)
Inputs = str | Annotated[list[str | int | list[int]], ITEMS]


class EmbedRequest(msgspec.Struct, kw_only=True):
    """A request to embed, including huggingface_hub's feature_extraction."""

    inputs: Inputs
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    encoding_format: str | None = None


class RankRequest(msgspec.Struct, kw_only=True):
    """A request to rerank."""

    query: str
    texts: Annotated[list[str], ITEMS]
    truncate: bool | None = None
    truncation_direction: str | None = None
    raw_scores: bool = False
    return_text: bool = False


class Parameters(msgspec.Struct, kw_only=True):
    """Parameters that clients of Hugging Face send next to `inputs`."""

    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None
    top_k: int | None = None
    function_to_apply: str | None = None


class PredictRequest(msgspec.Struct, kw_only=True):
    """A request to classify. A flat list of two texts is a pair; a batch is a list of lists of one
    or two.
    """

    inputs: str | Annotated[list[str | list[str]], ITEMS]
    truncate: bool | None = None
    truncation_direction: str | None = None
    raw_scores: bool = False
    parameters: Parameters | None = None


class Sentences(msgspec.Struct, kw_only=True):
    """A text and the texts to compare it with."""

    source_sentence: str
    sentences: Annotated[list[str], ITEMS]


class SimilarityRequest(msgspec.Struct, kw_only=True):
    """A request for the cosines of one text to others."""

    inputs: Sentences
    parameters: Parameters | None = None


class Rank(msgspec.Struct, kw_only=True):
    """One result. `index` is its position in `texts`; results are best first."""

    index: int
    score: float
    text: str | msgspec.UnsetType = msgspec.UNSET


class Prediction(msgspec.Struct, kw_only=True):
    """A label and its probability."""

    score: float
    label: str


class Info(msgspec.Struct, kw_only=True):
    """TEI's description of the server and its model."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


def has_texts(body: bytes) -> bool:
    """Return whether a body for `/rerank` has TEI's form."""
    if b'"texts"' not in body:
        return False
    try:
        found = msgspec.json.decode(body, type=_Peek)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return found.texts is not msgspec.UNSET and found.documents is msgspec.UNSET


class _Peek(msgspec.Struct):
    texts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def embed(received: Received) -> MeshCall:
    """`/embed`: dense vectors, normalised by default."""
    request = read(EmbedRequest, received)
    if request.encoding_format not in (None, "float"):
        raise invalid(
            "encoding_format must be float here; /v1/embeddings answers base64", "encoding_format"
        )
    message, fields = _encode(received, request, pb.REPRESENTATION_DENSE)
    message.normalize = request.normalize is not False

    def convert(reply: pb.EncodeResponse) -> Answer:
        rows = dense_rows(reply.dense)
        body = join_rows(
            len(rows),
            rows_per_piece(rows.shape[1]),
            b"[",
            lambda first, last: encode_json(rows[first:last])[1:-1],
            b"]",
        )
        return Answer(body, headers=timing_headers(reply.timings, reply.usage, message))

    return MeshCall(ENCODE, message, convert, fields=fields, dialect=TEI)


def embed_sparse(received: Received) -> MeshCall:
    """`/embed_sparse`: sparse vectors."""
    request = read(EmbedRequest, received)
    message, fields = _encode(received, request, pb.REPRESENTATION_SPARSE)

    def convert(reply: pb.EncodeResponse) -> Answer:
        matrix = decoded(codec.sparse, reply.sparse)
        rows = [
            [
                {"index": column, "value": value}
                for column, value in zip(columns.tolist(), weights, strict=True)
            ]
            for columns, weights in matrix
        ]
        return Answer(
            encode_json(rows), headers=timing_headers(reply.timings, reply.usage, message)
        )

    return MeshCall(ENCODE, message, convert, fields=fields, dialect=TEI)


def embed_all(received: Received) -> MeshCall:
    """`/embed_all`: one vector per token, for models that are made for it. TEI returns the last
    hidden states of any model.
    """
    request = read(EmbedRequest, received)
    message, fields = _encode(received, request, pb.REPRESENTATION_MULTI_VECTOR)

    def convert(reply: pb.EncodeResponse) -> Answer:
        ragged = decoded(codec.ragged, reply.multi_vector)

        def pieces() -> Iterator[bytes]:
            yield b"["
            for index in range(len(ragged)):
                yield (b"," if index else b"") + encode_json(
                    np.ascontiguousarray(ragged[index], np.float32)
                )
            yield b"]"

        return Answer(pieces(), headers=timing_headers(reply.timings, reply.usage, message))

    return MeshCall(ENCODE, message, convert, fields=fields, dialect=TEI)


def rerank(received: Received) -> MeshCall:
    """`/rerank` with `texts`: scores, best first."""
    request = read(RankRequest, received)
    named = path_target(received, "rerank")
    message = pb.ScoreRequest(
        model=named.model,
        query=text_item(request.query, "query"),
        documents=[text_item(text, f"texts[{index}]") for index, text in enumerate(request.texts)],
        scale=pb.SCORE_SCALE_LOGIT if request.raw_scores else pb.SCORE_SCALE_PROBABILITY,
        truncation=parse_truncation(request.truncate, request.truncation_direction),
        adapter=named.adapter,
    )

    def convert(reply: pb.ScoreResponse) -> Answer:
        scores = decoded(codec.score_result, reply)
        ranks: list[dict[str, Any]] = [
            {"index": int(index), "score": scores.scores[index]} for index in scores.ranking
        ]
        if request.return_text:
            for rank in ranks:
                rank["text"] = request.texts[rank["index"]]
        return Answer(
            encode_json(ranks), headers=timing_headers(reply.timings, reply.usage, message)
        )

    fields = item_fields("documents", "texts")
    return MeshCall(SCORE, message, convert, fields=fields, dialect=TEI)


def predict(received: Received) -> MeshCall:
    """`/predict`: a classifier's labels, or the scores of pairs with a common first text."""
    request = read(PredictRequest, received)
    if request.raw_scores:
        raise invalid("raw_scores is not supported: labels have probabilities", "raw_scores")
    if request.parameters is not None and request.parameters.function_to_apply not in (
        None,
        "sigmoid",
        "softmax",
    ):
        raise invalid(
            "parameters.function_to_apply must be sigmoid or softmax, or be omitted",
            "parameters.function_to_apply",
        )
    named = path_target(received, "predict")
    texts, is_batch, is_pair = _parse_inputs(request.inputs)
    truncation = parse_truncation(request.truncate, request.truncation_direction)
    if is_pair:
        return _pairs(named, texts, truncation, is_batch)
    message = pb.ExtractRequest(
        model=named.model,
        items=[text_item(one[0], "inputs") for one in texts],
        classify=pb.ClassifyTask(),
        truncation=truncation,
        adapter=named.adapter,
    )
    function = request.parameters.function_to_apply if request.parameters is not None else None
    if function is not None:
        message.classify.multi_label = function == "sigmoid"
    most = request.parameters.top_k if request.parameters is not None else None

    def convert(reply: pb.ExtractResponse) -> Answer:
        found = [
            [{"score": label.score, "label": label.label} for label in result.labels[:most]]
            for result in reply.results
        ]
        # huggingface_hub's client, the only one that sends parameters, takes the first element of a
        # list of lists.
        content: object = found if is_batch or request.parameters is not None else found[0]
        return Answer(
            encode_json(content), headers=timing_headers(reply.timings, reply.usage, message)
        )

    fields = item_fields("items", "inputs") if is_batch else single_field("items", "inputs")
    return MeshCall(EXTRACT, message, convert, fields=fields, dialect=TEI)


def similarity(received: Received) -> MeshCall:
    """`/similarity`: the cosines of one text to others."""
    request = read(SimilarityRequest, received)
    named = path_target(received, "embed")
    texts = [request.inputs.source_sentence, *request.inputs.sentences]
    parameters = request.parameters or Parameters()
    message = pb.EncodeRequest(
        model=named.model,
        items=[text_item(text, "inputs") for text in texts],
        representations=[pb.REPRESENTATION_DENSE],
        role=read_role(named, prompt_name=parameters.prompt_name),
        truncation=parse_truncation(parameters.truncate, parameters.truncation_direction),
        normalize=True,
        adapter=named.adapter,
    )
    if len(texts) < 2:
        raise invalid("inputs.sentences is empty", "inputs.sentences")

    def convert(reply: pb.EncodeResponse) -> Answer:
        rows = dense_rows(reply.dense)
        cosines = np.ascontiguousarray(rows[1:] @ rows[0], np.float32)
        return Answer(
            encode_json(cosines), headers=timing_headers(reply.timings, reply.usage, message)
        )

    fields = dict.fromkeys(
        ("items[].text", "items[]"),
        lambda index: "inputs.sentences" if index else "inputs.source_sentence",
    )
    return MeshCall(ENCODE, message, convert, fields=fields, dialect=TEI)


def info(received: Received) -> MeshCall:
    """`/info`: describe the model."""
    named = path_target(received, "embed")

    def convert(reply: models_pb2.GetModelResponse) -> Answer:
        card = reply.model.card
        labels = {str(index): label for index, label in enumerate(card.labels)}
        classes = {
            "id2label": labels,
            "label2id": {label: int(index) for index, label in labels.items()},
        }
        kind: dict[str, Any] = {"embedding": {"pooling": "mean"}}
        if models_pb2.TASK_ENCODE not in card.tasks:
            kind = {"classifier" if models_pb2.TASK_CLASSIFY in card.tasks else "reranker": classes}
        content = {
            "model_id": named.model,
            "model_sha": card.revision or None,
            "model_dtype": card.data_type or "float32",
            "model_type": kind,
            "max_concurrent_requests": 10_000,
            "max_input_length": card.max_tokens,
            "max_batch_tokens": max(16_384, card.max_tokens),
            "max_client_batch_size": 10_000,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "version": VERSION,
            "sha": None,
            "docker_label": None,
        }
        return Answer(encode_json(content))

    return MeshCall(GET_MODEL, models_pb2.GetModelRequest(model=named.model), convert, dialect=TEI)


def embeddings(received: Received) -> MeshCall:
    """OpenAI's embeddings with the path's model, whatever the body says, as in TEI."""
    form = msgspec.msgpack if received.is_msgpack else msgspec.json
    try:
        body = form.decode(received.body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return openai.embeddings(received)  # reports the error
    body["model"] = msgspec.Raw(form.encode(received.model))
    return openai.embeddings(received.with_body(form.encode(body)))


def health(received: Received) -> Answer:
    """`/health` below a prefix or at an address with a fixed model: report that this process is
    alive.
    """
    return Answer(b"")


def path_target(received: Received, default: str) -> AliasTarget:
    """Return the model of the path, or else the target of the alias `default`. Raises HttpError."""
    return named_or_default(received, received.model, default)


def _encode(
    received: Received, request: EmbedRequest, form: pb.Representation
) -> tuple[pb.EncodeRequest, Fields]:
    named = path_target(received, "embed")
    given = request.inputs
    texts = [given] if isinstance(given, str) else given
    items = []
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid(
                "inputs are token ids, which require the model's tokenizer: send texts",
                "inputs",
            )
        items.append(text_item(text, f"inputs[{index}]"))
    message = pb.EncodeRequest(
        model=named.model,
        items=items,
        representations=[form],
        role=read_role(named, prompt_name=request.prompt_name),
        dimensions=read_count(request.dimensions, "dimensions") or named.dimensions,
        truncation=parse_truncation(request.truncate, request.truncation_direction),
        adapter=named.adapter,
    )
    return message, single_field("items", "inputs") if isinstance(given, str) else item_fields(
        "items", "inputs"
    )


def parse_truncation(truncate: bool | None, side: str | None) -> pb.Truncation:
    """Parse `truncate` and `truncation_direction`. Raises HttpError."""
    if side is not None and side.lower() not in ("left", "right"):
        raise invalid(
            f"truncation_direction is {side!r}; it must be Left or Right", "truncation_direction"
        )
    return read_truncation(truncate, "truncate", side=side)


def _parse_inputs(inputs: str | list[str | list[str]]) -> tuple[list[list[str]], bool, bool]:
    """Return the inputs as lists of one or two texts, whether they are a batch, and whether they
    are pairs. Raises HttpError.
    """
    if isinstance(inputs, str):
        return [[inputs]], False, False
    if inputs and all(isinstance(one, str) for one in inputs):
        texts = [str(one) for one in inputs]
        if len(texts) > 2:
            raise invalid(
                "inputs has more than two texts, which is not a pair: a batch is a list of lists",
                "inputs",
            )
        return [texts], False, len(texts) == 2
    found = [[one] if isinstance(one, str) else one for one in inputs]
    lengths = {len(one) for one in found}
    if lengths == {1}:
        return found, True, False
    if lengths == {2} and len({one[0] for one in found}) == 1:
        return found, True, True
    raise invalid(
        "inputs must be texts, or pairs with the same first text; all of one kind and at least one",
        "inputs",
    )


def _pairs(
    named: AliasTarget, pairs: list[list[str]], truncation: pb.Truncation, is_batch: bool
) -> MeshCall:
    message = pb.ScoreRequest(
        model=named.model,
        query=text_item(pairs[0][0], "inputs"),
        documents=[text_item(pair[1], "inputs") for pair in pairs],
        scale=pb.SCORE_SCALE_PROBABILITY,
        truncation=truncation,
        adapter=named.adapter,
    )

    def convert(reply: pb.ScoreResponse) -> Answer:
        scores = decoded(codec.score_result, reply).scores
        found = [[{"score": score, "label": "LABEL_0"}] for score in scores]
        return Answer(
            encode_json(found if is_batch else found[0]),
            headers=timing_headers(reply.timings, reply.usage, message),
        )

    return MeshCall(
        SCORE, message, convert, fields=single_field("documents", "inputs"), dialect=TEI
    )


def timing_headers(timings: pb.Timings, usage: pb.Usage, message: Request) -> Headers:
    """Return TEI's headers: milliseconds, characters and tokens."""
    characters = _characters(message)
    numbers: tuple[tuple[bytes, float], ...] = (
        (b"x-compute-characters", characters),
        (b"x-compute-tokens", usage.input_tokens),
        (b"x-compute-time", timings.total_seconds * 1000),
        (b"x-total-time", timings.total_seconds * 1000),
        (b"x-tokenization-time", timings.prepare_seconds * 1000),
        (b"x-queue-time", (timings.queue_seconds + timings.wait_seconds) * 1000),
        (b"x-inference-time", timings.forward_seconds * 1000),
    )
    return tuple((name, b"%d" % round(number)) for name, number in numbers)


def _characters(message: Request) -> int:
    match message:
        case pb.TokenizeRequest():
            return sum(map(len, message.texts))
        case pb.DetokenizeRequest():
            return 0
        case pb.ScoreRequest():
            return sum(len(item.text) for item in message.documents)
    return sum(len(item.text) for item in message.items)


_POSTS: Final[tuple[tuple[str, Callable[[Received], MeshCall], str, type, Any], ...]] = (
    ("embed", embed, "Turns texts into vectors", EmbedRequest, list[list[float]]),
    ("embed_sparse", embed_sparse, "Turns texts into sparse vectors", EmbedRequest, None),
    (
        "embed_all",
        embed_all,
        "Turns texts into a vector per token",
        EmbedRequest,
        list[list[list[float]]],
    ),
    ("predict", predict, "Classifies texts by labels", PredictRequest, None),
    ("similarity", similarity, "Compares a text with others", SimilarityRequest, list[float]),
)

ROUTES: Final = (
    *(
        Route("POST", f"{start}/{name}", TEI, ask, summary, body, answer)
        for name, ask, summary, body, answer in _POSTS
        for start in ("/tei/{model}", "")
    ),
    # The bare /rerank is shared with others (rerank.py).
    Route(
        "POST",
        "/tei/{model}/rerank",
        TEI,
        rerank,
        "Ranks texts by relevance to a query",
        RankRequest,
        list[Rank],
    ),
    *(
        Route("GET", f"{start}/info", TEI, info, "Describes the model", answer=Info)
        for start in ("/tei/{model}", "")
    ),
    *(
        Route("GET", f"/tei/{{model}}{path}", TEI, health, "Reports that this process is alive")
        for path in ("/health", "/ping", "")
    ),
    *(
        Route(
            "POST",
            f"/tei/{{model}}/{name}",
            openai.OPENAI,
            embeddings,
            "OpenAI's form",
            openai.EmbeddingsRequest,
        )
        for name in ("v1/embeddings", "embeddings")
    ),
)

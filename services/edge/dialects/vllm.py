"""vLLM's paths: `POST /score`, `/v1/score`, `/classify`, `/pooling`. Pure. Infinity shares
`/classify`; its requests have `raw_scores`.

Errors have OpenAI's form. Scores have the model's scale, as in vLLM: cosines for embedding models,
and for a cross-encoder the activation that its files name, sigmoid by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

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
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
    item_fields,
    single_field,
)
from services.edge.messages.limits import ITEMS, LABELS
from services.edge.messages.names import AliasTarget
from services.edge.messages.numbers import (
    Rows,
    decoded,
    dense_rows,
    encode_base64,
    join_rows,
    rows_per_piece,
)
from services.edge.messages.reading import (
    named_or_default,
    read,
    read_count,
    read_priority,
    read_role,
    read_truncation,
    text_item,
)

VLLM: Final = Dialect("vllm", openai.error)
MAX_FIRST_TEXTS: Final = 64
"""The maximum number of different first texts per request. Each is a separate call, one after the
other.
"""

Texts = str | Annotated[list[str], ITEMS]
_PAIRS: Final = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)
"""The names of the two sides in different versions of vLLM."""


class PairsIn(msgspec.Struct, kw_only=True):
    """A text and one or several others, or two lists of equal length. Other fields are ignored."""

    model: str | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    chat_template: str | None = None
    # Shoal's.
    instruction: str | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class LabelsIn(msgspec.Struct, kw_only=True):
    """A request to classify. `labels` (Shoal's) is for models without labels."""

    input: Texts
    model: str | None = None
    messages: Any = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    # Infinity.
    raw_scores: bool | msgspec.UnsetType | None = msgspec.UNSET
    # Shoal's.
    labels: Annotated[list[str], LABELS] | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class PoolingIn(msgspec.Struct, kw_only=True):
    """A request to pool. `task` is embed, token_embed or classify; by default the model's own."""

    input: str | Annotated[list[str | int | list[int]], ITEMS]
    model: str | None = None
    task: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    messages: Any = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None
    # Shoal's.
    role: str | None = None
    instruction: str | None = None
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class PairScore(msgspec.Struct, kw_only=True):
    """The score of pair `index`."""

    index: int
    object: Literal["score"]
    score: float


class ClassifiedText(msgspec.Struct, kw_only=True):
    """One text's result. `probs` has the order of the model's labels; `label` is the best one."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class PooledText(msgspec.Struct, kw_only=True):
    """One text's result. `data` is a vector, a vector per token, probabilities, or any of them as
    base64 of little-endian float32.
    """

    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str


class PairScores(msgspec.Struct, kw_only=True):
    """The answer. `data` has the order of the request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: dict[str, int]


class Classified(PairScores, kw_only=True):
    """The answer with labels."""

    data: list[ClassifiedText]  # type: ignore[assignment]


class Pooled(PairScores, kw_only=True):
    """The answer with vectors."""

    data: list[PooledText]  # type: ignore[assignment]


class InfinityLabel(msgspec.Struct, kw_only=True):
    """A label of a text."""

    label: str
    score: float


class InfinityClassified(msgspec.Struct, kw_only=True):
    """Infinity's answer. `data` has each text's labels, best first."""

    id: str
    object: Literal["classify"]
    created: int
    model: str
    data: list[list[InfinityLabel]]
    usage: dict[str, int]


def score(received: Received) -> MeshCall:
    """`POST /score`. Raises HttpError."""
    request = read(PairsIn, received)
    named = named_or_default(received, request.model, "rerank")
    _refuse(request, ("chat_template",))
    first, second, (left, right) = _sides(request)
    groups = _groups(first, second, left, right)
    is_logit = request.use_activation is False or request.activation is False
    scores = np.zeros(len(second), np.float32)

    def ask(at: int, tokens: int) -> MeshCall:
        query, places = groups[at]
        message = pb.ScoreRequest(
            model=named.model,
            query=text_item(query, left),
            documents=[text_item(second[place], f"{right}[{place}]") for place in places],
            scale=pb.SCORE_SCALE_LOGIT if is_logit else pb.SCORE_SCALE_UNSPECIFIED,
            truncation=read_truncation(None, "truncate"),
            instruction=request.instruction or "",
            adapter=request.adapter or named.adapter,
            pool=request.pool or "",
            priority=read_priority(request.priority),
        )

        def convert(reply: pb.ScoreResponse) -> Answer | MeshCall:
            scores[places] = decoded(codec.score_result, reply).scores
            used = tokens + reply.usage.input_tokens
            if at + 1 < len(groups):
                return ask(at + 1, used)
            data = [
                {"index": index, "object": "score", "score": one}
                for index, one in enumerate(scores)
            ]
            return Answer(
                encode_json(_envelope(received, "score", request.model, named, data, used))
            )

        # With several queries the router's indices refer to a part of the caller's list.
        fields = (
            item_fields("documents", right)
            if len(groups) == 1
            else single_field("documents", right)
        )
        return MeshCall(
            SCORE, message, convert, fields={**fields, "query.text": left, "query": left}
        )

    return ask(0, 0)


def classify(received: Received) -> MeshCall:
    """`POST /classify`. The model's card determines the order of labels. Raises HttpError."""
    request = read(LabelsIn, received)
    _refuse(request, ("messages",))
    named = named_or_default(received, request.model, "predict")
    items, fields = _items(request.input)
    message = _classification(named, items, request)

    def convert(reply: pb.ExtractResponse) -> Answer | MeshCall:
        if request.raw_scores is not msgspec.UNSET:
            rows = [
                [{"label": one.label, "score": one.score} for one in result.labels]
                for result in reply.results
            ]
            body = _envelope(
                received, "classify", request.model, named, rows, reply.usage.input_tokens
            )
            return Answer(encode_json(body | {"object": "classify"}))
        if request.labels:
            return convert_labels(request.labels, reply)
        known = models_pb2.GetModelRequest(model=reply.alias.model or named.model)
        return MeshCall(
            GET_MODEL, known, lambda model: convert_labels(list(model.model.card.labels), reply)
        )

    def convert_labels(labels: list[str], reply: pb.ExtractResponse) -> Answer:
        data = []
        for index, result in enumerate(reply.results):
            probs = _probabilities(result, labels)
            best = result.labels[0].label if result.labels else None
            data.append({"index": index, "label": best, "probs": probs, "num_classes": len(probs)})
        return Answer(
            encode_json(
                _envelope(
                    received, "classify", request.model, named, data, reply.usage.input_tokens
                )
            )
        )

    return MeshCall(EXTRACT, message, convert, fields={**fields, "classify.labels": "labels"})


def pooling(received: Received) -> MeshCall:
    """`POST /pooling`: vectors, vectors of tokens, or probabilities, depending on the model. Raises
    HttpError.
    """
    request = read(PoolingIn, received)
    _refuse(request, ("messages",))
    if request.encoding_format not in (None, "float", "base64"):
        raise invalid(
            f"encoding_format is {request.encoding_format!r}; it must be float or base64",
            "encoding_format",
        )
    if request.embed_dtype not in (None, "float32"):
        raise invalid("embed_dtype must be float32, or be omitted", "embed_dtype")
    if request.endianness == "big":
        raise invalid("endianness must be little, or be omitted", "endianness")
    if request.task not in (None, *_FORMS, *_LABELS):
        known = ", ".join((*_FORMS, *_LABELS))
        raise invalid(f"task is {request.task!r}; it must be one of {known}, or be omitted", "task")
    default = "predict" if request.task in _LABELS else "embed"
    named = named_or_default(received, request.model, default)
    items, fields = _items(request.input)
    pooled = _Pooling(received, request, named, items, fields)
    return pooled.labels() if request.task in _LABELS else pooled.vectors()


_FORMS: Final = {
    "embed": pb.REPRESENTATION_DENSE,
    "encode": pb.REPRESENTATION_DENSE,
    "token_embed": pb.REPRESENTATION_MULTI_VECTOR,
}
_LABELS: Final = ("classify",)


class _Pooling:
    """The two ways to answer `/pooling`."""

    def __init__(
        self,
        received: Received,
        request: PoolingIn,
        named: AliasTarget,
        items: list[pb.Item],
        fields: Fields,
    ) -> None:
        self._received = received
        self._request = request
        self._named = named
        self._items = items
        self._fields = fields

    def vectors(self) -> MeshCall:
        request, named = self._request, self._named
        message = pb.EncodeRequest(
            model=named.model,
            items=self._items,
            representations=[_FORMS[request.task]] if request.task is not None else [],
            role=read_role(named, role=request.role),
            dimensions=read_count(request.dimensions, "dimensions") or named.dimensions,
            truncation=read_truncation(None, "truncate"),
            instruction=request.instruction or "",
            adapter=request.adapter or named.adapter,
            pool=request.pool or "",
            priority=read_priority(request.priority),
        )
        normalize = request.normalize if request.normalize is not None else request.use_activation
        if normalize is not None:
            message.normalize = normalize

        def fallback(problem: HttpError) -> MeshCall | None:
            """Classify instead, since a classifier has no vectors."""
            return (
                self.labels()
                if problem.reason == "TASK_NOT_SUPPORTED" and request.task is None
                else None
            )

        return MeshCall(ENCODE, message, self._encoded, fields=self._fields, fallback=fallback)

    def labels(self) -> MeshCall:
        request, named = self._request, self._named
        message = _classification(named, self._items, request)

        def convert(reply: pb.ExtractResponse) -> MeshCall:
            known = models_pb2.GetModelRequest(model=reply.alias.model or named.model)
            return MeshCall(
                GET_MODEL, known, lambda model: convert_labels(list(model.model.card.labels), reply)
            )

        def convert_labels(labels: list[str], reply: pb.ExtractResponse) -> Answer:
            rows = [
                np.array(_probabilities(result, labels), np.float32) for result in reply.results
            ]
            return self._to_answer(rows, max(map(len, rows), default=1), reply.usage.input_tokens)

        return MeshCall(EXTRACT, message, convert, fields=self._fields)

    def _encoded(self, reply: pb.EncodeResponse) -> Answer:
        if reply.HasField("dense"):
            rows = dense_rows(reply.dense)
            return self._to_answer(rows, rows.shape[1], reply.usage.input_tokens)
        if reply.HasField("multi_vector"):
            ragged = decoded(codec.ragged, reply.multi_vector)
            most = max((ragged[index].size for index in range(len(ragged))), default=1)
            return self._to_answer(ragged, most, reply.usage.input_tokens)
        raise HttpError(
            "TASK_NOT_SUPPORTED",
            f"the model {self._named.model} has only sparse vectors: use /v1/encode",
            field="model",
        )

    def _to_answer(self, rows: Any, width: int, tokens: int) -> Answer:
        is_base64 = self._request.encoding_format == "base64"

        def one(index: int) -> dict[str, Any]:
            row: Rows = np.ascontiguousarray(rows[index], np.float32)
            return {
                "index": index,
                "object": "pooling",
                "data": encode_base64(row) if is_base64 else row,
            }

        def piece(first: int, last: int) -> bytes:
            return encode_json([one(index) for index in range(first, last)])[1:-1]

        body = encode_json(
            _envelope(self._received, "pool", self._request.model, self._named, [], tokens)
        )
        head, _, tail = body.partition(b'"data":[]')
        return Answer(
            join_rows(len(rows), rows_per_piece(width), head + b'"data":[', piece, b"]" + tail)
        )


def _envelope(
    received: Received,
    kind: str,
    model: str | None,
    named: AliasTarget,
    data: list[Any],
    tokens: int,
) -> dict[str, Any]:
    """Return the fields that all three answers share, in vLLM's order."""
    return {
        "id": f"{kind}-{received.request_id}",
        "object": "list",
        "created": received.received_at,
        "model": model if model is not None else named.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


def _classification(
    named: AliasTarget, items: list[pb.Item], request: LabelsIn | PoolingIn
) -> pb.ExtractRequest:
    if request.use_activation is False or request.activation is False:
        field = "use_activation" if request.use_activation is False else "activation"
        raise invalid(f"{field} must be true, or be omitted: labels have probabilities", field)
    if isinstance(request, LabelsIn) and request.raw_scores is True:
        raise invalid(
            "raw_scores must be false, or be omitted: labels have probabilities", "raw_scores"
        )
    if isinstance(request, PoolingIn) and request.softmax is False:
        raise invalid("softmax must be true, or be omitted: labels have probabilities", "softmax")
    return pb.ExtractRequest(
        model=named.model,
        items=items,
        classify=pb.ClassifyTask(
            labels=(request.labels or []) if isinstance(request, LabelsIn) else []
        ),
        truncation=read_truncation(None, "truncate"),
        adapter=request.adapter or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )


def _probabilities(result: pb.Extraction, labels: list[str]) -> list[float]:
    """Return the probabilities in the order of `labels`, then those of labels that the card lacks,
    best first.
    """
    found = {one.label: one.score for one in result.labels}
    return [found.pop(label) for label in labels if label in found] + list(found.values())


def _refuse(request: PairsIn | LabelsIn | PoolingIn, absent: Sequence[str]) -> None:
    """Refuse fields that would change the numbers, instead of ignoring them."""
    if request.truncate_prompt_tokens not in (None, -1):
        raise invalid(
            "truncate_prompt_tokens must be -1, the model's limit, or be omitted",
            "truncate_prompt_tokens",
        )
    if getattr(request, "add_special_tokens", None) is False:
        raise invalid(
            "add_special_tokens must be true: models are used as trained", "add_special_tokens"
        )
    for name in absent:
        if getattr(request, name) is not None:
            raise invalid(f"{name} is not supported: send texts", name)


def _sides(request: PairsIn) -> tuple[list[str], list[str], tuple[str, str]]:
    """Return the texts of both sides and the caller's names of them: equal lengths, or one text on
    the left. Raises HttpError.
    """
    for left, right in _PAIRS:
        one, other = getattr(request, left), getattr(request, right)
        if one is None or other is None:
            continue
        first = [one] if isinstance(one, str) else list(one)
        second = [other] if isinstance(other, str) else list(other)
        if not first or not second:
            raise invalid(f"{left if not first else right} is empty", left if not first else right)
        if len(first) not in (1, len(second)):
            raise invalid(
                (
                    f"{left} has {len(first)} texts and {right} {len(second)}: there must be one, "
                    "or as many"
                ),
                left,
            )
        return first, second, (left, right)
    raise invalid(
        "text_1 and text_2 are required", "text_1" if request.text_1 is None else "text_2"
    )


def _groups(
    first: list[str], second: list[str], left: str, right: str
) -> list[tuple[str, list[int]]]:
    """Return the different texts of the left side with the indices of their pairs."""
    if len(first) == 1:
        return [(first[0], list(range(len(second))))]
    groups: dict[str, list[int]] = {}
    for place, text in enumerate(first):
        groups.setdefault(text, []).append(place)
    if len(groups) > MAX_FIRST_TEXTS:
        raise invalid(
            f"{left} has {len(groups)} different texts; at most {MAX_FIRST_TEXTS} are allowed",
            left,
        )
    return list(groups.items())


def _items(given: str | list[str] | list[str | int | list[int]]) -> tuple[list[pb.Item], Fields]:
    if isinstance(given, str):
        return [text_item(given, "input")], single_field("items", "input")
    items = []
    for index, text in enumerate(given):
        if not isinstance(text, str):
            raise invalid(
                "input is token ids, which require the model's tokenizer: send texts",
                "input",
            )
        items.append(text_item(text, f"input[{index}]"))
    return items, item_fields("items", "input")


_POSTS: Final[tuple[tuple[str, Callable[[Received], MeshCall], str, type, Any], ...]] = (
    ("/score", score, "Scores pairs of texts", PairsIn, PairScores),
    ("/v1/score", score, "Scores pairs of texts", PairsIn, PairScores),
    (
        "/classify",
        classify,
        "Classifies texts by labels",
        LabelsIn,
        (Classified, InfinityClassified),
    ),
    (
        "/pooling",
        pooling,
        "Returns vectors, vectors of tokens, or probabilities of texts, depending on the model",
        PoolingIn,
        Pooled,
    ),
)
ROUTES: Final = tuple(
    Route("POST", path, VLLM, ask, summary, body, answer)
    for path, ask, summary, body, answer in _POSTS
)

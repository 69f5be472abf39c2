"""The types that all dialects share: a received request, a mesh call, an answer, an error. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import orjson
from google.protobuf.message import Message
from shoal.errors import ShoalError
from shoal.transport.methods import Method
from shoal.v1 import inference_pb2 as pb

from libs import embedding_id
from libs.names import is_model_id
from services.edge.messages.names import AliasNames
from services.edge.messages.vocabulary import Vocabulary

EXPECT_EMBEDDING_ID_HEADER: Final = "x-shoal-expect-embedding-id"
TRUNCATED_INPUTS_HEADER: Final = b"x-shoal-truncated-inputs"
Headers = tuple[tuple[bytes, bytes], ...]
JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"

STATUS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "INVALID_INPUT": 400,
        "STORAGE_QUOTA_EXCEEDED": 400,
        "INPUT_TOO_LONG": 400,
        "TASK_NOT_SUPPORTED": 400,
        "UNAUTHENTICATED": 401,
        "PERMISSION_DENIED": 403,
        "MODEL_NOT_FOUND": 404,
        "NO_SUCH_ROUTE": 404,
        "NO_SUCH_OBJECT": 404,
        "BATCHES_DISABLED": 404,
        "JOBS_DISABLED": 404,
        "WRONG_METHOD": 405,
        "REQUEST_TIMEOUT": 408,
        "CONFLICT": 409,
        "EMBEDDING_ID_MISMATCH": 412,
        "TOO_LARGE": 413,
        "OUT_OF_MEMORY": 413,
        "UNSUPPORTED_MEDIA": 415,
        "MODEL_UNREACHABLE": 424,
        "BATCH_QUOTA_EXCEEDED": 429,
        "JOB_QUOTA_EXCEEDED": 429,
        "REQUEST_QUOTA_EXCEEDED": 429,
        "QUEUE_FULL": 429,
        "RATE_LIMITED": 429,
        "WORKER_LOST": 500,
        "INTERNAL": 500,
        "MODEL_LOAD_FAILED": 502,
        "NO_CAPACITY": 503,
        "DRAINING": 503,
        "NOT_READY": 503,
        "CANNOT_CONNECT": 503,
        "TLS_FAILED": 503,
        "DEADLINE_PASSED": 504,
    }
)
"""The HTTP status of each reason of libs/errors.py and of the edge. Dialects that differ have their
own table.
"""
_OF_CODE: Final[Mapping[str, int]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": 400,
        "NOT_FOUND": 404,
        "RESOURCE_EXHAUSTED": 429,
        "UNAVAILABLE": 503,
        "DEADLINE_EXCEEDED": 504,
    }
)
"""Statuses by gRPC code, for reasons that only a newer router knows."""
Fields = Mapping[str, str | Callable[[int], str]]
"""The caller's names of Shoal's fields. A key is a path such as `items[].text`; each `[]` of its
value is replaced by the index at the same place. A function is called with the last index. A key
that ends with `.*` includes all paths below it; otherwise the rest of the path after the match is
kept. A key of one word is replaced only at the beginning of a text.
"""
MAX_MESSAGE_CHARACTERS: Final = 4096
"""Longer error messages are cut off."""
_PATH: Final = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+|\[\d+\])*(?!\w)")
_STEP: Final = re.compile(r"\.?[a-z_]+|\[\d+\]")
_MAX_STEPS: Final = 8
"""The maximum number of steps of a key's path."""
DEFAULT_RETRY_SECONDS: Final = 1.0
"""The time to retry after for the statuses 429 and 503 if the router named none."""


_TASK_FIELDS: Final = frozenset(
    task.name for task in pb.ExtractRequest.DESCRIPTOR.oneofs_by_name["task"].fields
)
"""Fields of the gRPC API, one per task. Over HTTP the path or the model determines the task, so for
a model without it the faulty field is `model`.
"""


class HttpError(Exception):
    """An error response.

    Args:
        reason: A key of STATUS.
        message: The text for the caller.
        field: The path of the faulty field in the caller's names.
        retry_after: Seconds after which a retry may succeed; None if it would fail too.
        status: The HTTP status; 0: that of the reason in STATUS.
        allow: The methods that the path allows, separated by commas (for the status 405).
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        field: str = "",
        retry_after: float | None = None,
        status: int = 0,
        allow: str = "",
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = message[:MAX_MESSAGE_CHARACTERS] + "…"
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.allow = allow
        self.status = status or STATUS.get(reason, 500)
        self.retry_after = retry_after
        if retry_after is None and self.status in (429, 503):
            self.retry_after = DEFAULT_RETRY_SECONDS
        self.dialect: Dialect | None = None
        """The dialect of the error if only the body determines it; otherwise the route's."""

    @staticmethod
    def from_error(error: ShoalError, call: MeshCall | StreamedCall) -> HttpError:
        """Return the error of a failed router call, in the names of the call's dialect."""
        status = STATUS.get(error.reason) or _OF_CODE.get(error.code, 500)
        message = call.renamed(error.message)
        field = "model" if error.field in _TASK_FIELDS else call.renamed(error.field)
        if error.field == embedding_id.FIELD:
            field = EXPECT_EMBEDDING_ID_HEADER
        return HttpError(
            error.reason, message, field=field, retry_after=error.retry_after, status=status
        )


def invalid(message: str, field: str) -> HttpError:
    """Return an INVALID_INPUT error for a field of the caller's request."""
    return HttpError("INVALID_INPUT", message, field=field)


@dataclass(frozen=True, slots=True)
class Received:
    """A received request.

    Attributes:
        body: The whole body.
        model: The decoded part of the path that `{model}` matches.
        vocabulary: Converts ids of OpenAI's tokenizer to text, if the edge has it.
    """

    body: bytes
    names: AliasNames
    model: str = ""
    content_type: str = ""
    accept: str = ""
    request_id: str = ""
    json_length: str = ""
    vocabulary: Vocabulary | None = None
    client: str = ""
    """The User-Agent, or `sie-sdk`, which sends none."""
    received_at: int = 0
    """Unix time in seconds, for answers with a `created` field."""
    expect_embedding_id: str = ""
    """The id that vectors of the answer must have; empty for any."""
    is_bulk: bool = False
    """Whether calls of the mesh have the priority of bulk work, whatever the body says."""

    def with_body(self, body: bytes) -> Received:
        """Return the same request with another body."""
        return replace(self, body=body)

    @property
    def is_msgpack(self) -> bool:
        """Return whether the body is msgpack. Anything else is read as JSON whatever its content
        type, since shell scripts send text/plain.
        """
        return "msgpack" in self.content_type

    @property
    def wants_msgpack(self) -> bool:
        return "msgpack" in self.accept or (self.is_msgpack and "json" not in self.accept)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response.

    Attributes:
        body: The bytes or, for large ones, an iterator of pieces, each made on demand in about one
            millisecond.
        in_thread: Make the pieces in a thread, because all of them together would occupy the event
            loop for long.
    """

    body: bytes | Iterator[bytes]
    status: int = 200
    media_type: bytes = JSON
    headers: Headers = ()
    in_thread: bool = False


def with_truncation_header(step: Answer | MeshCall, reply: Message) -> Answer | MeshCall:
    """Return the answer with the header `x-shoal-truncated: true` if the reply lacks results that
    were found.
    """
    match reply:
        case pb.ExtractResponse():
            is_cut = any(result.truncated for result in reply.results)
        case pb.EncodeResponse():
            is_cut = reply.sparse.truncated
        case _:
            is_cut = False
    if not is_cut or not isinstance(step, Answer):
        return step
    return replace(step, headers=(*step.headers, (b"x-shoal-truncated", b"true")))


def with_truncated_inputs_header(answer: Answer, inputs: int) -> Answer:
    """Return the answer with the header `x-shoal-truncated-inputs` if texts were cut.

    Args:
        inputs: Texts, queries and labels of which tokens were cut.
    """
    if not inputs:
        return answer
    return replace(answer, headers=(*answer.headers, (TRUNCATED_INPUTS_HEADER, b"%d" % inputs)))


def with_embedding_id_header(step: Answer | MeshCall, reply: Message) -> Answer | MeshCall:
    """Return the answer with the header `x-shoal-embedding-id` if the reply has vectors, and
    `x-shoal-model` if an alias of the mesh was resolved to it.
    """
    if not isinstance(reply, pb.EncodeResponse) or not isinstance(step, Answer):
        return step
    headers = []
    if embedding_id.is_valid_expectation(reply.embedding_id):
        headers.append((b"x-shoal-embedding-id", reply.embedding_id.encode()))
    if is_model_id(reply.alias.model):
        headers.append((b"x-shoal-model", reply.alias.model.encode()))
    return replace(step, headers=(*step.headers, *headers)) if headers else step


@dataclass(frozen=True, slots=True)
class MeshCall:
    """A call of the mesh.

    Attributes:
        convert: Converts the reply to a response, or to the next call.
        fields: The caller's names of Shoal's fields.
        fallback: Returns the call to make instead after a failure, or None.
        in_thread: Whether a large reply is converted in a thread.
    """

    method: Method[Any, Any]
    message: Message
    convert: Callable[[Any], Answer | MeshCall]
    fields: Fields = dataclasses.field(default_factory=dict)
    fallback: Callable[[HttpError], MeshCall | None] = lambda problem: None
    dialect: Dialect | None = None
    """The dialect of errors if only the body determines it; otherwise the route's."""
    in_thread: bool = False

    def renamed(self, text: str) -> str:
        """Return a field's path, or a message with such paths, in the caller's names."""
        return _renamed(self.fields, text)


@dataclass(frozen=True, slots=True)
class StreamedCall:
    """A call of the mesh with replies that are streamed to the client. The first reply determines
    the status.

    Attributes:
        render: Converts a reply to bytes, which may be empty. Raises HttpError, which ends the
            stream.
        is_last: Returns whether a reply is the last one.
        fail: Returns the bytes that end a stream after an error.
        fields: The caller's names of Shoal's fields.
    """

    method: Method[Any, Any]
    message: Message
    render: Callable[[Any], bytes]
    is_last: Callable[[Any], bool]
    fail: Callable[[HttpError], bytes]
    media_type: bytes
    fields: Fields = dataclasses.field(default_factory=dict)

    def renamed(self, text: str) -> str:
        """Return a field's path, or a message with such paths, in the caller's names."""
        return _renamed(self.fields, text)


def _renamed(fields: Fields, text: str) -> str:
    return _PATH.sub(lambda found: _caller_path(fields, found), text[: MAX_MESSAGE_CHARACTERS + 1])


def _caller_path(fields: Fields, found: re.Match[str]) -> str:
    """Return the caller's name of a path, or the path itself."""
    path = found[0]
    steps = _STEP.findall(path)
    if len(steps) == 1 and found.start():
        return path  # an ordinary word of a sentence
    for count in range(min(len(steps), _MAX_STEPS), 0, -1):
        key = "".join("[]" if step[0] == "[" else step for step in steps[:count])
        rest = "".join(steps[count:])
        for name in (key, f"{key}.*"):
            if name in fields:
                return _filled(
                    fields[name], [step[1:-1] for step in steps[:count] if step[0] == "["]
                ) + rest * (name == key)
    return path


def _filled(name: str | Callable[[int], str], indices: Sequence[str]) -> str:
    if not isinstance(name, str):
        return name(int(indices[-1]))
    for index in indices:
        name = name.replace("[]", f"[{index}]", 1)
    return name


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format. `error` converts an error to a response."""

    name: str
    error: Callable[[HttpError], Answer]


Handler = Callable[[Received], "MeshCall | StreamedCall | Answer"]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table of routes.

    Attributes:
        path: `{model}`, or another name in braces, matches the rest, including slashes, up to the
            text that follows it.
        body: The type of the body for OpenAPI: a msgspec Struct, a type of them, or a tuple of
            alternatives.
        answer: The type of the answer for OpenAPI, as `body`; `str` is plain text, `bytes` a file.
        stream_media_type: The media type of the streamed answer; empty if none exists.
    """

    method: str
    path: str
    dialect: Dialect
    ask: Handler
    summary: str
    body: Any = None
    answer: Any = None
    stream_media_type: bytes = b""
    decoded: Callable[[Received], bytes] = lambda received: received.body
    """Returns the part of a body that is decoded as JSON or MessagePack."""
    query: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Descriptions of the query's parameters, for OpenAPI."""
    body_media_type: str = "application/json"


def encode_json(content: object) -> bytes:
    """Return any value that orjson supports as JSON, including numpy arrays (shortest digits of
    float32).
    """
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def retry_headers(problem: HttpError) -> Headers:
    """Return the headers that inform clients whether and when to retry: Retry-After (whole
    seconds), retry-after-ms and x-should-retry.
    """
    headers: list[tuple[bytes, bytes]] = []
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if problem.retry_after is None:
        if problem.status != 504:
            headers.append((b"x-should-retry", b"false"))
        return tuple(headers)
    seconds = max(0.0, problem.retry_after)
    headers += [
        (b"retry-after", str(max(1, math.ceil(seconds))).encode()),
        (b"retry-after-ms", str(math.ceil(seconds * 1000)).encode()),
    ]
    return tuple(headers)


_CONTENTS: Final = tuple(
    f"{part}.{kind}{data}"
    for part in ("", ".parts[]")
    for kind, data in (
        ("text", ""),
        ("image", ""),
        ("image", ".data"),
        ("document", ""),
        ("document", ".data"),
    )
)
"""The paths of an item's single text or file."""


@lru_cache(maxsize=64)
def item_fields(field: str, given: str, suffix: str = "") -> Fields:
    """Map the paths of items, `items[3].text`, to `given[3]` and the rest, and a query's text to
    `query`.
    """
    content = {f"{field}[]{content}": f"{given}[]{suffix}" for content in _CONTENTS}
    return {
        **content,
        f"{field}[]": f"{given}[]",
        field: given,
        **{f"query{content}": "query" for content in _CONTENTS},
    }


@lru_cache(maxsize=64)
def single_field(field: str, given: str) -> Fields:
    """Return the same mapping for a caller that sent one text instead of a list."""
    return dict.fromkeys(
        (*(f"{field}[]{content}" for content in _CONTENTS), f"{field}[]", field), given
    )

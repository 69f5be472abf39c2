"""What all dialects share: a request as it came, a question for the mesh, an answer, a problem.
Pure.
"""

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

from services.edge.messages.names import Names
from services.edge.messages.vocabulary import Vocabulary

Headers = tuple[tuple[bytes, bytes], ...]
JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"

STATUS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "INVALID_INPUT": 400,
        "INPUT_TOO_LONG": 400,
        "TASK_NOT_SUPPORTED": 400,
        "UNAUTHENTICATED": 401,
        "PERMISSION_DENIED": 403,
        "MODEL_NOT_FOUND": 404,
        "NO_SUCH_ROUTE": 404,
        "WRONG_METHOD": 405,
        "REQUEST_TIMEOUT": 408,
        "TOO_LARGE": 413,
        "OUT_OF_MEMORY": 413,
        "UNSUPPORTED_MEDIA": 415,
        "MODEL_UNREACHABLE": 424,
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
"""The HTTP status of a reason: those of libs/errors.py, and the edge's own. Dialects that differ
have a table of their own.
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
"""For reasons that only a newer router knows, by their gRPC status."""
Fields = Mapping[str, str | Callable[[int], str]]
"""What a caller calls our fields. A key is a path of ours, `items[].text`; each `[]` of its value
is replaced by the index in the same place. A function is called with the last index. A key that
ends with `.*` includes all paths below it; of another key's match, the rest of the path is kept. A
key of one word is replaced only where a text begins with it."""
MAX_MESSAGE_CHARACTERS: Final = 4096
"""Of an error's message; the rest is cut off."""
_PATH: Final = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+|\[\d+\])*(?!\w)")
_STEP: Final = re.compile(r"\.?[a-z_]+|\[\d+\]")
_MAX_STEPS: Final = 8
"""Of a path, in the longest key."""
DEFAULT_RETRY_SECONDS: Final = 1.0
"""For 429 and 503 where the router has named no time."""


_TASK_FIELDS: Final = frozenset(
    task.name for task in pb.ExtractRequest.DESCRIPTOR.oneofs_by_name["task"].fields
)
"""Fields that only gRPC has, one for each task. The path or the model says the task here, so a
model that does not have it is the caller's `model`."""


class HttpError(Exception):
    """Why a request has no answer. `reason`: a key of STATUS. `field`: its path in the caller's own
    names. `retry_after`: seconds; None: a repetition would fail, too. `allow`: the methods that a
    path takes, with commas."""

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
        """Whose error it is, where that follows only from the body; else the route's."""

    @staticmethod
    def of(error: ShoalError, question: MeshCall | Stream) -> HttpError:
        """The problem of a failed call to a router, in the names of the question's dialect."""
        status = STATUS.get(error.reason) or _OF_CODE.get(error.code, 500)
        message = question.renamed(error.message)
        field = "model" if error.field in _TASK_FIELDS else question.renamed(error.field)
        return HttpError(
            error.reason, message, field=field, retry_after=error.retry_after, status=status
        )


def invalid(message: str, field: str) -> HttpError:
    """INVALID_INPUT for a field of the caller's."""
    return HttpError("INVALID_INPUT", message, field=field)


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came: its whole body, the part of the path that `{model}` stands for
    (decoded), and some of its headers. `vocabulary`: the text of ids of OpenAI's tokenizer, where
    the edge has it."""

    body: bytes
    names: Names
    model: str = ""
    content_type: str = ""
    accept: str = ""
    request_id: str = ""
    json_length: str = ""
    vocabulary: Vocabulary | None = None
    client: str = ""
    """The User-Agent, or `sie-sdk`, which has no User-Agent of its own."""
    received_at: int = 0
    """Seconds since 1970: `created` of the answers that have it."""

    def with_body(self, body: bytes) -> Received:
        """The same request with another body."""
        return replace(self, body=body)

    @property
    def is_msgpack(self) -> bool:
        """Whether the body is msgpack; anything else is read as JSON, whatever it is called: shell
        scripts send text/plain.
        """
        return "msgpack" in self.content_type

    @property
    def wants_msgpack(self) -> bool:
        return "msgpack" in self.accept or (self.is_msgpack and "json" not in self.accept)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. `body`: its bytes or, for large ones, pieces of them, each made in about a
    millisecond when it is asked for.
    """

    body: bytes | Iterator[bytes]
    status: int = 200
    media_type: bytes = JSON
    headers: Headers = ()


def noting_truncation(step: Answer | MeshCall, reply: Message) -> Answer | MeshCall:
    """The answer made of a reply, with the header `x-shoal-truncated: true` if the reply lacks
    results that were found.
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


@dataclass(frozen=True, slots=True)
class MeshCall:
    """A call of the mesh. `answer`: makes a response of its reply, or the next question. `fields`:
    what the caller calls our fields. `otherwise`: what to ask instead after a failure, None:
    nothing."""

    method: Method[Any, Any]
    message: Message
    answer: Callable[[Any], Answer | MeshCall]
    fields: Fields = dataclasses.field(default_factory=dict)
    otherwise: Callable[[HttpError], MeshCall | None] = lambda problem: None
    dialect: Dialect | None = None
    """Whose errors its failures are, where that follows only from the body; else the route's."""

    def renamed(self, text: str) -> str:
        """A field's path, or a message with such paths, in the caller's names."""
        return _renamed(self.fields, text)


@dataclass(frozen=True, slots=True)
class Stream:
    """A call of the mesh whose replies are told as they come. The first of them decides about the
    status.

    `tell`: the bytes for a reply, perhaps none; raises Problem, which ends the answer. `is_last`:
    whether nothing follows the reply. `fail`: the bytes that end an answer which has begun.
    `fields`: as of Question.
    """

    method: Method[Any, Any]
    message: Message
    tell: Callable[[Any], bytes]
    is_last: Callable[[Any], bool]
    fail: Callable[[HttpError], bytes]
    media_type: bytes
    fields: Fields = dataclasses.field(default_factory=dict)

    def renamed(self, text: str) -> str:
        """As of Question."""
        return _renamed(self.fields, text)


def _renamed(fields: Fields, text: str) -> str:
    return _PATH.sub(lambda found: _name_of(fields, found), text[: MAX_MESSAGE_CHARACTERS + 1])


def _name_of(fields: Fields, found: re.Match[str]) -> str:
    """What the caller calls a path of ours, or the path itself."""
    path = found[0]
    steps = _STEP.findall(path)
    if len(steps) == 1 and found.start():
        return path  # a word in a sentence
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
    """`error`: how a problem is told."""

    name: str
    error: Callable[[HttpError], Answer]


Asked = Callable[[Received], "MeshCall | Stream | Answer"]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table of routes. `path`: `{model}` stands for the rest up to what follows it,
    slashes included. `body` and `answer`: msgspec Structs and types of them, for OpenAPI; a tuple:
    one of these; `str`: plain text. `along`: the media type of an answer that is sent while it is
    made; empty: there is none."""

    method: str
    path: str
    dialect: Dialect
    ask: Asked
    summary: str
    body: Any = None
    answer: Any = None
    along: bytes = b""
    decoded: Callable[[Received], bytes] = lambda received: received.body
    """The part of a body that is decoded: JSON or MessagePack."""


def json_of(content: object) -> bytes:
    """JSON of anything that orjson knows, arrays of numpy included (shortest digits of float32)."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def retry_headers(problem: HttpError) -> Headers:
    """What tells clients whether and when to try again: Retry-After (whole seconds), retry-after-ms
    and x-should-retry.
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
"""Where an item's one text or file is."""


@lru_cache(maxsize=64)
def item_fields(field: str, given: str, suffix: str = "") -> Fields:
    """Renames the items of a request, `items[3].text`, to `given[3]` and what follows there, and a
    query's text to `query`.
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
    """The same where the caller gave one text instead of a list."""
    return dict.fromkeys(
        (*(f"{field}[]{content}" for content in _CONTENTS), f"{field}[]", field), given
    )

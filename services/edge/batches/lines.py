"""Lines of a batch: requests of the input file, and results of the files that a batch writes. Pure.

A batch is divided into chunks of consecutive lines. The results of a chunk are stored as one
object, a part: a line with its sizes and counts, then the lines of the file of results, then those
of the file of errors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from services.edge.batches.objects import BatchError, InputPlan, LineChunk, PartCounts
from services.edge.intake.served import Executed
from services.edge.messages.base import encode_json

MAX_ERRORS: Final = 100
"""The maximum number of errors that a failed batch lists."""
MAX_CUSTOM_ID_CHARACTERS: Final = 512
MAX_MODEL_CHARACTERS: Final = 256
"""The maximum size of a model's name by which requests in flight are counted."""
MAX_BATCH_MODELS: Final = 16
"""The maximum number of models that the lines of a batch name."""
CHUNK_REQUESTS: Final = 256
CHUNK_INPUTS: Final = 256
"""The maximum number of texts of a chunk, unless its only request has more."""
CHUNK_BYTES: Final = 1 << 20
"""The maximum size of a chunk's lines, unless it is a single one. The inputs of a larger line are
not counted.
"""
MAX_RESULTS_BYTES: Final = 64 << 20
"""The maximum size of a chunk's results. A mesh answers a request with at most 16 MiB of vectors,
which are at most four times larger as JSON.
"""
ENDPOINTS: Final = (
    "/v1/embeddings",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/rerank",
    "/v2/rerank",
)
ENDPOINT_PREFIXES: Final = ("/v1/encode/", "/v1/score/", "/v1/extract/")
"""Beginnings of paths that end with a model."""
_LISTS: Final = ("input", "documents", "prompt", "items")
"""Fields of bodies with the texts of a request."""
LOGPROBS_INPUTS: Final = 32
"""Number of texts as which a text counts if its answer has log probabilities of tokens."""


class LineFault(Exception):
    """A line cannot be executed.

    Args:
        code: OpenAI's name of the fault.
        param: The faulty field.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class LineRequest(NamedTuple):
    """A line of the input. `body` is an object."""

    custom_id: str
    body: msgspec.Raw


class _Line(msgspec.Struct):
    """The fields of a line. They are checked one by one, so that an error can name its field, and
    are not decoded before: as objects, a value of 64 MiB would have gigabytes.
    """

    custom_id: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    url: msgspec.Raw = msgspec.Raw(b"")
    body: msgspec.Raw = msgspec.Raw(b"")


class _Params(msgspec.Struct):
    """The parameters of a body that decide how a batch is divided."""

    output_types: msgspec.Raw = msgspec.Raw(b"")
    chunking: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    """The fields of a body that decide how a batch is divided."""

    model: msgspec.Raw = msgspec.Raw(b"")
    stream: msgspec.Raw = msgspec.Raw(b"")
    return_multivector: msgspec.Raw = msgspec.Raw(b"")
    params: msgspec.Raw = msgspec.Raw(b"")
    logprobs: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    items: msgspec.Raw = msgspec.Raw(b"")


_LINE: Final = msgspec.json.Decoder(_Line)
_BODY: Final = msgspec.json.Decoder(_Body)
_PARAMS: Final = msgspec.json.Decoder(_Params)
_FALSE: Final = (b"", b"null", b"false", b"0")
_BEGIN_BYTES: Final = 8
"""More than the longest of these values."""
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


def is_endpoint(path: str) -> bool:
    """Return whether requests of a batch may have this path."""
    return path in ENDPOINTS or any(
        path.startswith(start) and len(path) > len(start) for start in ENDPOINT_PREFIXES
    )


def parse(line: bytes, endpoint: str) -> LineRequest:
    """Return the request of a line. Raises LineFault."""
    try:
        request = _LINE.decode(line)
        custom_id, method, url = map(_text, (request.custom_id, request.method, request.url))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LineFault(
            "invalid_json_line", f"This line is not parseable as a JSON object: {error}"
        ) from None
    if not custom_id:
        raise LineFault("invalid_request", "custom_id is required and must be text", "custom_id")
    if len(custom_id) > MAX_CUSTOM_ID_CHARACTERS:
        raise LineFault(
            "invalid_request",
            f"custom_id has more than {MAX_CUSTOM_ID_CHARACTERS} characters",
            "custom_id",
        )
    if method != "POST":
        raise LineFault("invalid_method", "method is required and must be POST", "method")
    if url != endpoint:
        raise LineFault("invalid_url", f"url must be the endpoint of the batch, {endpoint}", "url")
    if not _begin(request.body).startswith(b"{"):
        raise LineFault("invalid_request", "body is required and must be an object", "body")
    return LineRequest(custom_id, request.body)


def _text(value: msgspec.Raw) -> str | None:
    """Return a JSON text; None for any other value. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(value, type=str) if _begin(value).startswith(b'"') else None


def _begin(value: msgspec.Raw) -> bytes:
    """Return the first bytes of a JSON value. The rest of it is not copied."""
    return bytes(memoryview(value)[:_BEGIN_BYTES])


def divide(
    lines: Iterable[tuple[int, bytes]],
    endpoint: str,
    *,
    max_requests: int,
    max_line_bytes: int,
    is_stopped: Callable[[], bool] = bool,
) -> InputPlan:
    """Check all lines of an input and divide them into chunks. Raises Invalid, DivisionStopped.

    Args:
        lines: The offset and the content of each line.
        max_requests: The maximum number of requests, and of blank lines.
        max_line_bytes: The maximum size of a line.
        is_stopped: Returns whether to stop.
    """
    planner = _Planner(endpoint, max_requests, max_line_bytes)
    blank = 0
    for number, (offset, line) in enumerate(lines, 1):
        if is_stopped():
            raise DivisionStopped
        if not is_blank(line):
            planner.add(number, offset, line)
            continue
        blank += 1
        if blank > max_requests:
            raise Invalid(
                [
                    BatchError(
                        code="too_many_requests",
                        message=f"the file has more than {max_requests:,} blank lines",
                        line=number,
                    )
                ]
            )
    return planner.finish()


class DivisionStopped(Exception):
    """The division of an input was stopped."""


class Invalid(Exception):
    """An input fails validation."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(errors[0].message)
        self.errors = errors


class _Planner:
    """The state of dividing an input."""

    def __init__(self, endpoint: str, max_requests: int, max_line_bytes: int) -> None:
        self._endpoint, self._max_requests = endpoint, max_requests
        self._max_line_bytes = max_line_bytes
        # The state: errors, digests of ids, models, and the numbers of finished and current chunks.
        self._errors: list[BatchError] = []
        self._ids: set[bytes] = set()
        self._models: set[str] = set()
        self._chunks: list[LineChunk] = []
        self._first, self._offset, self._end = 0, 0, 0
        self._requests = self._inputs = self._total = 0

    def add(self, number: int, offset: int, line: bytes) -> None:
        """Add a line that is not blank. Raises Invalid."""
        self._total += 1
        if self._total > self._max_requests:
            raise Invalid(
                [
                    BatchError(
                        code="too_many_requests",
                        message=f"the file has more than {self._max_requests:,} requests",
                    )
                ]
            )
        try:
            inputs = self._check(line)
        except LineFault as fault:
            self._errors.append(
                BatchError(code=fault.code, message=fault.message, param=fault.param, line=number)
            )
            if len(self._errors) >= MAX_ERRORS:
                raise Invalid(self._errors) from None
            return
        if self._requests and (
            self._requests >= CHUNK_REQUESTS
            or self._inputs + inputs > CHUNK_INPUTS
            or offset + len(line) - self._offset > CHUNK_BYTES
        ):
            self._close()
        if not self._requests:
            self._first, self._offset = number, offset
        self._requests += 1
        self._inputs += inputs
        self._end = offset + len(line)

    def finish(self) -> InputPlan:
        """Return the plan. Raises Invalid."""
        if self._errors:
            raise Invalid(self._errors)
        if not self._total:
            raise Invalid([BatchError(code="empty_file", message="the file has no requests")])
        self._close()
        model = next(iter(self._models)) if len(self._models) == 1 else ""
        return InputPlan(requests=self._total, model=model, chunks=self._chunks)

    def _close(self) -> None:
        self._chunks.append(
            LineChunk(self._first, self._requests, self._offset, self._end - self._offset)
        )
        self._requests = self._inputs = 0

    def _check(self, line: bytes) -> int:
        """Return as how many texts a line counts. Raises LineFault, Invalid."""
        if len(line) > self._max_line_bytes:
            raise LineFault(
                "request_too_large", f"the line has more than {self._max_line_bytes:,} bytes"
            )
        request = parse(line, self._endpoint)
        digest = hashlib.blake2b(request.custom_id.encode(), digest_size=16).digest()
        if digest in self._ids:
            raise LineFault(
                "duplicate_custom_id",
                f"the custom_id {request.custom_id!r:.100} occurs on an earlier line",
                "custom_id",
            )
        self._ids.add(digest)
        try:
            body = _BODY.decode(request.body)
            model = _text(body.model)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LineFault("invalid_request", f"body: {error}", "body") from None
        if _begin(body.stream) not in _FALSE:
            raise LineFault(
                "streaming_unsupported", "requests of a batch cannot be streamed", "body.stream"
            )
        if model is None and _begin(body.model) not in (b"", b"null"):
            raise LineFault("invalid_request", "body.model must be text", "body.model")
        self._models.add((model or "")[:MAX_MODEL_CHARACTERS])
        if len(self._models) > MAX_BATCH_MODELS:
            raise Invalid(
                [
                    BatchError(
                        code="too_many_models",
                        message=f"the file names more than {MAX_BATCH_MODELS} models: send "
                        "requests for the others in further batches",
                        param="body.model",
                    )
                ]
            )
        if len(line) > CHUNK_BYTES or _is_large(body):
            return CHUNK_INPUTS
        return _inputs(body) * (LOGPROBS_INPUTS if _has_logprobs(body) else 1)


class PreparedLine(NamedTuple):
    """A request that is sent. `model` is empty if the body names none."""

    custom_id: str
    model: str
    body: bytes


def prepare(line: bytes, endpoint: str, model: str = "") -> PreparedLine:
    """Return the request of a line that was checked, without references to the line.

    Args:
        model: The model of all lines; empty to read that of this line.
    """
    request = parse(line, endpoint)
    if not model:
        model = (_text(_BODY.decode(request.body).model) or "")[:MAX_MODEL_CHARACTERS]
    return PreparedLine(request.custom_id, model, bytes(request.body))


def _is_large(body: _Body) -> bool:
    """Return whether the answer has more than one vector for a text."""
    if _begin(body.return_multivector) not in _FALSE:
        return True
    if not _begin(body.params).startswith(b"{"):
        return False
    params = _PARAMS.decode(body.params)
    return b'"multivector"' in bytes(params.output_types) or _begin(params.chunking) not in _FALSE


def _has_logprobs(body: _Body) -> bool:
    """Return whether the answer has log probabilities, as it also does for the number 0."""
    return _begin(body.logprobs) not in (b"", b"null", b"false")


def _inputs(body: _Body) -> int:
    """Return the number of texts of a small body."""
    for name in _LISTS:
        given = bytes(getattr(body, name))
        if given.startswith(b"["):
            count = len(_LIST.decode(given))
            is_token_ids = name in ("input", "prompt") and given[1:].lstrip()[:1].isdigit()
            return 1 if is_token_ids else max(1, count)
    return 1


def split(data: bytes, chunk: LineChunk) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each line of a chunk that is not blank.

    Args:
        data: The chunk's bytes.
    """
    for number, line in enumerate(data.split(b"\n"), chunk.first):
        if not is_blank(line):
            yield number, line


def is_blank(line: bytes) -> bool:
    """Return whether a line has only white space. It is not copied, as `strip` would."""
    return not line or line.isspace()


def request_id(batch: str, line: int) -> str:
    """Return the id of a line's request, which is the same whenever the line is executed."""
    return f"batch_req_{hashlib.sha256(f'{batch}:{line}'.encode()).hexdigest()[:32]}"


def result_line(identity: str, custom_id: str, executed: Executed) -> bytes:
    """Return the line of an executed request, with a line break."""
    error = None
    if executed.status >= 400:
        error = {"code": _code(executed), "message": executed.message}
    head = encode_json({"id": identity, "custom_id": custom_id})[:-1]
    cut = {"truncated_inputs": executed.truncated_inputs} if executed.truncated_inputs else {}
    response = encode_json({"status_code": executed.status, "request_id": identity, **cut})[:-1]
    return b'%b,"response":%b,"body":%b},"error":%b}\n' % (
        head,
        response,
        executed.body,
        encode_json(error),
    )


def failed_line(identity: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request without an answer, with a line break."""
    error = {"code": code, "message": message}
    return (
        encode_json({"id": identity, "custom_id": custom_id, "response": None, "error": error})
        + b"\n"
    )


class _Code(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Code = msgspec.field(default_factory=_Code)


def _code(executed: Executed) -> str:
    """Return OpenAI's code of an error, or the reason in lower case."""
    try:
        code = msgspec.json.decode(executed.body, type=_ErrorBody).error.code
    except msgspec.MsgspecError:
        code = None
    return code or executed.reason.lower()


def make_part(output: list[bytes], errors: list[bytes], tokens: tuple[int, int]) -> bytes:
    """Return a part.

    Args:
        output: Lines of the file of results.
        errors: Lines of the file of errors.
        tokens: The tokens that models read and generated.
    """
    sizes = sum(map(len, output)), sum(map(len, errors))
    counts = PartCounts(*sizes, len(output), len(errors), *tokens)
    return b"".join((msgspec.json.encode(counts), b"\n", *output, *errors))


class Results:
    """The results of a chunk, in the order in which requests were answered."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.bytes = 0
        self.input_tokens = self.output_tokens = 0
        self._lines: dict[bool, list[bytes]] = {False: [], True: []}

    def add(self, number: int, line: bytes, is_error: bool) -> None:
        self.numbers.add(number)
        self.bytes += len(line)
        self._lines[is_error].append(line)

    def take_part(self) -> bytes:
        """Return the part, and free the lines."""
        output, errors = self._lines.pop(False), self._lines.pop(True)
        return make_part(output, errors, (self.input_tokens, self.output_tokens))


def read_counts(part: bytes) -> PartCounts:
    """Return the sizes and counts of a part. Raises ValueError if it is damaged."""
    head = part[: max(0, part.find(b"\n"))]  # no copy of the rest, which can have 64 MiB
    try:
        found = msgspec.json.decode(head, type=PartCounts)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the first line of a part is damaged: {error}") from None
    counts = msgspec.structs.replace(found, head_bytes=len(head) + 1)
    if len(part) != counts.head_bytes + counts.output_bytes + counts.error_bytes:
        raise ValueError("the size of a part differs from the one in its first line")
    return counts


def retry_delay(attempt: int, retry_after: float | None) -> float:
    """Return the seconds before the next attempt, from 1 for the first one."""
    return max(retry_after or 0.0, min(30.0, 0.5 * math.pow(2, min(attempt, 10))))

"""Ollama's `POST /api/chat` and `/api/generate`, as lines of JSON unless `stream` is false. Pure.

As in `chat.py`, a conversation ends with the message of the user or a tool. `think` and `raw` are
Ollama's; templates are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgspec
import orjson
from shoal.transport.methods import EXTRACT, EXTRACT_STREAM
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.generation.choices import AnswerChoices, list_stops
from services.edge.dialects.generation.common import (
    Conversation,
    GenerationRequest,
    MessageContent,
    StreamedText,
    Tools,
    build_conversation,
    encode_line,
    is_cut,
    is_last,
)
from services.edge.dialects.ollama import LONG_AGO, OLLAMA, answer_if_known, error_text, model_named
from services.edge.messages.base import (
    Answer,
    HttpError,
    MeshCall,
    Received,
    Route,
    StreamedCall,
    invalid,
)
from services.edge.messages.limits import MESSAGES, PARTS
from services.edge.messages.reading import read

LINES: Final = b"application/x-ndjson"


class OllamaOptions(msgspec.Struct, kw_only=True):
    """`num_predict` is the maximum number of tokens; below 1 the model's. Options about memory and
    processors are ignored.
    """

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Accepted only with values that have no effect.
    repeat_last_n: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    penalize_newline: bool | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """`arguments` is an object."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """`images` are in base64. `role` is tool for a function's result."""

    role: str
    content: str = ""
    images: Annotated[list[str], PARTS] | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatRequest(msgspec.Struct, kw_only=True):
    """`format` is a JSON Schema of an object. If `messages` is empty nothing is generated, and the
    answer reports whether the model is known.
    """

    model: str
    messages: Annotated[list[OllamaMessage], MESSAGES] = []
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    tools: list[Any] | None = None
    think: bool | str | None = None


class OllamaGenerateRequest(msgspec.Struct, kw_only=True):
    """If `prompt` is empty nothing is generated, and the answer reports whether the model is
    known.
    """

    model: str
    prompt: str = ""
    system: str | None = None
    images: Annotated[list[str], PARTS] | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    suffix: str | None = None
    template: str | None = None
    raw: bool | None = None
    think: bool | str | None = None
    context: list[int] | None = None


class OllamaGenerated(msgspec.Struct, kw_only=True):
    """A line: `message` for chat, `response` for generate. The last line has `done_reason` (`stop`
    or `length`), token counts, and durations in nanoseconds (`load_duration` is the time in the
    queue, including loading).
    """

    model: str
    created_at: str
    done: bool
    message: OllamaMessage | msgspec.UnsetType = msgspec.UNSET
    response: str | msgspec.UnsetType = msgspec.UNSET
    done_reason: str | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


Write = Callable[[str], dict[str, Any]]
"""Returns the fields that hold a piece of the text."""


def chat(received: Received) -> MeshCall | StreamedCall:
    """`POST /api/chat`. Raises HttpError."""
    request = read(OllamaChatRequest, received)
    if not request.messages:
        return _make_call(received, request, None, _as_message)
    calls = {
        place: [
            (call.function.name, orjson.dumps(call.function.arguments).decode())
            for call in message.tool_calls
        ]
        for place, message in enumerate(request.messages)
        if message.tool_calls
    }
    conversation = build_conversation(
        [
            (
                message.role,
                []
                if place in calls and not message.content
                else _message_contents(
                    message.content,
                    message.images,
                    f"messages[{place}].content",
                    f"messages[{place}].images",
                ),
            )
            for place, message in enumerate(request.messages)
        ],
        calls,
    )
    return _make_call(received, request, conversation, _as_message)


def generate(received: Received) -> MeshCall | StreamedCall:
    """`POST /api/generate`. Raises HttpError."""
    request = read(OllamaGenerateRequest, received)
    for field in ("suffix", "template", "raw", "context"):
        if getattr(request, field):
            raise invalid(
                f"{field} is not supported: the checkpoint's chat template renders the prompt",
                field,
            )
    system = [MessageContent(request.system, "system")] if request.system else []
    user = (
        _message_contents(request.prompt, request.images, "prompt", "images")
        if request.prompt or request.images
        else []
    )
    return _make_call(
        received,
        request,
        Conversation(system, user) if user else None,
        lambda text: {"response": text},
    )


def _as_message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def _message_contents(
    text: str, images: Sequence[str] | None, text_field: str, images_field: str
) -> list[MessageContent]:
    """Return the contents, images first as in Ollama."""
    found = [
        MessageContent(image, f"{images_field}[{place}]", is_image=True)
        for place, image in enumerate(images or ())
    ]
    return [*found, MessageContent(text, text_field)] if text or not found else found


def _make_call(
    received: Received,
    request: OllamaChatRequest | OllamaGenerateRequest,
    conversation: Conversation | None,
    write: Write,
) -> MeshCall | StreamedCall:
    named = model_named(received, request.model)
    head = {"model": request.model, "created_at": LONG_AGO}
    if conversation is None:
        return answer_if_known(named, {**head, **write(""), "done": True, "done_reason": "load"})
    options = request.options or OllamaOptions()
    _refuse_unsupported(request.think, options)
    most = (
        options.num_predict if options.num_predict is not None and options.num_predict > 0 else None
    )
    tools = Tools(request.tools or ()) if isinstance(request, OllamaChatRequest) else Tools()
    max_tokens = (most, "options.num_predict")
    asked = GenerationRequest(
        named,
        conversation,
        max_tokens,
        _schema(request.format),
        choices=_choices(options),
        tools=tools,
    )
    lines = _Lines(head, write)
    if request.stream is False:
        return MeshCall(
            EXTRACT,
            asked.request(),
            lambda reply: Answer(lines.whole(reply)),
            fields=asked.fields(),
        )
    return StreamedCall(
        EXTRACT_STREAM, asked.request(), lines.render, is_last, _error_line, LINES, asked.fields()
    )


def _refuse_unsupported(think: bool | str | None, options: OllamaOptions) -> None:
    """Refuse fields that would change the text, instead of ignoring them."""
    refusals = (
        (
            think is not None,
            "think",
            "is not supported: the chat template determines whether a model thinks",
        ),
        (
            options.repeat_last_n not in (None, -1),
            "options.repeat_last_n",
            "must be -1: penalties apply to the whole text",
        ),
        (options.typical_p not in (None, 1), "options.typical_p", "must be 1: use top_p or min_p"),
        (options.tfs_z not in (None, 1), "options.tfs_z", "must be 1: use top_p or min_p"),
        (options.mirostat, "options.mirostat", "must be 0: use temperature and top_p"),
        (
            options.penalize_newline is False,
            "options.penalize_newline",
            "must be true: penalties apply to all tokens",
        ),
    )
    for is_asked, field, why in refusals:
        if is_asked:
            raise invalid(f"{field} {why}", field)


def _choices(options: OllamaOptions) -> AnswerChoices:
    sampling = {_NAMES.get(name, name): getattr(options, name) for name in _SAMPLED}
    names = {f"sampling.{_NAMES.get(name, name)}": f"options.{name}" for name in _SAMPLED}
    return AnswerChoices(
        sampling,
        {**names, "stop": "options.stop"},
        seed=options.seed,
        stop=list_stops(options.stop),
    )


_NAMES: Final = {"repeat_penalty": "repetition_penalty"}
_SAMPLED: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _schema(given: str | dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    if not given:
        return None, ""
    if isinstance(given, dict):
        return given, "format"
    if given == "json":
        return {"type": "object"}, "format"
    raise invalid("format must be json or a JSON Schema of an object, or be omitted", "format")


def _error_line(problem: HttpError) -> bytes:
    """Return a line that Ollama's clients raise as an error."""
    return encode_line({"error": error_text(problem)}) + b"\n"


class _Lines:
    """The lines of one answer."""

    def __init__(self, head: dict[str, Any], write: Write) -> None:
        self._head = head
        self._write = write
        self._streamed = StreamedText()

    def render(self, reply: pb.ExtractStreamResponse) -> bytes:
        """Return the lines of a reply. Raises HttpError."""
        if not reply.HasField("response"):
            return self._line(self._streamed.next_text(reply.deltas))
        rest = self._line(self._streamed.remaining_text(reply.response.results[0].text))
        return rest + self._end(reply.response, "") + b"\n"

    def whole(self, reply: pb.ExtractResponse) -> bytes:
        """Return the answer as one object."""
        return self._end(reply, reply.results[0].text)

    def _line(self, text: str) -> bytes:
        return (
            encode_line({**self._head, **self._write(text), "done": False}) + b"\n" if text else b""
        )

    def _end(self, reply: pb.ExtractResponse, text: str) -> bytes:
        timings, usage = reply.timings, reply.usage
        calls = reply.results[0].tool_calls
        wrote = self._write(text)
        if calls and "message" in wrote:
            called = [
                {"function": {"name": call.name, "arguments": orjson.loads(call.arguments)}}
                for call in calls
            ]
            wrote = {"message": {**wrote["message"], "tool_calls": called}}
        rest = {
            "done": True,
            "done_reason": "length" if is_cut(reply.results[0]) else "stop",
            "total_duration": round(timings.total_seconds * 1e9),
            "load_duration": round(timings.queue_seconds * 1e9),
            "prompt_eval_count": usage.input_tokens,
            "prompt_eval_duration": round(timings.prepare_seconds * 1e9),
            "eval_count": usage.output_tokens,
            "eval_duration": round(timings.forward_seconds * 1e9),
        }
        return encode_line({**self._head, **wrote, **rest})


ROUTES: Final = (
    Route(
        "POST",
        "/api/chat",
        OLLAMA,
        chat,
        "Generates a chat answer",
        OllamaChatRequest,
        OllamaGenerated,
        LINES,
    ),
    Route(
        "POST",
        "/api/generate",
        OLLAMA,
        generate,
        "Generates a text",
        OllamaGenerateRequest,
        OllamaGenerated,
        LINES,
    ),
)

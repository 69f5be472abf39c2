"""OpenAI's `POST /v1/chat/completions`, whole or as server-sent events, for models that write. Pure.

System messages, then those of user and assistant, the last of which is the user's: what a model's chat template is rendered with
here. Answers are greedy, or by the beams of the checkpoint: `temperature`, `top_p` and `seed`, which every client sends, are not
looked at. What else would change the text is refused. `created` is 0: nothing here reads a clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from shoal.transport.methods import EXTRACT, EXTRACT_STREAM
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.openai import OPENAI
from services.edge.dialects.writing.along import (
    Along,
    Asked,
    Told,
    conversation_of,
    is_cut,
    is_last,
    line_of,
)
from services.edge.messages.base import Answer, Problem, Question, Received, Route, Stream, invalid, json_of
from services.edge.messages.limits import MESSAGES, PARTS
from services.edge.messages.reading import priority_of, read, target

EVENTS: Final = b"text/event-stream; charset=utf-8"
_DONE: Final = b"data: [DONE]\n\n"


class ImageUrl(msgspec.Struct, kw_only=True):
    """`url`: a `data:` URI; addresses are not fetched."""

    url: str


class ContentPart(msgspec.Struct, kw_only=True):
    """`type`: text or image_url."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """`role`: system or developer, user, and assistant."""

    role: str
    content: str | Annotated[list[ContentPart], PARTS] | None = None
    # Only with values that change nothing.
    tool_calls: list[Any] | None = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage`: an event with the tokens comes last."""

    include_usage: bool | None = None


class NamedSchema(msgspec.Struct, kw_only=True):
    """`schema`: a JSON Schema of an object."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`type`: text or json_schema."""

    type: str
    json_schema: NamedSchema | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, and ours. Others are ignored."""

    model: str
    messages: Annotated[list[ChatMessage], MESSAGES]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Only with values that change nothing.
    n: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    repetition_penalty: float | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    best_of: int | None = None
    echo: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    chat_template: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    # Ours.
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class WrittenMessage(msgspec.Struct, kw_only=True):
    """What the model wrote."""

    role: Literal["assistant"]
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """`finish_reason`: whether the model ended the text, or it is as long as it may be."""

    index: int
    message: WrittenMessage
    finish_reason: Literal["stop", "length"]


class ChatUsage(msgspec.Struct, kw_only=True):
    """Tokens; those of images count as tokens of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(msgspec.Struct, kw_only=True):
    """One choice."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


def chat(received: Received) -> Question | Stream:
    """`POST /v1/chat/completions`. Raises Problem."""
    request = read(ChatRequest, received)
    _refuse_unsupported(request)
    asked = _asked(request, received)
    message = asked.request()
    message.adapter = request.adapter or message.adapter
    message.pool = request.pool or ""
    message.priority = priority_of(request.priority)
    head = {"id": f"chatcmpl-{received.request_id}", "created": 0, "model": request.model}
    if request.stream:
        events = _Events(head, with_usage=bool(request.stream_options and request.stream_options.include_usage))
        return Stream(EXTRACT_STREAM, message, events.tell, is_last, _failed, EVENTS, asked.fields())
    return Question(EXTRACT, message, lambda reply: _answer(head, reply), fields=asked.fields())


_GUIDES: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
"""vLLM's ways to ask for answers of a form."""
_TEMPLATE: Final = "the prompt is made by the checkpoint's chat template"
_OTHERS: Final = {
    "echo": "the answer is what the model writes",
    "ignore_eos": "the model's own end of a text is taken",
    "min_tokens": "the model's own end of a text is taken",
    "stop_token_ids": "the model's own end of a text is taken",
    "chat_template": _TEMPLATE,
    "continue_final_message": "the last message is the user's",
    "reasoning_effort": _TEMPLATE,
}


def _refuse_unsupported(request: ChatRequest) -> None:
    """What would change the text is refused, not ignored."""
    refusals = (
        (request.n not in (None, 1), "n", "n must be 1: answers are greedy, so another one would be the same"),
        (request.stop, "stop", "stop is not supported: the model's own end of a text is taken"),
        (
            request.frequency_penalty,
            "frequency_penalty",
            "frequency_penalty must be 0: repetition rules are the checkpoint's",
        ),
        (request.presence_penalty, "presence_penalty", "presence_penalty must be 0: repetition rules are the checkpoint's"),
        (
            request.repetition_penalty not in (None, 1),
            "repetition_penalty",
            "repetition_penalty must be 1: repetition rules are the checkpoint's",
        ),
        (request.logit_bias, "logit_bias", "logit_bias is not supported"),
        (request.best_of not in (None, 1), "best_of", "best_of must be 1: answers are greedy"),
        (request.modalities not in (None, [], ["text"]), "modalities", "modalities may have text alone"),
        (request.add_generation_prompt is False, "add_generation_prompt", "add_generation_prompt must be true"),
        *((getattr(request, name), name, f"{name} is not supported: ask for JSON by response_format") for name in _GUIDES),
        *((getattr(request, name), name, f"{name} is not supported: {why}") for name, why in _OTHERS.items()),
        (request.logprobs, "logprobs", "logprobs are not supported"),
        (request.tools, "tools", "tools are not supported: ask for JSON by response_format"),
        (request.functions, "functions", "functions are not supported: ask for JSON by response_format"),
    )
    for is_asked, field, message in refusals:
        if is_asked:
            raise invalid(message, field)


def _asked(request: ChatRequest, received: Received) -> Asked:
    said = [(message.role, _contents(message, f"messages[{place}]")) for place, message in enumerate(request.messages)]
    longest = (request.max_completion_tokens, "max_completion_tokens")
    if request.max_completion_tokens is None:
        longest = (request.max_tokens, "max_tokens")
    named, schema = target(received, request.model), _schema(request.response_format)
    return Asked(named, conversation_of(said), longest, schema, request.chat_template_kwargs)


def _contents(message: ChatMessage, field: str) -> list[Told]:
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise invalid(f"{field}.{name}: tools are not supported", f"{field}.{name}")
    if message.content is None:
        raise invalid(f"{field}.content is required", f"{field}.content")
    if isinstance(message.content, str):
        return [Told(message.content, f"{field}.content")]
    return [_content(part, f"{field}.content[{place}]") for place, part in enumerate(message.content)]


def _content(part: ContentPart, field: str) -> Told:
    if part.type == "text" and part.text is not None:
        return Told(part.text, f"{field}.text")
    if part.type == "image_url" and part.image_url is not None:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        return Told(url, f"{field}.image_url", is_image=True)
    raise invalid(f"{field} must be of type text, with text, or of type image_url, with image_url", field)


def _schema(asked: ResponseFormat | None) -> tuple[dict[str, Any] | None, str]:
    if asked is None or asked.type == "text":
        return None, ""
    field = "response_format.json_schema.schema"
    if asked.type == "json_schema" and asked.json_schema is not None and asked.json_schema.schema is not None:
        return asked.json_schema.schema, field
    raise invalid("response_format must be of type text, or of type json_schema with json_schema.schema", "response_format")


def _usage(usage: pb.Usage) -> dict[str, int]:
    total = usage.input_tokens + usage.output_tokens
    return {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens, "total_tokens": total}


def _reason(result: pb.Extraction) -> str:
    return "length" if is_cut(result) else "stop"


def _answer(head: dict[str, Any], reply: pb.ExtractResponse) -> Answer:
    result = reply.results[0]
    choice = {"index": 0, "message": {"role": "assistant", "content": result.text}, "finish_reason": _reason(result)}
    return Answer(json_of({**head, "object": "chat.completion", "choices": [choice], "usage": _usage(reply.usage)}))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + line_of(content) + b"\n\n"


def _failed(problem: Problem) -> bytes:
    """An event that OpenAI's clients raise. No [DONE] follows."""
    body = OPENAI.error(problem).body
    return b"data: " + body + b"\n\n" if isinstance(body, bytes) else b""


class _Events:
    """The events of one answer."""

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._head = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if with_usage else {})
        self._with_usage = with_usage
        self._along = Along()
        self._has_begun = False

    def tell(self, reply: pb.ExtractStreamResponse) -> bytes:
        """Raises Problem."""
        if not reply.HasField("response"):
            return self._said(self._along.more(reply.deltas))
        result = reply.response.results[0]
        said = self._said(self._along.rest(result.text))
        end = self._chunk({}, _reason(result))
        usage = _event({**self._head, "choices": [], "usage": _usage(reply.response.usage)}) if self._with_usage else b""
        return said + end + usage + _DONE

    def _said(self, text: str) -> bytes:
        begin = b"" if self._has_begun else self._chunk({"role": "assistant", "content": ""})
        self._has_begun = True
        return begin + (self._chunk({"content": text}) if text else b"")

    def _chunk(self, delta: dict[str, str], reason: str | None = None) -> bytes:
        return _event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


ROUTES: Final = tuple(
    Route("POST", path, OPENAI, chat, "Has a model write an answer", ChatRequest, ChatAnswer, EVENTS)
    for path in ("/v1/chat/completions", "/chat/completions", "/openai/v1/chat/completions")
)

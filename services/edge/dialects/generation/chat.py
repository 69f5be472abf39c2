"""OpenAI's `POST /v1/chat/completions` for generative models, whole or as server-sent events. Pure.

System messages are followed by those of user and assistant, ending with the user's; they are
rendered by the model's chat template. Unsupported fields that would change the text are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from shoal.transport.methods import EXTRACT, EXTRACT_STREAM
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.generation.choices import (
    MAX_TOP_LOGPROBS,
    AnswerChoices,
    count_of_answers,
    list_stops,
    sampling_fields,
)
from services.edge.dialects.generation.common import (
    TOOL,
    GenerationRequest,
    MessageContent,
    StreamedText,
    Tools,
    build_conversation,
    encode_line,
    is_cut,
    is_last,
)
from services.edge.dialects.openai import OPENAI
from services.edge.messages.base import (
    Answer,
    HttpError,
    MeshCall,
    Received,
    Route,
    StreamedCall,
    encode_json,
    invalid,
)
from services.edge.messages.limits import MESSAGES, PARTS
from services.edge.messages.reading import read, read_priority, target

EVENTS: Final = b"text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"


class ImageUrl(msgspec.Struct, kw_only=True):
    """`url` is a `data:` URI; addresses are not fetched."""

    url: str


class ContentPart(msgspec.Struct, kw_only=True):
    """`type` is text or image_url."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """`arguments` is a JSON object as text."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, kw_only=True):
    """A call that the model made. Supported chat templates do not use `id`."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """`role` is system or developer, user, assistant, or tool (a function's result)."""

    role: str
    content: str | Annotated[list[ContentPart], PARTS] | None = None
    tool_calls: list[CalledTool] | None = None
    # Accepted only with values that have no effect.
    function_call: Any = None


class ChatStreamOptions(msgspec.Struct, kw_only=True):
    """`include_usage` adds a last event with the token counts."""

    include_usage: bool | None = None


class NamedSchema(msgspec.Struct, kw_only=True):
    """`schema` is a JSON Schema of an object."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`type` is text, json_object or json_schema."""

    type: str
    json_schema: NamedSchema | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields and Shoal's. Others are ignored."""

    model: str
    messages: Annotated[list[ChatMessage], MESSAGES]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Accepted only with values that have no effect.
    logit_bias: dict[str, float] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    prediction: Any = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logits_processors: Any = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
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
    # Shoal's.
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class GeneratedMessage(msgspec.Struct, kw_only=True):
    """The generated message. `content` is null if the model called functions."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    """A candidate token. `bytes` is null if it is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class GeneratedToken(msgspec.Struct, kw_only=True):
    """A generated token and the most likely candidates."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True):
    """The tokens of a choice."""

    content: list[GeneratedToken]


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer. `finish_reason` is stop, tool_calls, or length for the maximum number of
    tokens.
    """

    index: int
    message: GeneratedMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChoiceLogprobs | None = None


class ChatUsage(msgspec.Struct, kw_only=True):
    """Token counts; the prompt's include those of images."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The answer with `n` choices."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


def chat(received: Received) -> MeshCall | StreamedCall:
    """`POST /v1/chat/completions`. Raises HttpError."""
    request = read(ChatRequest, received)
    _refuse_unsupported(request)
    asked = _asked(request, received)
    message = asked.request()
    message.adapter = request.adapter or message.adapter
    message.pool = request.pool or ""
    message.priority = read_priority(request.priority)
    head = {
        "id": f"chatcmpl-{received.request_id}",
        "created": received.received_at,
        "model": request.model,
    }
    if request.stream:
        usage = bool(request.stream_options and request.stream_options.include_usage)
        events = _Events(head, asked.choices.count, with_usage=usage)
        return StreamedCall(
            EXTRACT_STREAM, message, events.render, is_last, error_event, EVENTS, asked.fields()
        )
    return MeshCall(
        EXTRACT,
        message,
        lambda reply: _to_answer(head, reply, asked.choices.count),
        fields=asked.fields(),
        prompt_copies=asked.choices.count,
    )


_GUIDES: Final = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)
"""vLLM's fields for structured output."""
_TEMPLATE: Final = "the checkpoint's chat template renders the prompt"
_OTHERS: Final = {
    "echo": "only generated text is returned",
    "ignore_eos": "a text ends at the model's end token",
    "min_tokens": "a text ends at the model's end token",
    "stop_token_ids": "a text ends at the model's end token",
    "chat_template": _TEMPLATE,
    "continue_final_message": "the last message must be the user's",
    "reasoning_effort": _TEMPLATE,
    "prediction": "the model generates the whole answer",
    "audio": "answers are texts",
    "web_search_options": "the model reads only the messages",
    "verbosity": _TEMPLATE,
    "use_beam_search": "the checkpoint determines the number of beams",
    "bad_words": "state it in the messages",
    "allowed_token_ids": "use response_format for JSON",
    "logits_processors": "use response_format for JSON",
    "include_stop_str_in_output": "an answer ends before a stop string",
    "truncate_prompt_tokens": "shorten the messages",
    "prompt_logprobs": "logprobs are available for the answer only",
}


def _refuse_unsupported(request: ChatRequest) -> None:
    """Refuse fields that would change the text, instead of ignoring them."""
    refusals = (
        (request.logit_bias, "logit_bias", "logit_bias is not supported: omit it"),
        (
            request.length_penalty not in (None, 1),
            "length_penalty",
            "length_penalty must be 1: beam search is not supported",
        ),
        (
            request.top_logprobs and not request.logprobs,
            "top_logprobs",
            "top_logprobs requires logprobs to be true",
        ),
        (
            request.modalities not in (None, [], ["text"]),
            "modalities",
            "modalities may only contain text",
        ),
        (
            request.add_generation_prompt is False,
            "add_generation_prompt",
            "add_generation_prompt must be true",
        ),
        *(
            (
                getattr(request, name),
                name,
                f"{name} is not supported: use response_format for JSON",
            )
            for name in _GUIDES
        ),
        *(
            (getattr(request, name), name, f"{name} is not supported: {why}")
            for name, why in _OTHERS.items()
        ),
        (request.functions, "functions", "functions is not supported: use tools"),
        (
            request.function_call,
            "function_call",
            "function_call is not supported: use tool_choice",
        ),
    )
    for is_asked, field, message in refusals:
        if is_asked:
            raise invalid(message, field)


def _asked(request: ChatRequest, received: Received) -> GenerationRequest:
    contents = [
        (message.role, _contents(message, f"messages[{place}]"))
        for place, message in enumerate(request.messages)
    ]
    max_tokens = (request.max_completion_tokens, "max_completion_tokens")
    if request.max_completion_tokens is None:
        max_tokens = (request.max_tokens, "max_tokens")
    named, schema = target(received, request.model), _schema(request.response_format)
    calls = {
        place: _calls(message)
        for place, message in enumerate(request.messages)
        if message.tool_calls
    }
    choices = AnswerChoices(
        sampling_fields(request),
        seed=request.seed,
        stop=list_stops(request.stop),
        count=count_of_answers(request.n, request.best_of),
        top_logprobs=_top_logprobs(request),
    )
    return GenerationRequest(
        named,
        build_conversation(contents, calls),
        max_tokens,
        schema,
        request.chat_template_kwargs,
        choices,
        _tools(request),
    )


def _top_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        return None
    count = request.top_logprobs or 0
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise invalid(
            f"top_logprobs is {count}; it must be within 0 and {MAX_TOP_LOGPROBS}", "top_logprobs"
        )
    return count


def _calls(message: ChatMessage) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def _tools(request: ChatRequest) -> Tools:
    single = request.parallel_tool_calls is False
    match request.tool_choice:
        case None | "auto":
            return Tools(request.tools or (), single=single)
        case "none":
            return Tools()
        case "required":
            return Tools(request.tools or (), required=True, single=single)
        case {"type": "function", "function": {"name": str(name)}}:
            return Tools(request.tools or (), required=True, name=name, single=True)
    message = (
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}'
    )
    raise invalid(message, "tool_choice")


def _contents(message: ChatMessage, field: str) -> list[MessageContent]:
    if message.function_call:
        raise invalid(
            f"{field}.function_call is not supported: send tool_calls", f"{field}.function_call"
        )
    if message.content is None and message.tool_calls:
        return []
    if message.role == TOOL and not message.content:  # a function may return nothing
        return [MessageContent("", f"{field}.content")]
    if message.content is None:
        raise invalid(f"{field}.content is required", f"{field}.content")
    if isinstance(message.content, str):
        return [MessageContent(message.content, f"{field}.content")]
    return [
        _content(part, f"{field}.content[{place}]") for place, part in enumerate(message.content)
    ]


def _content(part: ContentPart, field: str) -> MessageContent:
    if part.type == "text" and part.text is not None:
        return MessageContent(part.text, f"{field}.text")
    if part.type == "image_url" and part.image_url is not None:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        return MessageContent(url, f"{field}.image_url", is_image=True)
    raise invalid(f"{field} must have type text with text, or type image_url with image_url", field)


def _schema(asked: ResponseFormat | None) -> tuple[dict[str, Any] | None, str]:
    if asked is None or asked.type == "text":
        return None, ""
    if asked.type == "json_object":
        return {"type": "object"}, "response_format"
    field = "response_format.json_schema.schema"
    if (
        asked.type == "json_schema"
        and asked.json_schema is not None
        and asked.json_schema.schema is not None
    ):
        return asked.json_schema.schema, field
    raise invalid(
        (
            "response_format must have type text or json_object, or json_schema with "
            "json_schema.schema"
        ),
        "response_format",
    )


def usage_fields(usage: pb.Usage, choices: int) -> dict[str, int]:
    """Return OpenAI's usage, which counts a prompt once however many choices answer it: `choices`.
    The mesh gets a copy of the prompt for each.
    """
    prompts = usage.input_tokens // choices
    return {
        "prompt_tokens": prompts,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompts + usage.output_tokens,
    }


def _reason(result: pb.Extraction) -> str:
    if is_cut(result):
        return "length"
    return "tool_calls" if result.tool_calls else "stop"


def _to_answer(head: dict[str, Any], reply: pb.ExtractResponse, count: int) -> Answer:
    choices = [_choice(head["id"], index, result) for index, result in enumerate(reply.results)]
    return Answer(
        encode_json(
            {
                **head,
                "object": "chat.completion",
                "choices": choices,
                "usage": usage_fields(reply.usage, count),
            }
        )
    )


def _choice(answer_id: str, index: int, result: pb.Extraction) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text}
    if result.tool_calls:
        message = {
            "role": "assistant",
            "content": result.text or None,
            "tool_calls": _called(answer_id, index, result),
        }
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(result),
        "finish_reason": _reason(result),
    }


def _called(answer_id: str, index: int, result: pb.Extraction) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call-{answer_id.removeprefix('chatcmpl-')}-{index}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(result.tool_calls)
    ]


def _logprobs(result: pb.Extraction) -> dict[str, Any] | None:
    if not result.tokens:
        return None
    return {
        "content": [
            {**_token(one), "top_logprobs": [_token(top) for top in one.top]}
            for one in result.tokens
        ]
    }


def _token(token: pb.TokenLogprob) -> dict[str, Any]:
    is_whole = "\ufffd" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if is_whole else None,
    }


def encode_event(content: dict[str, Any]) -> bytes:
    return b"data: " + encode_line(content) + b"\n\n"


def error_event(problem: HttpError) -> bytes:
    """Return an event that OpenAI's clients raise. It is not followed by [DONE]."""
    body = OPENAI.error(problem).body
    return b"data: " + body + b"\n\n" if isinstance(body, bytes) else b""


class _Events:
    """The events of `count` choices. Tool calls and log probabilities are in a choice's last
    events.
    """

    def __init__(self, head: dict[str, Any], count: int, *, with_usage: bool) -> None:
        self._head = {**head, "object": "chat.completion.chunk"} | (
            {"usage": None} if with_usage else {}
        )
        self._with_usage = with_usage
        self._streamed = [StreamedText() for _ in range(count)]
        self._has_begun = [False] * count

    def render(self, reply: pb.ExtractStreamResponse) -> bytes:
        """Return the events of a reply. Raises HttpError."""
        if not reply.HasField("response"):
            deltas: dict[int, list[pb.ExtractDelta]] = {}
            for delta in reply.deltas:
                deltas.setdefault(delta.item, []).append(delta)
            return b"".join(
                self._text_chunk(index, self._streamed[index].next_text(own))
                for index, own in deltas.items()
            )
        ends = b"".join(
            self._end(index, result) for index, result in enumerate(reply.response.results)
        )
        usage = (
            encode_event({**self._head, "choices": [], "usage": self._usage(reply.response)})
            if self._with_usage
            else b""
        )
        return ends + usage + DONE

    def _usage(self, response: pb.ExtractResponse) -> dict[str, int]:
        return usage_fields(response.usage, len(self._streamed))

    def _end(self, index: int, result: pb.Extraction) -> bytes:
        found = self._text_chunk(index, self._streamed[index].remaining_text(result.text))
        for number, call in enumerate(_called(self._head["id"], index, result)):
            begun = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
            rest = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
            found += self._chunk(index, {"tool_calls": [begun]}) + self._chunk(
                index, {"tool_calls": [rest]}
            )
        return found + self._chunk(index, {}, _reason(result), _logprobs(result))

    def _text_chunk(self, index: int, text: str) -> bytes:
        begin = (
            b""
            if self._has_begun[index]
            else self._chunk(index, {"role": "assistant", "content": ""})
        )
        self._has_begun[index] = True
        return begin + (self._chunk(index, {"content": text}) if text else b"")

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": reason} | (
            {"logprobs": logprobs} if logprobs else {}
        )
        return encode_event({**self._head, "choices": [choice]})


ROUTES: Final = tuple(
    Route("POST", path, OPENAI, chat, "Generates a chat answer", ChatRequest, ChatAnswer, EVENTS)
    for path in ("/v1/chat/completions", "/chat/completions", "/openai/v1/chat/completions")
)

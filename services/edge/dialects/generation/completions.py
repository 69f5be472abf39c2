"""OpenAI's `POST /v1/completions`, whole or as server-sent events, for prompts without a chat
template. Pure.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from shoal.transport.methods import EXTRACT, EXTRACT_STREAM
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.generation.chat import (
    DONE,
    EVENTS,
    ChatStreamOptions,
    ChatUsage,
    encode_event,
    error_event,
    usage_fields,
)
from services.edge.dialects.generation.choices import (
    AnswerChoices,
    count_of_answers,
    list_stops,
    sampling_fields,
)
from services.edge.dialects.generation.common import MAX_TOKENS, StreamedText, is_cut, is_last
from services.edge.dialects.openai import OPENAI
from services.edge.messages.base import (
    Answer,
    Fields,
    MeshCall,
    Received,
    Route,
    StreamedCall,
    encode_json,
    invalid,
    single_field,
)
from services.edge.messages.reading import read, read_count, read_priority, target, text_item

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default."""
MAX_PROMPTS: Final = 128
MAX_LOGPROBS: Final = 20


class CompletionRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields and Shoal's. `prompt` is one or several texts; token ids are not supported.
    Others are ignored.
    """

    model: str
    prompt: str | list[Any]
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
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
    logprobs: int | None = None
    # Accepted only with values that have no effect.
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    # Shoal's.
    adapter: str | None = None
    pool: str | None = None
    priority: str | int | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """`text_offset` is each token's position in the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """Choice `index` is answer `index % n` to prompt `index // n`."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The answer with `n` choices per prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage


def complete(received: Received) -> MeshCall | StreamedCall:
    """`POST /v1/completions`. Raises HttpError."""
    request = read(CompletionRequest, received)
    for name in ("echo", "suffix", "logit_bias"):
        if getattr(request, name):
            raise invalid(
                f"{name} is not supported: an answer continues the prompt, so omit it",
                name,
            )
    most = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if most > MAX_TOKENS:
        raise invalid(f"max_tokens is {most}; it must be at most {MAX_TOKENS:,}", "max_tokens")
    if request.logprobs is not None and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise invalid(
            f"logprobs is {request.logprobs}; it must be within 0 and {MAX_LOGPROBS}", "logprobs"
        )
    choices = AnswerChoices(
        sampling_fields(request),
        {"top_logprobs": "logprobs"},
        seed=request.seed,
        stop=list_stops(request.stop),
        count=count_of_answers(request.n, request.best_of),
        top_logprobs=request.logprobs,
    )
    task = pb.TextTask(max_tokens=read_count(most, "max_tokens"), raw_prompt=True)
    choices.fill(task)
    named, items = target(received, request.model), choices.items(_prompts(request))
    message = pb.ExtractRequest(
        model=named.model,
        items=items,
        text=task,
        adapter=request.adapter or named.adapter,
        pool=request.pool or "",
        priority=read_priority(request.priority),
    )
    fields: Fields = {
        **single_field("items", "prompt"),
        "text.max_tokens": "max_tokens",
        "text.raw_prompt": "prompt",
        **choices.fields(),
    }
    head = {
        "id": f"cmpl-{received.request_id}",
        "object": "text_completion",
        "created": received.received_at,
        "model": request.model,
    }
    if request.stream:
        usage = bool(request.stream_options and request.stream_options.include_usage)
        events = _Events(head, len(items), choices.count, with_usage=usage)
        return StreamedCall(
            EXTRACT_STREAM, message, events.render, is_last, error_event, EVENTS, fields
        )
    return MeshCall(
        EXTRACT,
        message,
        lambda reply: _to_answer(head, reply, choices.count),
        fields=fields,
        prompt_copies=choices.count,
    )


def _prompts(request: CompletionRequest) -> list[pb.Item]:
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid(f"prompt has {len(prompts)} texts; 1..{MAX_PROMPTS} are allowed", "prompt")
    found = []
    for place, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise invalid("prompt is token ids, which are not supported: send text", "prompt")
        found.append(
            text_item(prompt, "prompt" if isinstance(request.prompt, str) else f"prompt[{place}]")
        )
    return found


def _reason(result: pb.Extraction) -> str:
    return "length" if is_cut(result) else "stop"


def _logprobs(result: pb.Extraction) -> dict[str, Any] | None:
    if not result.tokens:
        return None
    offsets, place = [], 0
    for token in result.tokens:
        offsets.append(place)
        place += len(token.text)
    return {
        "tokens": [token.text for token in result.tokens],
        "token_logprobs": [token.logprob for token in result.tokens],
        "top_logprobs": [{top.text: top.logprob for top in token.top} for token in result.tokens],
        "text_offset": offsets,
    }


def _to_answer(head: dict[str, Any], reply: pb.ExtractResponse, count: int) -> Answer:
    """Return the answer. `count`: The answers of each prompt."""
    choices = [
        {
            "index": index,
            "text": result.text,
            "finish_reason": _reason(result),
            "logprobs": _logprobs(result),
        }
        for index, result in enumerate(reply.results)
    ]
    return Answer(
        encode_json({**head, "choices": choices, "usage": usage_fields(reply.usage, count)})
    )


class _Events:
    """The events of the choices of all prompts."""

    def __init__(self, head: dict[str, Any], choices: int, count: int, *, with_usage: bool) -> None:
        """`count`: The answers of each prompt."""
        self._count = count
        self._head, self._with_usage = head | ({"usage": None} if with_usage else {}), with_usage
        self._streamed = [StreamedText() for _ in range(choices)]

    def render(self, reply: pb.ExtractStreamResponse) -> bytes:
        """Return the events of a reply. Raises HttpError."""
        if not reply.HasField("response"):
            pieces = (
                (delta.item, self._streamed[delta.item].next_text([delta]))
                for delta in reply.deltas
            )
            return b"".join(self._chunk(index, text) for index, text in pieces if text)
        results = enumerate(reply.response.results)
        ends = b"".join(
            self._chunk(
                index,
                self._streamed[index].remaining_text(result.text),
                _reason(result),
                _logprobs(result),
            )
            for index, result in results
        )
        usage = (
            encode_event({**self._head, "choices": [], "usage": self._usage(reply.response)})
            if self._with_usage
            else b""
        )
        return ends + usage + DONE

    def _usage(self, response: pb.ExtractResponse) -> dict[str, int]:
        return usage_fields(response.usage, self._count)

    def _chunk(
        self,
        index: int,
        text: str,
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        return encode_event(
            {
                **self._head,
                "choices": [
                    {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}
                ],
            }
        )


ROUTES: Final = tuple(
    Route(
        "POST",
        path,
        OPENAI,
        complete,
        "Continues a text",
        CompletionRequest,
        CompletionAnswer,
        EVENTS,
    )
    for path in ("/v1/completions", "/completions", "/openai/v1/completions")
)

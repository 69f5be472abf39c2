"""Tokens of texts and texts of tokens, in the forms of TEI, vLLM and Cohere. Pure.

TEI and vLLM share the path `/tokenize`: a request of vLLM has `prompt` or `messages`, one of TEI
`inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from shoal.transport.methods import DETOKENIZE, TOKENIZE
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects import openai
from services.edge.dialects.cohere import COHERE
from services.edge.dialects.tei import TEI, path_target, timing_headers
from services.edge.messages.base import (
    Answer,
    Fields,
    HttpError,
    MeshCall,
    Received,
    Route,
    encode_json,
    invalid,
)
from services.edge.messages.limits import IDS, ITEMS, check_items
from services.edge.messages.pieces import build_body, encode_list
from services.edge.messages.reading import named_or_default, read

_ID_MOST: Final = (1 << 32) - 1


class TokenizeIn(msgspec.Struct, kw_only=True):
    """TEI's form has `inputs`, vLLM's `prompt`."""

    inputs: str | Annotated[list[str], ITEMS] | None = None
    prompt_name: str | None = None
    # vLLM.
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    return_token_strs: bool | None = None
    # Both.
    add_special_tokens: bool | None = None


class DecodeIn(msgspec.Struct, kw_only=True):
    """The ids of one text, or of several."""

    ids: Annotated[list[int | Annotated[list[int], IDS]], IDS]
    skip_special_tokens: bool | None = None


class DetokenizeIn(msgspec.Struct, kw_only=True):
    """The form of vLLM, and of Cohere's `/v1/detokenize`."""

    tokens: Annotated[list[int], IDS]
    model: str | None = None


class CohereTokenizeIn(msgspec.Struct, kw_only=True):
    """Cohere's form. Its limit is 65,536 characters."""

    text: str
    model: str | None = None


class SimpleToken(msgspec.Struct, kw_only=True):
    """A token in TEI's form. `start` and `stop` are byte offsets in UTF-8; null for special
    tokens.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokenized(msgspec.Struct, kw_only=True):
    """The answer in vLLM's form."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, kw_only=True):
    """The answer in vLLM's form."""

    prompt: str


class CohereTokens(msgspec.Struct, kw_only=True):
    """Cohere's answer."""

    tokens: list[int]
    token_strings: list[str]
    meta: dict[str, Any]


class CohereText(msgspec.Struct, kw_only=True):
    """Cohere's answer."""

    text: str
    meta: dict[str, Any]


_META: Final = {"api_version": {"version": "1"}}


class _Peek(msgspec.Struct):
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def tokenize(received: Received) -> MeshCall:
    """`/tokenize` of TEI and vLLM. Raises HttpError."""
    if not _is_vllm(received.body):
        return _tei_tokenize(received)
    try:
        return _vllm_tokenize(received)
    except HttpError as problem:
        problem.dialect = openai.OPENAI
        raise


def decode(received: Received) -> MeshCall:
    """TEI's `/decode`. Raises HttpError."""
    request = read(DecodeIn, received)
    batch = [one for one in request.ids if isinstance(one, list)]
    alone = [one for one in request.ids if isinstance(one, int)]
    if batch and alone:
        raise invalid("ids must be one list of ids, or a list of lists", "ids")
    is_batch = bool(batch)
    check_items(batch, "ids")
    message = pb.DetokenizeRequest(
        model=path_target(received, "embed").model,
        sequences=[_ids(one, f"ids[{index}]") for index, one in enumerate(batch)]
        if is_batch
        else [_ids(alone, "ids")],
        skip_special_tokens=request.skip_special_tokens is not False,
    )

    def convert(reply: pb.DetokenizeResponse) -> Answer:
        return Answer(
            encode_json(list(reply.texts)),
            headers=timing_headers(reply.timings, reply.usage, message),
        )

    return MeshCall(
        DETOKENIZE, message, convert, fields=_sequence_fields("ids", is_batch=is_batch), dialect=TEI
    )


def detokenize(received: Received) -> MeshCall:
    """Serve vLLM's `/detokenize`. Raises HttpError."""
    request = read(DetokenizeIn, received)
    named = named_or_default(received, request.model or received.model, "embed")
    message = pb.DetokenizeRequest(model=named.model, sequences=[_ids(request.tokens, "tokens")])
    fields = _sequence_fields("tokens", is_batch=False)
    return MeshCall(
        DETOKENIZE,
        message,
        lambda reply: Answer(encode_json({"prompt": reply.texts[0]})),
        fields=fields,
    )


def cohere_tokenize(received: Received) -> MeshCall:
    """Cohere's `/v1/tokenize`, which adds no special tokens. Raises HttpError."""
    request = read(CohereTokenizeIn, received)
    named = named_or_default(received, request.model, "embed")
    message = pb.TokenizeRequest(model=named.model, texts=[request.text], add_special_tokens=False)

    def parts(reply: pb.TokenizeResponse) -> Iterator[bytes]:
        found = reply.results[0]
        yield b'{"tokens":'
        yield from encode_list(found.ids)
        yield b',"token_strings":'
        yield from encode_list(
            request.text[start:end] for start, end in zip(found.starts, found.ends, strict=True)
        )
        yield b',"meta":' + encode_json(_META) + b"}"

    def convert(reply: pb.TokenizeResponse) -> Answer:
        check_results([request.text], reply)
        return Answer(build_body(parts(reply), len(reply.results[0].ids)), in_thread=True)

    return MeshCall(
        TOKENIZE, message, convert, fields=_text_fields("text", is_batch=False), in_thread=True
    )


def cohere_detokenize(received: Received) -> MeshCall:
    """Cohere's `/v1/detokenize`. Raises HttpError."""
    request = read(DetokenizeIn, received)
    named = named_or_default(received, request.model, "embed")
    message = pb.DetokenizeRequest(model=named.model, sequences=[_ids(request.tokens, "tokens")])

    def convert(reply: pb.DetokenizeResponse) -> Answer:
        return Answer(encode_json({"text": reply.texts[0], "meta": _META}))

    return MeshCall(DETOKENIZE, message, convert, fields=_sequence_fields("tokens", is_batch=False))


def tei_tokens(text: str, found: pb.Tokenization) -> Iterator[dict[str, Any]]:
    """Yield the tokens of a text in TEI's form: a token's text is its part of the text, a special
    token's its name.
    """
    places = _byte_places(text)
    after = len(found.ids) - found.special_after
    for place, (token, start, end) in enumerate(
        zip(found.ids, found.starts, found.ends, strict=True)
    ):
        if found.special_before <= place < after:
            first, last = (start, end) if places is None else (int(places[start]), int(places[end]))
            yield {
                "id": token,
                "text": text[start:end],
                "special": False,
                "start": first,
                "stop": last,
            }
        else:
            name = found.tokens[place] if found.tokens else ""
            yield {"id": token, "text": name, "special": True, "start": None, "stop": None}


def check_results(texts: Sequence[str], reply: pb.TokenizeResponse) -> None:
    """Raise HttpError unless each text has a result with all tokens within it. Answers are written
    after their status was sent, so faults must be found first.
    """
    if len(reply.results) != len(texts):
        raise HttpError(
            "INTERNAL",
            f"the mesh answered {len(texts)} texts with the tokens of {len(reply.results)}",
        )
    for text, found in zip(texts, reply.results, strict=True):
        if {len(found.starts), len(found.ends)} != {len(found.ids)} or max(
            found.ends, default=0
        ) > len(text):
            raise HttpError(
                "INTERNAL",
                (
                    "the mesh answered a text with tokens that have no places, or places beyond "
                    "the text"
                ),
            )


def _tei_tokenize(received: Received) -> MeshCall:
    request = read(TokenizeIn, received)
    if request.inputs is None:
        raise invalid("inputs is required, or prompt for vLLM's form", "inputs")
    if request.prompt_name:
        raise invalid("prompt_name is not supported: put the prompt before the text", "prompt_name")
    is_batch = not isinstance(request.inputs, str)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    special = request.add_special_tokens is not False
    message = pb.TokenizeRequest(
        model=path_target(received, "embed").model,
        texts=texts,
        add_special_tokens=special,
        return_tokens=special,  # names of special tokens
    )

    def parts(reply: pb.TokenizeResponse) -> Iterator[bytes]:
        begin = b"["
        for text, found in zip(texts, reply.results, strict=True):
            yield begin
            yield from encode_list(tei_tokens(text, found))
            begin = b","
        yield b"]"

    def convert(reply: pb.TokenizeResponse) -> Answer:
        check_results(texts, reply)
        body = build_body(parts(reply), sum(len(one.ids) for one in reply.results))
        return Answer(
            body, headers=timing_headers(reply.timings, reply.usage, message), in_thread=True
        )

    fields = _text_fields("inputs", is_batch=is_batch)
    return MeshCall(TOKENIZE, message, convert, fields=fields, dialect=TEI, in_thread=True)


def _vllm_tokenize(received: Received) -> MeshCall:
    request = read(TokenizeIn, received)
    if request.messages is not None:
        raise invalid(
            (
                "messages are not supported, because no chat template is applied: send the whole "
                "prompt"
            ),
            "messages",
        )
    if request.prompt is None:
        raise invalid("prompt is required", "prompt")
    named = named_or_default(received, request.model or received.model, "embed")
    message = pb.TokenizeRequest(
        model=named.model,
        texts=[request.prompt],
        add_special_tokens=request.add_special_tokens is not False,
        return_tokens=bool(request.return_token_strs),
    )

    def parts(reply: pb.TokenizeResponse) -> Iterator[bytes]:
        found = reply.results[0]
        yield (
            encode_json({"count": found.count, "max_model_len": reply.max_tokens})[:-1]
            + b',"tokens":'
        )
        yield from encode_list(found.ids)
        yield b',"token_strs":'
        yield from encode_list(found.tokens) if request.return_token_strs else (b"null",)
        yield b"}"

    def convert(reply: pb.TokenizeResponse) -> Answer:
        check_results(message.texts, reply)
        return Answer(build_body(parts(reply), len(reply.results[0].ids)), in_thread=True)

    fields = _text_fields("prompt", is_batch=False)
    return MeshCall(
        TOKENIZE, message, convert, fields=fields, dialect=openai.OPENAI, in_thread=True
    )


def _is_vllm(body: bytes) -> bool:
    """Return whether a body for `/tokenize` has vLLM's form."""
    if b'"prompt"' not in body and b'"messages"' not in body:
        return False
    try:
        found = msgspec.json.decode(body, type=_Peek)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b'"inputs"' not in body  # the parser reports the error in the dialect's form
    return found.inputs is msgspec.UNSET and (
        found.prompt is not msgspec.UNSET or found.messages is not msgspec.UNSET
    )


def _ids(given: Sequence[int], field: str) -> pb.TokenIds:
    wrong = next((index for index, number in enumerate(given) if not 0 <= number <= _ID_MOST), None)
    if wrong is not None:
        raise invalid(
            f"{field}[{wrong}] is {given[wrong]}, which is not a valid token id",
            f"{field}[{wrong}]",
        )
    return pb.TokenIds(ids=given)


def _byte_places(text: str) -> NDArray[np.int64] | None:
    """Return the byte offset of each character in UTF-8, and of the end. None if they equal the
    character offsets.
    """
    if text.isascii():
        return None
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])


def _text_fields(given: str, *, is_batch: bool) -> Fields:
    return {"texts[]": f"{given}[]" if is_batch else given, "texts": given}


def _sequence_fields(given: str, *, is_batch: bool) -> Fields:
    if is_batch:
        return {
            "sequences[].ids[]": f"{given}[][]",
            "sequences[]": f"{given}[]",
            "sequences": given,
        }
    return {
        "sequences[].ids[]": lambda index: f"{given}[{index}]",
        "sequences[]": given,
        "sequences": given,
    }


_TOKENIZED: Final = (list[list[SimpleToken]], Tokenized)
ROUTES: Final = (
    *(
        Route(
            "POST",
            f"{start}/tokenize",
            TEI,
            tokenize,
            "Returns the tokens of texts",
            TokenizeIn,
            _TOKENIZED,
        )
        for start in ("/tei/{model}", "")
    ),
    *(
        Route(
            "POST",
            f"{start}/decode",
            TEI,
            decode,
            "Returns the texts of tokens",
            DecodeIn,
            list[str],
        )
        for start in ("/tei/{model}", "")
    ),
    Route(
        "POST",
        "/detokenize",
        openai.OPENAI,
        detokenize,
        "Returns the text of tokens",
        DetokenizeIn,
        Detokenized,
    ),
    Route(
        "POST",
        "/v1/tokenize",
        COHERE,
        cohere_tokenize,
        "Returns the tokens of a text",
        CohereTokenizeIn,
        CohereTokens,
    ),
    Route(
        "POST",
        "/v1/detokenize",
        COHERE,
        cohere_detokenize,
        "Returns the text of tokens",
        DetokenizeIn,
        CohereText,
    ),
)

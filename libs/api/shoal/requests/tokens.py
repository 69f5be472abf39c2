"""The plans of `tokenize` and `detokenize`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from shoal.errors import InvalidInput
from shoal.options import CallOptions
from shoal.requests import codec
from shoal.requests.merging import merge_detokenize, merge_tokenize
from shoal.requests.plan import RequestPlan, SingleReply, request_frame
from shoal.tasks import Truncation
from shoal.tokens import DetokenizeResult, TokenIds, TokenizeResult
from shoal.transport.methods import DETOKENIZE, TOKENIZE
from shoal.v1 import inference_pb2 as pb

_ID_LENGTH: Final = 8
"""Characters that an id counts as, so that a request of the usual size has no more ids than routers
allow, 131,072.
"""
_NAMED_LENGTH: Final = 2
"""Factor of a text's length if its tokens are returned by name: the answer takes 20 bytes for each
byte, not 12.
"""


class TokenizePlan(RequestPlan[pb.TokenizeRequest, pb.TokenizeResponse, TokenizeResult]):
    """A call of `tokenize`. Raises InvalidInput for arguments that no request can hold."""

    method, name = TOKENIZE, "texts"

    def __init__(
        self,
        texts: str | Sequence[str],
        model: str,
        options: CallOptions,
        *,
        truncation: Truncation | None,
        special: bool,
        count_only: bool,
        names: bool,
    ) -> None:
        self._frame = request_frame(
            pb.TokenizeRequest,
            model,
            {**options, "truncation": truncation},
            add_special_tokens=special,
            count_only=count_only,
            return_tokens=names,
        )
        self._texts = [texts] if isinstance(texts, str) else list(texts)
        for index, text in enumerate(self._texts):
            if not isinstance(text, str):
                raise InvalidInput(
                    f"texts[{index}] is a {type(text).__name__}, not a text",
                    field=f"texts[{index}]",
                )
        longer = _NAMED_LENGTH if names else 1
        # In bytes, by which routers bound the answer.
        lengths = [len(text.encode("utf-8", "replace")) * longer for text in self._texts]
        super().__init__(lengths, None, repeated_bytes=self._frame.ByteSize())

    def build(self, places: Sequence[int]) -> pb.TokenizeRequest:
        request = pb.TokenizeRequest()
        request.CopyFrom(self._frame)
        for place in places:
            try:
                request.texts.append(self._texts[place])
            except ValueError as error:
                raise InvalidInput(
                    f"texts[{place}] is not Unicode text: {error}", field=f"texts[{place}]"
                ) from None
        return request

    def sink(self, places: Sequence[int]) -> SingleReply[pb.TokenizeResponse, TokenizeResult]:
        return SingleReply(codec.tokenize_result)

    def merge(self, results: Sequence[TokenizeResult]) -> TokenizeResult:
        return merge_tokenize(results)


class DetokenizePlan(RequestPlan[pb.DetokenizeRequest, pb.DetokenizeResponse, DetokenizeResult]):
    """A call of `detokenize`. Raises InvalidInput for arguments that no request can hold."""

    method, name = DETOKENIZE, "sequences"

    def __init__(
        self,
        ids: TokenIds | Sequence[TokenIds],
        model: str,
        options: CallOptions,
        *,
        skip_special: bool,
    ) -> None:
        self._frame = request_frame(
            pb.DetokenizeRequest, model, options, skip_special_tokens=skip_special
        )
        given = list(ids)
        is_flat = bool(given) and not hasattr(given[0], "__len__")
        self._sequences = cast("list[TokenIds]", [given] if is_flat else given)
        super().__init__(
            [_ID_LENGTH * len(one) for one in self._sequences],
            None,
            repeated_bytes=self._frame.ByteSize(),
        )

    def build(self, places: Sequence[int]) -> pb.DetokenizeRequest:
        request = pb.DetokenizeRequest()
        request.CopyFrom(self._frame)
        for place in places:
            try:
                request.sequences.add(ids=map(int, self._sequences[place]))
            except (TypeError, ValueError) as error:
                raise InvalidInput(
                    f"sequences[{place}] has no ids of tokens: {error}", field=f"sequences[{place}]"
                ) from None
        return request

    def sink(self, places: Sequence[int]) -> SingleReply[pb.DetokenizeResponse, DetokenizeResult]:
        return SingleReply(codec.detokenize_result)

    def merge(self, results: Sequence[DetokenizeResult]) -> DetokenizeResult:
        return merge_detokenize(results)

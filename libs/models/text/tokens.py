"""Tokenize and Detokenize: a model's tokenizer maps texts to ids, and ids to texts, without a
forward pass.

`prepare` does the work in the worker's preparing threads. Its Prepared has no sequences, so the job
finishes next.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from shoal.tokens import Tokens
from tokenizers import Encoding, Tokenizer

from libs import tokens
from libs.catalog.card import Card
from libs.errors import InputTooLong, InvalidInput
from libs.models.interface.results import DetokenizeResult, Result, TokenizeResult
from libs.models.interface.sequences import Prepared
from libs.models.interface.work import (
    CancelCheck,
    DetokenizeWork,
    TokenizeWork,
    TokenWork,
    Truncation,
)
from libs.models.text.tokenising.cutting import sliced
from libs.models.text.tokenising.text import run_of_ones, too_long
from libs.models.text.tokenising.tokenizer import failing

_NONE = np.zeros(0, np.uint32)


class TokenProcessor:
    """The processor of one tokenizer, which has neither truncation nor padding set. Thread-safe."""

    def __init__(self, card: Card, tokenizer: Tokenizer, limit: int = 0) -> None:
        """`limit` is the longest sequence in tokens; 0 for the card's."""
        self._card = card
        self._tokenizer = tokenizer
        self._limit = limit or card.max_tokens

    def prepare(self, work: TokenWork, check_cancelled: CancelCheck) -> Prepared:
        """Do the work; the notes contain the result.

        Raises InputTooLong or InvalidInput with the field's path in the job, and errors of
        `check_cancelled`, which is called before each `cutting.SLICE_CHARACTERS` characters.
        """
        with failing(_cannot_tokenise):
            if isinstance(work, TokenizeWork):
                items = self._tokenize(work, check_cancelled)
                result: Result = TokenizeResult(items, self._limit)
                return Prepared(
                    work, "", [], notes=result, looked_up=sum(item.count for item in items)
                )
            texts = self._detokenize(work, check_cancelled)
            return Prepared(
                work, "", [], notes=DetokenizeResult(texts), looked_up=sum(map(len, work.sequences))
            )

    def finish(self, prepared: Prepared) -> Result:
        """Return the result of a job that `prepare` did."""
        if not isinstance(prepared.notes, TokenizeResult | DetokenizeResult):
            raise TypeError("the job was not prepared by a TokenProcessor")
        return prepared.notes

    def _tokenize(self, work: TokenizeWork, check_cancelled: CancelCheck) -> list[Tokens]:
        encode = (
            self._tokenizer.encode_batch_fast if work.count_only else self._tokenizer.encode_batch
        )
        items: list[Tokens] = []
        read = made = name_bytes = 0
        for numbers in sliced([len(text) for text in work.texts], check_cancelled):
            texts = [work.texts[number] for number in numbers]
            for number, encoding in zip(
                numbers, encode(texts, add_special_tokens=work.add_special_tokens), strict=True
            ):
                item = self._tokenization(work, number, encoding)
                items.append(item)
                read += _utf8(work.texts[number])
                made += len(item.ids)
                name_bytes += sum(map(_utf8, item.names))
                if made > tokens.max_tokens(read, len(items)) or name_bytes > tokens.max_name_bytes(
                    read, len(items)
                ):
                    raise InputTooLong(
                        f"the model's tokenizer makes {made:,} tokens of {read:,} bytes of text, "
                        "which exceeds an answer's limit: "
                        "set count_only, or send the text in parts",
                        field=_text_path(number),
                    )
        return items

    def _tokenization(self, work: TokenizeWork, number: int, encoding: Encoding) -> Tokens:
        count = len(encoding)
        if count > self._limit and work.truncation == "none":
            raise too_long(_text_path(number), count, self._limit)
        kept_tokens = min(count, self._limit)
        if work.count_only:
            return Tokens(count, kept_tokens, _NONE, _NONE, _NONE)
        mask = encoding.special_tokens_mask
        before, after = run_of_ones(mask), run_of_ones(reversed(mask))
        # Without tokens of the text, the mask does not show on which side of it special ones are.
        if before == count:
            before = min(self._leading, count)
            after = count - before
        kept = self._kept(count, before, after, work.truncation)
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.uint32, 2 * count).reshape(
            -1, 2
        )
        kept_start, kept_end = 0, len(work.texts[number])
        if kept_tokens < count:
            own = kept[(kept >= before) & (kept < count - after)]
            kept_start = int(offsets[own[0], 0]) if len(own) and own[0] > before else 0
            if not len(own):
                kept_end = 0
            elif own[-1] < count - after - 1:
                kept_end = int(offsets[own[-1], 1])
        returned = kept if work.truncation in ("end", "start") else np.arange(count)
        ids = np.array(encoding.ids, np.uint32)[returned]
        return Tokens(
            count=count,
            kept_tokens=kept_tokens,
            ids=ids,
            starts=offsets[returned, 0],
            ends=offsets[returned, 1],
            names=self._names(ids) if work.return_tokens else (),
            special_before=before,
            special_after=after,
            kept_start=kept_start,
            kept_end=kept_end,
        )

    @cached_property
    def _leading(self) -> int:
        """Return the number of special tokens before a text."""
        return run_of_ones(self._tokenizer.encode("a").special_tokens_mask)

    def _names(self, ids: NDArray[np.uint32]) -> tuple[str, ...]:
        """Return the vocabulary's names. The encoding has the text instead for unknown tokens."""
        distinct, places = np.unique(ids, return_inverse=True)
        names = [self._tokenizer.id_to_token(token) or "" for token in distinct.tolist()]
        return tuple(names[place] for place in places.tolist())

    def _kept(
        self, count: int, before: int, after: int, truncation: Truncation
    ) -> NDArray[np.int64]:
        """Return the places of the tokens that Encode keeps: the special tokens around a text, and
        one end of the text.
        """
        if count <= self._limit:
            return np.arange(count)
        side = self._card.truncation if truncation == "default" else truncation
        room = max(self._limit - before - after, 0)
        start = count - after - room if side == "start" else before
        return np.concatenate(
            [np.arange(before), np.arange(start, start + room), np.arange(count - after, count)]
        )

    def _detokenize(self, work: DetokenizeWork, check_cancelled: CancelCheck) -> list[str]:
        texts: list[str] = []
        for numbers in sliced([len(ids) for ids in work.sequences], check_cancelled):
            for number in numbers:
                ids = work.sequences[number]
                self._check_size(ids, number)
                texts.append(
                    self._tokenizer.decode(
                        ids.tolist(), skip_special_tokens=work.skip_special_tokens
                    )
                )
                _refuse_large(_utf8(texts[-1]), len(ids), number)
        return texts

    def _check_size(self, ids: NDArray[np.uint32], number: int) -> None:
        """Refuse ids that the tokenizer lacks, and ids with too long names, before decoding
        them."""
        distinct, first, counts = np.unique(ids, return_index=True, return_counts=True)
        size = 0
        for token, place, count in zip(
            distinct.tolist(), first.tolist(), counts.tolist(), strict=True
        ):
            name = self._tokenizer.id_to_token(token)
            if name is None:
                field = f"{_sequence_path(number)}.ids[{place}]"
                raise InvalidInput(
                    f"{field} is {token}, which is not in the vocabulary of {self._card.model}",
                    field=field,
                )
            # Count characters, because a byte-level name has one for each byte of the text. The
            # text is checked after decoding.
            size += count * len(name)
        _refuse_large(size, len(ids), number)


def _refuse_large(size: int, ids: int, number: int) -> None:
    most = tokens.max_text_bytes(ids, 1)
    if size > most:
        field = _sequence_path(number)
        message = (
            f"{field} has a text of {size:,} bytes; the maximum for {ids:,} ids is {most:,}: send "
            "fewer at a time"
        )
        raise InputTooLong(message, field=field)


def _cannot_tokenise(problem: str) -> InvalidInput:
    return InvalidInput(f"the model's tokenizer fails for this text: {problem}")


def _text_path(number: int) -> str:
    return f"texts[{number}]"


def _sequence_path(number: int) -> str:
    return f"sequences[{number}]"


def _utf8(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))

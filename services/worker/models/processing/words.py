"""Texts as words, for models that label words: the gliner package's splitting, and the words' places among the tokens.

The first step of an entities or relations job, in the worker's threads. A sequence is the labels, each behind a marker, then the
text's words; every word is tokenised on its own, as the models were trained.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from libs.catalog.gliner import Pooling
from libs.errors import InputTooLong, InvalidInput
from services.worker.models.processing.checks import item_path
from services.worker.models.work import Truncation

Ids = NDArray[np.int32]
_WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")


@dataclass(frozen=True, slots=True)
class Words:
    """Words of a text: where each begins and ends in it, in code points, end exclusive. Both [words]."""

    starts: Ids
    ends: Ids

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class Framed:
    """A sequence's tokens and what they stand for. Rows count from the sequence's first token.

    `prompt`: the first token of each word of the prompt, -1 for one without tokens. `pieces`: rows of the tokens that make the
    words, `sizes` of them each. `words`: those that were kept.
    """

    ids: Ids
    prompt: Ids
    pieces: Ids
    sizes: Ids
    words: Words


class WordFrame:
    """`limit`: the longest sequence in tokens; `max_words` of a text."""

    def __init__(self, tokenizer: Tokenizer, *, limit: int, max_words: int, pooling: Pooling) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._limit, self._max_words, self._pooling = tokenizer, limit, max_words, pooling

    def encode(self, texts: Many[str], prompt: Many[str], truncation: Truncation, labels_path: str) -> list[Framed]:
        """Each text behind the words of the prompt. Raises InputTooLong, or InvalidInput if the prompt alone is too long."""
        found = [self._split(text, truncation, item_path(number)) for number, text in enumerate(texts)]
        inputs = [[*prompt, *words] for words, _ in found]
        encodings = self._tokenizer.encode_batch(inputs, is_pretokenized=True)
        return [
            self._frame(encoding, words, len(prompt), truncation, item_path(number), labels_path)
            for number, (encoding, (_, words)) in enumerate(zip(encodings, found, strict=True))
        ]

    def _split(self, text: str, truncation: Truncation, where: str) -> tuple[list[str], Words]:
        matches = _WORD.finditer(text)
        if truncation == "start":
            kept = list(deque(matches, maxlen=self._max_words))
        else:
            kept = list(islice(matches, self._max_words + 1))
            if len(kept) > self._max_words and truncation == "none":
                raise InputTooLong(
                    f"{where} has more than {self._max_words} words, which is what the model takes. Shorten it, or have it cut: "
                    "truncation END or START",
                    field=where,
                )
            kept = kept[: self._max_words]
        places = np.array([match.span() for match in kept], dtype=np.int32).reshape(-1, 2)
        return [match.group() for match in kept], Words(places[:, 0], places[:, 1])

    def _frame(self, encoding: Encoding, words: Words, prompt: int, truncation: Truncation, where: str, labels_path: str) -> Framed:
        ids = np.array(encoding.ids, dtype=np.int32)
        if not len(ids):
            raise InvalidInput(f"{where} has nothing that the model's tokenizer knows", field=where)
        owners = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int32)
        firsts = np.flatnonzero((owners >= 0) & (np.diff(owners, prepend=-1) != 0)).astype(np.int32)
        tail = len(ids) - 1 - int(np.max(np.flatnonzero(owners >= 0), initial=-1))
        text = firsts[owners[firsts] >= prompt]
        begin = int(text[0]) if len(text) else len(ids) - tail
        ends = np.append(text[1:], np.int32(len(ids) - tail)) if len(text) else text
        if begin + tail >= self._limit:
            message = f"the labels take {begin + tail} tokens; the model takes {self._limit} with the text: name fewer at a time"
            raise InvalidInput(message, field=labels_path)
        if len(ids) > self._limit:
            if truncation == "none":
                message = f"{where} has {len(ids)} tokens, labels included; the model takes {self._limit}"
                raise InputTooLong(f"{message}. Shorten it, or have it cut: truncation END or START", field=where)
            text, ends = _fit(text, ends, self._limit - begin - tail, truncation)
        first, last = (int(text[0]), int(ends[-1])) if len(text) else (begin, begin)
        rows = np.full(prompt, -1, dtype=np.int32)
        rows[owners[firsts[firsts < begin]]] = firsts[firsts < begin]
        pieces, sizes = self._pieces(text - first + begin, ends - first + begin)
        numbers = owners[text] - prompt  # a word without tokens, such as a mere accent, has no number here
        return Framed(
            ids=np.concatenate([ids[:begin], ids[first:last], ids[len(ids) - tail :]]),
            prompt=rows,
            pieces=pieces,
            sizes=sizes,
            words=Words(words.starts[numbers], words.ends[numbers]),
        )

    def _pieces(self, starts: Ids, ends: Ids) -> tuple[Ids, Ids]:
        """The rows that make each word of the tokens `starts[i]:ends[i]`, and how many they are."""
        if self._pooling == "first":
            return starts, np.ones_like(starts)
        if self._pooling == "last":
            return ends - 1, np.ones_like(starts)
        every = np.arange(starts[0], ends[-1], dtype=np.int32) if len(starts) else starts
        return every, ends - starts


def _fit(starts: Ids, ends: Ids, room: int, truncation: Truncation) -> tuple[Ids, Ids]:
    """The words whose tokens fit, of the text's beginning or end."""
    if truncation == "end":
        count = int(np.searchsorted(ends - starts[0], room, side="right"))
        return starts[:count], ends[:count]
    first = int(np.searchsorted(-(ends[-1] - starts), -room, side="left"))
    return starts[first:], ends[first:]

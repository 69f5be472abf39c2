"""Texts as words, for models that label words: the gliner package's word splitting, and the words'
positions among the tokens.

This is the first step of an entities or relations job, in the worker's threads. A sequence consists
of the labels, each after a marker, then the text's words. Every word is tokenised separately, as in
the models' training.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from libs.errors import InputTooLong, InvalidInput
from libs.kinds.gliner.card import Pooling
from libs.models.interface.work import CancelCheck, Span, Truncation, never_cancelled
from libs.models.text.checks import item_path
from libs.models.text.tokenising.cutting import sliced
from libs.models.text.tokenising.text import run_of_ones
from libs.models.text.windows.spans import MAX_WINDOWS, resolve_overlap, too_many_windows

Ids = NDArray[np.int32]
_SPACE: Final = re.compile(r"\s")
_WORD_CHARACTERS: Final = 16
_CHARACTERS_A_TOKEN: Final = 16
"""Nearly all tokens have fewer. A normaliser may expand one character to eighteen, and a text may
be one very long word.
"""
_WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")


@dataclass(frozen=True, slots=True)
class Words:
    """The offsets of a text's words, in code points, end exclusive. Both [words]."""

    starts: Ids
    ends: Ids

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class WordSequence:
    """A sequence's tokens and their words. Rows count from the sequence's first token."""

    ids: Ids
    prompt: Ids
    """The first token of each word of the prompt, -1 for a word without tokens."""
    pieces: Ids
    """Rows of the words' tokens."""
    sizes: Ids
    """Number of tokens of each word."""
    words: Words
    """The words that truncation kept."""
    cut: str
    """The text's path if truncation dropped some of it; else empty."""


@dataclass(frozen=True, slots=True)
class _Front:
    """The tokens that all texts of a job share."""

    ids: Ids
    """The tokens before a text."""
    owners: Ids
    """The word of each token before a text, -1 for none."""
    tail: Ids
    """The tokens after a text."""
    words: int


@dataclass(frozen=True, slots=True)
class _Split:
    """The words of a text, as the model reads them, and whether the text has more words."""

    texts: list[str]
    words: Words
    is_cut: bool


class WordFrame:
    """Builds input sequences of a prompt and a text, which is tokenised word by word.

    Args:
        limit: Maximum tokens of a sequence.
        max_words: Maximum words of a text.
        word: The pattern of a word, which contains no space.
        lowercase: Whether words are lower-cased.
        adds_special_tokens: Whether the tokenizer's special tokens are added around the sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        limit: int,
        max_words: int,
        pooling: Pooling,
        word: re.Pattern[str] = _WORD,
        lowercase: bool = False,
        adds_special_tokens: bool = True,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._limit, self._max_words, self._pooling = (
            tokenizer,
            limit,
            max_words,
            pooling,
        )
        self._word, self._lowercase = word, lowercase
        # Special tokens before and after a text.
        around = tokenizer.encode(["a"], is_pretokenized=True)
        before, after = (
            run_of_ones(around.special_tokens_mask),
            run_of_ones(reversed(around.special_tokens_mask)),
        )
        ids = np.array(around.ids, dtype=np.int32)
        self._head, self._tail = (
            (ids[:before], ids[len(ids) - after :]) if adds_special_tokens else (ids[:0], ids[:0])
        )

    def encode(
        self,
        texts: Sequence[str],
        prompt: Sequence[str],
        truncation: Truncation,
        labels_path: str,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> list[WordSequence]:
        """Tokenise each text after the words of the prompt, which are tokenised once.

        Raises InputTooLong, or InvalidInput if the prompt alone is too long.
        """
        front = self._front(prompt, check_cancelled)
        found: list[WordSequence] = []
        for numbers in sliced([len(text) for text in texts], check_cancelled):
            split = [
                self._split(texts[number], truncation, item_path(number)) for number in numbers
            ]
            encodings = self._tokenizer.encode_batch(
                [one.texts for one in split], is_pretokenized=True, add_special_tokens=False
            )
            for number, encoding, words in zip(numbers, encodings, split, strict=True):
                found.append(
                    self._frame(front, encoding, words, truncation, item_path(number), labels_path)
                )
        return found

    def windows(
        self,
        text: str,
        prompt: Sequence[str],
        overlap: int | None,
        path: str,
        check_cancelled: CancelCheck,
        *,
        after: str = "",
    ) -> list[Span]:
        """Return the windows of a text, in order: as many whole words as the model reads after the
        prompt. A longer word is a window. Empty for a text without words.

        Each window ends beyond the previous one. The overlap is smaller where the next word would
        not fit next to it, and at most half (by default a quarter) of the previous window's tokens.

        Raises InvalidInput for an overlap of more than half of the largest window, and for too many
        windows.

        Args:
            overlap: Tokens that a window repeats of the one before; None for the default.
            path: The text's path in the job.
            after: A word that is added to each window.
        """
        front = self._front(prompt, check_cancelled)
        added = self._token_counts([after])[0] if after else 0
        room = max(1, self._limit - len(front.ids) - len(front.tail) - added)
        places = np.array([match.span() for match in self._word.finditer(text)], dtype=np.int64)
        if not len(places):
            return []
        starts, ends = places[:, 0], places[:, 1]
        counts = np.concatenate(
            [
                self._token_counts([text[starts[row] : ends[row]] for row in rows])
                for rows in sliced((ends - starts + 1).tolist(), check_cancelled)
            ]
        )
        before = np.concatenate([[0], np.cumsum(counts)])
        most = max(1, self._max_words - bool(after))
        found: list[Span] = []
        for begin, end in _word_windows(before, room, most, overlap):
            if len(found) == MAX_WINDOWS:
                raise too_many_windows(path)
            found.append(Span(int(starts[begin]), int(ends[end - 1])))
        return found

    def _token_counts(self, words: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of tokens of each word, as a text has them."""
        (encoding,) = self._tokenizer.encode_batch(
            [[self._shortened(word, "end") for word in words]],
            is_pretokenized=True,
            add_special_tokens=False,
        )
        owners = np.array(encoding.word_ids, dtype=np.int64)
        counts: NDArray[np.int64] = np.bincount(owners, minlength=len(words))
        return counts

    def _front(self, prompt: Sequence[str], check_cancelled: CancelCheck) -> _Front:
        """Tokenise the prompt in slices, which is possible because every word is tokenised
        separately."""
        ids, owners = [self._head], [np.full_like(self._head, -1)]
        for numbers in sliced([len(word) for word in prompt], check_cancelled):
            words = [prompt[number] for number in numbers]
            encoding = self._tokenizer.encode_batch(
                [words], is_pretokenized=True, add_special_tokens=False
            )[0]
            ids.append(np.array(encoding.ids, dtype=np.int32))
            owners.append(np.array(encoding.word_ids, dtype=np.int32) + np.int32(numbers.start))
        return _Front(np.concatenate(ids), np.concatenate(owners), self._tail, len(prompt))

    def _split(self, text: str, truncation: Truncation, where: str) -> _Split:
        if truncation == "start":
            first = self._last_words(text)
            kept = list(deque(self._word.finditer(text, first), maxlen=self._max_words + 1))
            before = first > 0 and self._word.search(text, 0, first) is not None
            is_cut = before or len(kept) > self._max_words
            kept = kept[-self._max_words :]
        else:
            kept = list(islice(self._word.finditer(text), self._max_words + 1))
            is_cut = len(kept) > self._max_words
            if is_cut and truncation == "none":
                raise InputTooLong(
                    f"{where} has more than {self._max_words} words, the model's maximum. Shorten "
                    "it, or request truncation END or START",
                    field=where,
                )
            kept = kept[: self._max_words]
        places = np.array([match.span() for match in kept], dtype=np.int32).reshape(-1, 2)
        return _Split(
            [self._shortened(match.group(), truncation) for match in kept],
            Words(places[:, 0], places[:, 1]),
            is_cut,
        )

    def _shortened(self, word: str, truncation: Truncation) -> str:
        """Return the relevant part of a word: a longer word exceeds the model's tokens and is
        dropped."""
        most = _CHARACTERS_A_TOKEN * self._limit
        if len(word) > most:
            word = word[-most:] if truncation == "start" else word[:most]
        return word.lower() if self._lowercase else word

    def _last_words(self, text: str) -> int:
        """Return a position followed by at least `max_words` words, or 0. It is at a space, which
        is never within a word.
        """
        size = _WORD_CHARACTERS * self._max_words
        while size < len(text):
            space = _SPACE.search(text, len(text) - size)
            if space is not None:
                words = islice(self._word.finditer(text, space.start()), self._max_words)
                if sum(1 for _ in words) == self._max_words:
                    return space.start()
            size *= 2
        return 0

    def _frame(
        self,
        front: _Front,
        encoding: Encoding,
        split: _Split,
        truncation: Truncation,
        where: str,
        labels_path: str,
    ) -> WordSequence:
        prompt, words, is_cut = front.words, split.words, split.is_cut
        ids = np.concatenate([front.ids, np.array(encoding.ids, dtype=np.int32), front.tail])
        if not len(ids):
            raise InvalidInput(f"{where} has no token in the model's tokenizer", field=where)
        own = np.array(encoding.word_ids, dtype=np.int32)
        owners = np.concatenate(
            [front.owners, own + np.int32(prompt), np.full_like(front.tail, -1)]
        )
        firsts = np.flatnonzero((owners >= 0) & (np.diff(owners, prepend=-1) != 0)).astype(np.int32)
        tail = len(ids) - 1 - int(np.max(np.flatnonzero(owners >= 0), initial=-1))
        text = firsts[owners[firsts] >= prompt]
        begin = int(text[0]) if len(text) else len(ids) - tail
        ends = np.append(text[1:], np.int32(len(ids) - tail)) if len(text) else text
        if begin + tail >= self._limit:
            message = (
                f"the labels have {begin + tail} tokens; the model's maximum with the text is "
                f"{self._limit}: send fewer at a time"
            )
            raise InvalidInput(message, field=labels_path)
        if len(ids) > self._limit:
            if truncation == "none":
                message = (
                    f"{where} has {len(ids)} tokens, labels included; the model's maximum is "
                    f"{self._limit}"
                )
                raise InputTooLong(
                    f"{message}. Shorten it, or request truncation END or START", field=where
                )
            text, ends = _fit(text, ends, self._limit - begin - tail, truncation)
            is_cut = True
        first, last = (int(text[0]), int(ends[-1])) if len(text) else (begin, begin)
        rows = np.full(prompt, -1, dtype=np.int32)
        rows[owners[firsts[firsts < begin]]] = firsts[firsts < begin]
        pieces, sizes = self._pieces(text - first + begin, ends - first + begin)
        # A word without tokens, such as a lone accent, has no number here.
        numbers = owners[text] - prompt
        return WordSequence(
            ids=np.concatenate([ids[:begin], ids[first:last], ids[len(ids) - tail :]]),
            prompt=rows,
            pieces=pieces,
            sizes=sizes,
            words=Words(words.starts[numbers], words.ends[numbers]),
            cut=where if is_cut else "",
        )

    def _pieces(self, starts: Ids, ends: Ids) -> tuple[Ids, Ids]:
        """Return the rows that represent each word, of its tokens `starts[i]:ends[i]`, and their
        number."""
        if self._pooling == "first":
            return starts, np.ones_like(starts)
        if self._pooling == "last":
            return ends - 1, np.ones_like(starts)
        every = np.arange(starts[0], ends[-1], dtype=np.int32) if len(starts) else starts
        return every, ends - starts


def _word_windows(
    before: NDArray[np.int64], room: int, most: int, asked: int | None
) -> Iterator[tuple[int, int]]:
    """Yield the first word and the end of each window.

    1. A window has at most `room` tokens and `most` words, or one longer word.
    2. The next one repeats at most the overlap, half of the window's tokens (a quarter by default),
      and half of `most` words.
    3. It repeats less if the word after the window would not fit next to that.

    Raises InvalidInput for an overlap of more than half of the largest window.

    Args:
        before: Tokens before each word, and of all: [words + 1].
        asked: The request's overlap in tokens; None for the default.
    """
    words = len(before) - 1
    largest = int((before[most:] - before[:-most]).max()) if words >= most else int(before[-1])
    repeated = resolve_overlap(asked, max(1, min(room, largest)))
    begin = 0
    while True:
        fitting = int(np.searchsorted(before, before[begin] + room, side="right")) - 1
        end = max(begin + 1, min(fitting, begin + most, words))
        yield begin, end
        if end == words:
            return
        share = min(repeated, int(before[end] - before[begin]) // (4 if asked is None else 2))
        again = int(np.searchsorted(before, before[end] - share, side="left")) if share else end
        fits = int(np.searchsorted(before, before[end + 1] - room, side="left"))
        begin = min(end, max(begin + 1, again, fits, end - most // 2))


def _fit(starts: Ids, ends: Ids, room: int, truncation: Truncation) -> tuple[Ids, Ids]:
    """Truncate to the words that fit with their tokens, from the text's beginning or end."""
    if truncation == "end":
        count = int(np.searchsorted(ends - starts[0], room, side="right"))
        return starts[:count], ends[:count]
    first = int(np.searchsorted(-(ends[-1] - starts), -room, side="left"))
    return starts[first:], ends[first:]

"""Texts -> token ids, with nothing but the `tokenizers` library and tokenizer.json.

The first step of `TextModel.prepare`, in the worker's threads. One Tokenizer serves all threads, so its state (truncation, padding)
is set once, to none: texts are cut here, on the finished encoding, to the very ids that the tokenizer's own truncation would leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer

from libs.catalog.files import read_config
from libs.errors import InputTooLong, InvalidInput
from services.worker.models.work import Sequence, Truncation

Where = Callable[[int], str]
"""The path of text i in the job, such as `items[3].text`."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the tokens of one text lie in it, special tokens left out. All [text tokens]."""

    rows: NDArray[np.int32]  # of the token in its sequence
    starts: NDArray[np.int32]  # code points
    ends: NDArray[np.int32]  # code points, exclusive
    continues: NDArray[np.bool_]  # the token continues the word of the token before it


class TextProcessor:
    """`limit`: the longest sequence in tokens. `segments`: the encoder tells a pair's texts apart. `unknown`: that token's name."""

    def __init__(self, tokenizer: Tokenizer, *, limit: int, segments: bool, unknown: str = "") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.limit = limit
        self._tokenizer = tokenizer
        self._segments = segments
        # Almost no tokenizer puts a single text anywhere but in segment 0.
        self._segments_of_one = segments and any(tokenizer.encode("a").type_ids)
        self.unknown = self.token_id(unknown)
        # WordPiece and its like mark a token that continues a word; other models leave it to the spaces.
        self._marks_words = bool(getattr(tokenizer.model, "continuing_subword_prefix", None))

    def encode(self, texts: list[str], truncation: Truncation, where: Where, *, limit: int = 0, prompt: str = "") -> list[Sequence]:
        """One sequence a text, special tokens included; the prompt before each text. `limit` 0: the model's."""
        encodings = self._tokenizer.encode_batch_fast([prompt + text for text in texts] if prompt else texts)
        rows = [self._rows(item, limit or self.limit, truncation, where(i)) for i, item in enumerate(encodings)]
        return [self._sequence(item, kept) for item, kept in zip(encodings, rows, strict=True)]

    def encode_spans(self, texts: list[str], truncation: Truncation, where: Where) -> tuple[list[Sequence], list[Spans]]:
        """As `encode`, with the place of each token in its text."""
        encodings = self._tokenizer.encode_batch(texts)
        rows = [self._rows(item, self.limit, truncation, where(i)) for i, item in enumerate(encodings)]
        sequences = [self._sequence(item, kept) for item, kept in zip(encodings, rows, strict=True)]
        return sequences, [self._spans(*parts) for parts in zip(texts, encodings, rows, strict=True)]

    def encode_pairs(self, query: str, documents: list[str], truncation: Truncation) -> list[Sequence]:
        """The query, tokenised once, with each document, in tokenizer.json's frame for pairs. Only documents are cut."""
        first = self._tokenizer.encode(query, add_special_tokens=False)
        room = self.limit - self._tokenizer.num_special_tokens_to_add(True) - len(first)
        seconds = self._tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        for number, second in enumerate(seconds):
            if len(second) > room:
                self._cut_document(second, room, truncation, number)
        pairs = [self._tokenizer.post_process(first, second) for second in seconds]
        return [Sequence(_int32(pair.ids), _int32(pair.type_ids) if self._segments else None) for pair in pairs]

    def encode_crossed(
        self, firsts: list[str], seconds: list[str], truncation: Truncation, where: Where, second_where: Where
    ) -> list[Sequence]:
        """Each first text with each second, all tokenised once, in tokenizer.json's frame for pairs. Only first texts are cut.

        Returns the sequences of the first text in the order of the seconds, then those of the next.
        """
        frame = self._tokenizer.num_special_tokens_to_add(True)
        others = self._tokenizer.encode_batch_fast(seconds, add_special_tokens=False)
        rooms = [self.limit - frame - len(other) for other in others]
        for number, room in enumerate(rooms):
            if room < 1:
                needed = self.limit - room + 1
                raise too_long(second_where(number), needed, self.limit, "with special tokens and at least one token of an item")
        # Cutting is for good, so the second that leaves most room comes first.
        order = sorted(range(len(seconds)), key=lambda number: -rooms[number])
        sequences: list[Sequence] = []
        for place, first in enumerate(self._tokenizer.encode_batch_fast(firsts, add_special_tokens=False)):
            pairs: dict[int, Sequence] = {}
            for number in order:
                if len(first) > rooms[number]:
                    if truncation == "none":
                        raise too_long(where(place), len(first) - rooms[number] + self.limit, self.limit)
                    first.truncate(rooms[number], direction="right" if truncation == "end" else "left")
                pair = self._tokenizer.post_process(first, others[number])
                pairs[number] = Sequence(_int32(pair.ids), _int32(pair.type_ids) if self._segments else None)
            sequences += [pairs[number] for number in range(len(seconds))]
        return sequences

    def encode_plain(self, texts: list[str]) -> list[NDArray[np.int32]]:
        """Ids of whole texts, whatever their length, with no tokens put around them."""
        return [_int32(item.ids) for item in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def prompt_tokens(self, prompt: str) -> int:
        """Tokens of the prompt at a sequence's beginning, with special ones before it (sentence-transformers' prompt_length)."""
        encoding = self._tokenizer.encode(prompt)
        return len(encoding) - run_of_ones(reversed(encoding.special_tokens_mask))

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary; None if it is not one."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def keep_whole(self, markers: Iterable[str]) -> None:
        """Make each marker that the vocabulary holds, whole or its first word, one special token. Only before the first text.

        Late-interaction models were trained with such tokens put in by id; as plain text "[unused0]" would fall to pieces.
        """
        vocabulary = self._tokenizer.get_vocab()
        for marker in markers:
            token = next((form for form in (marker, *marker.split()[:1]) if form in vocabulary), None)
            if token is not None and self._tokenizer.encode(token, add_special_tokens=False).tokens != [token]:
                self._tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])

    def _rows(self, encoding: Encoding, limit: int, truncation: Truncation, where: str) -> NDArray[np.int64] | None:
        """Which tokens stay of an encoding that is too long: the special tokens around it and one end of the text. None: all."""
        tokens = len(encoding)
        if tokens == 0:
            raise InvalidInput(f"{where} has nothing that the model's tokenizer knows", field=where)
        if tokens <= limit:
            return None
        if truncation == "none":
            raise too_long(where, tokens, limit)
        # The mask is set only by the tokenizer's frame: "[SEP]" within the text does not count.
        mask = encoding.special_tokens_mask
        before, after = run_of_ones(mask), run_of_ones(reversed(mask))
        room = max(limit - before - after, 0)
        start = before if truncation == "end" else tokens - after - room
        return np.concatenate([np.arange(before), np.arange(start, start + room), np.arange(tokens - after, tokens)])

    def _cut_document(self, encoding: Encoding, room: int, truncation: Truncation, number: int) -> None:
        if truncation == "none":
            raise too_long(f"documents[{number}].text", len(encoding) - room + self.limit, self.limit)
        if room < 1:
            needed = self.limit - room + 1
            raise too_long("query.text", needed, self.limit, "with special tokens and at least one token of a document")
        encoding.truncate(room, direction="right" if truncation == "end" else "left")

    def _sequence(self, encoding: Encoding, rows: NDArray[np.int64] | None) -> Sequence:
        ids = _int32(encoding.ids)
        types = _int32(encoding.type_ids) if self._segments_of_one else None
        if rows is None:
            return Sequence(ids, types)
        return Sequence(ids[rows], None if types is None else types[rows])

    def _spans(self, text: str, encoding: Encoding, rows: NDArray[np.int64] | None) -> Spans:
        tokens = np.arange(len(encoding)) if rows is None else rows
        inside = np.flatnonzero(np.array(encoding.special_tokens_mask)[tokens] == 0)
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)[tokens[inside]]
        names = encoding.tokens
        continues = [
            self._continues(text, encoding.ids[token], names[token], int(start), int(end))
            for token, (start, end) in zip(tokens[inside], offsets, strict=True)
        ]
        return Spans(inside.astype(np.int32), offsets[:, 0], offsets[:, 1], np.array(continues, dtype=bool))

    def _continues(self, text: str, token_id: int, token: str, start: int, end: int) -> bool:
        """Whether a token continues a word: transformers' rule (TokenClassificationPipeline.gather_pre_entities)."""
        if token_id == self.unknown:
            return False
        if self._marks_words:
            return len(token) != end - start
        return start > 0 and " " not in text[start - 1 : start + 1]


def special_token(directory: Path, role: str) -> str:
    """The token of a role such as `mask_token`, from tokenizer_config.json or special_tokens_map.json; empty if there is none."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_config(directory, name)
        value = None if config is None else config.values.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            return content
    return ""


def _int32(values: list[int]) -> NDArray[np.int32]:
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError:
        raise InvalidInput(f"the model's tokenizer makes the token {max(values)} of a text, which no model has") from None


def run_of_ones(mask: Iterable[int]) -> int:
    count = 0
    for value in mask:
        if not value:
            break
        count += 1
    return count


def too_long(where: str, tokens: int, limit: int, how: str = "special tokens included") -> InputTooLong:
    message = f"{where} has {tokens} tokens, {how}; the model takes {limit}. Shorten it, or have it cut: truncation END or START"
    return InputTooLong(message, field=where)

"""Texts to token ids, with the `tokenizers` library and tokenizer.json alone.

This is the first step of `PackedModel.prepare`, in the worker's threads. One Tokenizer serves all
threads, so its truncation and padding are disabled once: encodings are truncated here, to exactly
the ids that the tokenizer's truncation would leave. A long text is tokenised only as far as
necessary (`cutting.py`), and large numbers of texts a slice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer

from libs.catalog.checkpoint.files import read_config
from libs.errors import InputTooLong, InvalidInput
from libs.models.interface.sequences import InputSequence
from libs.models.interface.work import CancelCheck, Truncation, never_cancelled
from libs.models.text.tokenising.cutting import Cutter, TextEncoding
from libs.models.text.tokenising.whole import (
    ReadText,
    TokenPlaces,
    WholeText,
    join_parts,
    rows_in_parts,
)

Where = Callable[[int], str]
"""The path of text i in the job, such as `items[3].text`."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The offsets of one text's tokens, without special tokens. All [text tokens]."""

    rows: NDArray[np.int32]  # of the token in its sequence
    starts: NDArray[np.int32]  # code points
    ends: NDArray[np.int32]  # code points, exclusive
    continues: NDArray[np.bool_]  # the token continues the word of the token before it


class TextProcessor:
    """Tokenises texts for one model.

    Args:
        limit: The longest sequence in tokens.
        segments: The encoder has token types.
        unknown: The unknown token.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, limit: int, segments: bool, unknown: str = ""
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.limit = limit
        self.tokenizer = tokenizer
        self._cutter = Cutter(tokenizer)
        self._segments = segments
        # Almost all tokenizers put a single text into segment 0.
        self._segments_of_one = segments and any(tokenizer.encode("a").type_ids)
        self.unknown = self.token_id(unknown)
        # WordPiece and similar models mark a token that continues a word; for others, spaces
        # decide.
        self._marks_words = bool(getattr(tokenizer.model, "continuing_subword_prefix", None))

    def encode(
        self,
        texts: list[str],
        truncation: Truncation,
        where: Where,
        *,
        limit: int = 0,
        prompt: str = "",
        check_cancelled: CancelCheck = never_cancelled,
    ) -> list[InputSequence]:
        """Return one sequence per text, special tokens included, with the prompt before each text.

        `limit` 0 is the model's limit.
        """
        limit = limit or self.limit
        before: TextEncoding | None = None
        sequences: list[InputSequence] = []
        for number, part in enumerate(
            self._cutter.parts(texts, limit, truncation, check_cancelled, prompt=prompt)
        ):
            if part is before:  # cut to the same prompt without text: convert its tokens once
                sequences.append(replace(sequences[-1], cut=where(number)))
            else:
                rows = self._rows(part, limit, truncation, where(number))
                sequences.append(self._sequence(part.encoding, rows, where(number)))
                before = part
        return sequences

    def encode_spans(
        self,
        texts: list[str],
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> tuple[list[InputSequence], list[Spans]]:
        """Encode as `encode`, and return the place of each token in its text."""
        sequences, spans = [], []
        for number, part in enumerate(
            self._cutter.parts(texts, self.limit, truncation, check_cancelled, placed=True)
        ):
            rows = self._rows(part, self.limit, truncation, where(number))
            sequences.append(self._sequence(part.encoding, rows, where(number)))
            spans.append(self._spans(texts[number], part, rows))
        return sequences, spans

    def encode_pairs(
        self,
        query: str,
        documents: list[str],
        truncation: Truncation,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> list[InputSequence]:
        """Encode the query, tokenised once, with each document, in tokenizer.json's template for
        pairs. Only documents are truncated.
        """
        frame = self.tokenizer.num_special_tokens_to_add(True)
        (asked,) = self._cutter.parts([query], self.limit, "none", check_cancelled, frame=False)
        first, room = asked.encoding, self.limit - frame - len(asked.encoding)
        if not asked.is_whole:
            raise too_long("query.text", self.limit, self.limit, "without a document", more=True)
        pairs = []
        for number, part in enumerate(
            self._cutter.parts(documents, self.limit, truncation, check_cancelled, frame=False)
        ):
            is_cut = len(part.encoding) > room
            if is_cut:
                self._cut_document(part, room, truncation, number)
            cut = f"documents[{number}].text" if is_cut else ""
            pairs.append(self._pair(first, part.encoding, cut))
        return pairs

    def encode_crossed(
        self,
        firsts: list[str],
        seconds: list[str],
        truncation: Truncation,
        where: Where,
        second_where: Where,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> list[InputSequence]:
        """Encode each first text with each second, each tokenised once, in tokenizer.json's
        template for pairs. Only first texts are truncated.

        Returns the sequences of the first text in the order of the second texts, then those of the
        next.
        """
        frame = self.tokenizer.num_special_tokens_to_add(True)
        others = []
        for number, part in enumerate(
            self._cutter.parts(seconds, self.limit, "none", check_cancelled, frame=False)
        ):
            needed = len(part.encoding) + frame + 1
            if needed > self.limit:
                how = "with special tokens and at least one token of an item"
                raise too_long(
                    second_where(number), needed, self.limit, how, more=not part.is_whole
                )
            others.append(part.encoding)
        rooms = [self.limit - frame - len(other) for other in others]
        # Truncation happens in place, so the second text that leaves most tokens is first.
        order = sorted(range(len(seconds)), key=lambda number: -rooms[number])
        sequences: list[InputSequence] = []
        for place, part in enumerate(
            self._cutter.parts(firsts, self.limit, truncation, check_cancelled, frame=False)
        ):
            check_cancelled()
            first, tokens = part.encoding, len(part.encoding)
            pairs: dict[int, InputSequence] = {}
            for number in order:
                if len(first) > rooms[number]:
                    if truncation == "none":
                        needed = len(first) - rooms[number] + self.limit
                        raise too_long(where(place), needed, self.limit, more=not part.is_whole)
                    first.truncate(
                        rooms[number], direction="right" if truncation == "end" else "left"
                    )
                cut = where(place) if tokens > rooms[number] else ""
                pairs[number] = self._pair(first, others[number], cut)
            sequences += [pairs[number] for number in range(len(seconds))]
        return sequences

    def encode_plain(
        self,
        texts: Sequence[str],
        truncation: Truncation,
        check_cancelled: CancelCheck,
        *,
        before: str = "",
        after: str = "",
    ) -> Iterator[tuple[NDArray[np.int32], bool]]:
        """Return the ids of `before + text + after` for each text, without special tokens, and
        whether these are all ids.

        Otherwise the ids exceed the limit, and truncating them to it, within the text, gives the
        same ids as the whole text.
        """
        for part in self._cutter.parts(
            texts, self.limit, truncation, check_cancelled, before=before, after=after, frame=False
        ):
            yield _int32(part.encoding.ids), part.is_whole

    def encode_whole(
        self, text: str, prompt: str = "", check_cancelled: CancelCheck = never_cancelled
    ) -> WholeText:
        """Return all tokens of a text, which is not truncated. Blocking, without the interpreter's
        lock while the library tokenises.

        A long text is tokenised in pieces, between which `check_cancelled` is called (`whole.py`).
        """
        return join_parts([*self.encode_in_parts(lambda _: (text, True), prompt, check_cancelled)])

    def encode_in_parts(
        self, read: ReadText, prompt: str = "", check_cancelled: CancelCheck = never_cancelled
    ) -> Iterator[WholeText]:
        """Yield the tokens of a text as it is read, in parts that add up to `encode_whole`."""

        def read_prompted(characters: int) -> tuple[str, bool]:
            own, is_whole = read(max(0, characters - len(prompt)))
            return prompt + own, is_whole

        places = TokenPlaces(len(prompt), has_words=self.has_independent_words or None)
        for rows in rows_in_parts(self._cutter, read_prompted, check_cancelled):
            _int32([int(rows.ids.max(initial=0))])  # raises for an id that no model has
            first, starts, ends, word_starts = places.of_part(rows, read)
            types, closing_types = (
                (rows.types.astype(np.int32), rows.closing_types.astype(np.int32))
                if self._segments_of_one
                else (None, None)
            )
            yield WholeText(
                rows.ids.astype(np.int32),
                types,
                first,
                rows.end,
                starts,
                ends,
                word_starts,
                rows.closing_ids.astype(np.int32),
                closing_types,
            )

    @property
    def has_independent_words(self) -> bool:
        """True if the tokens of a part of a text that begins and ends between words (`word_starts`)
        are those of the text.
        """
        return self._cutter.has_independent_words

    def count_tokens(
        self, text: str, most: int, check_cancelled: CancelCheck = never_cancelled
    ) -> int:
        """Return the tokens of a text without special tokens; any number above `most` for more."""
        (part,) = self._cutter.parts([text], most, "end", check_cancelled, frame=False)
        return len(part.encoding)

    @property
    def frame_tokens(self) -> int:
        """Number of special tokens around a text."""
        added: int = self.tokenizer.num_special_tokens_to_add(False)
        return added

    def prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of the prompt at a sequence's beginning, with special ones
        before it (sentence-transformers' prompt_length).

        For a very long prompt, it is any number above the limit.
        """
        (part,) = self._cutter.parts([prompt], self.limit, "end", never_cancelled)
        encoding = part.encoding
        return len(encoding) - run_of_ones(reversed(encoding.special_tokens_mask))

    def leading_tokens(self) -> int:
        """Number of special tokens before a text."""
        (part,) = self._cutter.parts(["a"], self.limit, "end", never_cancelled)
        return run_of_ones(part.encoding.special_tokens_mask)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    def keep_whole(self, markers: Iterable[str]) -> None:
        """Add each marker, or its first word, that is in the vocabulary as a special token. Call it
        before the first text.

        Late-interaction models were trained with such tokens inserted by id; as plain text
        "[unused0]" would be split.
        """
        vocabulary = self.tokenizer.get_vocab()
        for marker in markers:
            token = next(
                (form for form in (marker, *marker.split()[:1]) if form in vocabulary), None
            )
            if token is not None and self.tokenizer.encode(
                token, add_special_tokens=False
            ).tokens != [token]:
                self.tokenizer.add_special_tokens(
                    [AddedToken(token, normalized=False, special=True)]
                )

    def _rows(
        self, part: TextEncoding, limit: int, truncation: Truncation, where: str
    ) -> NDArray[np.int64] | None:
        """Return the rows that truncation keeps: the special tokens around the text and one end of
        the text. None for all.
        """
        encoding = part.encoding
        tokens = len(encoding)
        if tokens == 0:
            raise InvalidInput(f"{where} has no token in the model's tokenizer", field=where)
        if tokens <= limit:
            return None
        if truncation == "none":
            raise too_long(where, tokens, limit, more=not part.is_whole)
        # The mask is set only by the tokenizer's template: "[SEP]" within the text does not count.
        mask = encoding.special_tokens_mask
        before, after = run_of_ones(mask), run_of_ones(reversed(mask))
        room = max(limit - before - after, 0)
        start = before if truncation == "end" else tokens - after - room
        return np.concatenate(
            [np.arange(before), np.arange(start, start + room), np.arange(tokens - after, tokens)]
        )

    def _cut_document(
        self, part: TextEncoding, room: int, truncation: Truncation, number: int
    ) -> None:
        if truncation == "none":
            where = f"documents[{number}].text"
            raise too_long(
                where, len(part.encoding) - room + self.limit, self.limit, more=not part.is_whole
            )
        if room < 1:
            needed = self.limit - room + 1
            raise too_long(
                "query.text",
                needed,
                self.limit,
                "with special tokens and at least one token of a document",
            )
        part.encoding.truncate(room, direction="right" if truncation == "end" else "left")

    def _pair(self, first: Encoding, second: Encoding, cut: str) -> InputSequence:
        pair = self.tokenizer.post_process(first, second)
        types = _int32(pair.type_ids) if self._segments else None
        return InputSequence(_int32(pair.ids), types, cut=cut)

    def _sequence(
        self, encoding: Encoding, rows: NDArray[np.int64] | None, where: str
    ) -> InputSequence:
        ids = _int32(encoding.ids)
        types = _int32(encoding.type_ids) if self._segments_of_one else None
        if rows is None:
            return InputSequence(ids, types)
        return InputSequence(ids[rows], None if types is None else types[rows], cut=where)

    def _spans(self, text: str, part: TextEncoding, rows: NDArray[np.int64] | None) -> Spans:
        encoding = part.encoding
        tokens = np.arange(len(encoding)) if rows is None else rows
        inside = np.flatnonzero(np.array(encoding.special_tokens_mask)[tokens] == 0)
        offsets = (
            np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)[tokens[inside]] + part.before
        )
        names = encoding.tokens
        continues = [
            self._continues(text, encoding.ids[token], names[token], int(start), int(end))
            for token, (start, end) in zip(tokens[inside], offsets, strict=True)
        ]
        return Spans(
            inside.astype(np.int32), offsets[:, 0], offsets[:, 1], np.array(continues, dtype=bool)
        )

    def _continues(self, text: str, token_id: int, token: str, start: int, end: int) -> bool:
        """Return whether a token continues a word: transformers' rule
        (TokenClassificationPipeline.gather_pre_entities).
        """
        if token_id == self.unknown:
            return False
        if self._marks_words:
            return len(token) != end - start
        return start > 0 and " " not in text[start - 1 : start + 1]


def special_token(directory: Path, role: str) -> str:
    """Return the token of a role such as `mask_token`, from tokenizer_config.json or
    special_tokens_map.json; empty without one.
    """
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
        raise InvalidInput(
            f"the model's tokenizer returns the id {max(values)}, which is too large"
        ) from None


def run_of_ones(mask: Iterable[int]) -> int:
    count = 0
    for value in mask:
        if not value:
            break
        count += 1
    return count


def too_long(
    where: str, tokens: int, limit: int, how: str = "special tokens included", *, more: bool = False
) -> InputTooLong:
    """Return the error for a text of too many tokens. With `more`, their number is unknown and only
    exceeds `limit`."""
    count = f"more than {limit}" if more else tokens
    message = (
        f"{where} has {count} tokens, {how}; the model's maximum is {limit}. Shorten it, or "
        "request truncation END or START"
    )
    return InputTooLong(message, field=where)

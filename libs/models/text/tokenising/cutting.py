"""Truncated tokenisation: a long text is tokenised only as far as its kept first or last tokens
need, with identical results.

Tokenizers work locally: the tokens of a word depend only on its neighbourhood.

1. A shortened text is tokenised. Only tokens of whole words that are far enough from the cut count.
2. While these are too few, a longer part is tokenised.
3. The whole text is tokenised if a normaliser or pre-tokeniser is not known to work locally
   (`_Reach`), and if the text is a single word, because its tokens may depend on its last letter.
4. Such a text of more than FAR_CHARACTERS is shortened nevertheless if that leaves enough tokens,
   because the library takes some 260 bytes per character of a text of punctuation. The removed part
   is a multiple of PERIOD, so that groups of digits and runs of spaces stay aligned. Tokens of such
   a text may differ from those of the whole where a tokenizer depends on its length otherwise.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from libs.models.interface.work import CancelCheck, Truncation

SLICE_CHARACTERS: Final = 32 << 10
"""Characters tokenised between two cancellation checks, or a single longer text that cannot be cut.
This takes about 15 ms of one thread, and other work waits."""

MIN_CUT_CHARACTERS: Final = 4096
"""Texts of up to this number of characters are tokenised whole."""

_CHARACTERS_PER_TOKEN: Final = 16
"""Characters per token, for texts that are tokenised whole and the first attempt at longer ones.
Hardly any text needs more.
"""

MARGIN: Final = 256
"""Characters at a cut. Their tokens do not count, nor do `NEAR` tokens. Added tokens are shorter
(`_Reach`).
"""

NEAR: Final = 64
FAR_CHARACTERS: Final = 1 << 17
"""Characters from which on all tokens count, except NEAR tokens at the cut, even within a word."""
PERIOD: Final = 5040
"""A multiple of the lengths of tokens of repeated characters: 1 to 10, 12, 14, 15, 16 and more."""
_MAX_MARKS: Final = 1024
_MARK: Final = "▁"
"""The metaspace, which represents a space in SentencePiece's tokens."""

# A letter or digit, then a space: every pre-tokeniser of `_SPLITTERS` begins a word there, in any
# context.
_LETTER: Final = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-Ωα-ωА-я가-힣"
_BORDER: Final = re.compile(f"(?<=[{_LETTER}]) ")

_NORMALIZERS: Final = frozenset(
    ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer",
     "Prepend", "Precompiled", "Strip", "ByteLevel", "Replace"]
)  # fmt: skip
_NORMALIZERS_OF_LETTERS: Final = frozenset(["BertNormalizer", "Lowercase"])
"""Normalisers of which each output character depends on one letter with its marks."""
_PRE_TOKENIZERS: Final = frozenset(
    [
        "Sequence",
        "BertPreTokenizer",
        "Whitespace",
        "WhitespaceSplit",
        "Metaspace",
        "ByteLevel",
        "Digits",
        "Punctuation",
        "Split",
    ]
)
_SPLITTERS: Final = frozenset(["BertPreTokenizer", "Whitespace", "WhitespaceSplit"])
_SPACES: Final = re.compile(r"(?: |\\s|\[ \])(?:\+|\{\d+,\d*\})?")
"""Patterns that match only spaces."""
_LOOKS: Final = re.compile(r"\(\?(?:[=!]|<[=!])|\\[bBAzZG]|\^|\$")
_CLASS: Final = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]")
_PUBLISHED: Final = frozenset(
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        # Llama 3, Qwen 2
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
"""Patterns that begin a word at every border, as the patterns show."""


def sliced(sizes: Sequence[int], check_cancelled: CancelCheck) -> Iterator[range]:
    """Yield ranges of items of these sizes in characters, in order: at most SLICE characters or one
    item each. `check_cancelled` is called before each.
    """
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > SLICE_CHARACTERS:
            check_cancelled()
            yield range(begin, number)
            begin, total = number, 0
        total += size
    if begin < len(sizes):
        check_cancelled()
        yield range(begin, len(sizes))


def encoded(
    texts: Sequence[str],
    encode: Callable[[list[str]], list[Encoding]],
    check_cancelled: CancelCheck,
) -> Iterator[Encoding]:
    """Yield the encoding of each whole text, in order."""
    for numbers in sliced([len(text) for text in texts], check_cancelled):
        yield from encode([texts[number] for number in numbers])


@dataclass(frozen=True, slots=True)
class TextEncoding:
    """The encoding of a text, or of a part of it."""

    encoding: Encoding
    is_whole: bool = True
    before: int = 0
    """Characters of the text before the encoded part."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """Locality of a tokenizer."""

    forward: bool
    """A text's beginning determines its first tokens."""
    backward: bool
    """A text's end, from a border on, determines its last tokens."""
    marks: bool
    """A token that begins with the metaspace begins at a space, because no token has the metaspace
    elsewhere."""
    words: bool
    """The tokens of a part of a text that begins and ends between words are those of the text."""

    @staticmethod
    def from_tokenizer(tokenizer: Tokenizer) -> _Reach:
        normalizers, splitters = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        forward = (
            all(
                one["type"] in _NORMALIZERS and (one["type"] != "Replace" or _replaces_nearby(one))
                for one in normalizers
            )
            and all(
                one["type"] in _PRE_TOKENIZERS and (one["type"] != "Split" or _splits_nearby(one))
                for one in splitters
            )
            and max(map(len, added), default=0) < NEAR
        )
        splits = any(map(_splits_at_borders, splitters))
        marks = (
            forward
            and not splits
            and not any(_MARK in token.lstrip(_MARK) for token in tokenizer.get_vocab())
        )
        keeps = all(
            one["type"] != "Split" or _splits_at_borders(one) for one in splitters
        ) and not any(map(_loses_spaces, normalizers))
        # Unigram sums scores from the beginning, so rounding could change the result.
        is_sum = type(tokenizer.model).__name__ == "Unigram"
        backward = (
            forward
            and keeps
            and (splits or (marks and not is_sum))
            and not any(" " in token.strip() for token in added)
        )
        words = (
            all(one["type"] in _NORMALIZERS_OF_LETTERS for one in normalizers)
            and bool(splitters)
            and all(one["type"] in _SPLITTERS for one in splitters)
            and not any(
                token.single_word for token in tokenizer.get_added_tokens_decoder().values()
            )
        )
        return _Reach(forward, backward, marks, words)


class Cutter:
    """Cuts texts for one tokenizer, which must not change after the first text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _reach(self) -> _Reach:
        return _Reach.from_tokenizer(self._tokenizer)

    @property
    def is_local(self) -> bool:
        """True if a text's beginning determines its first tokens."""
        return self._reach.forward

    @property
    def has_independent_words(self) -> bool:
        """True if the tokens of a part of a text that begins and ends between words are those of
        the text.
        """
        return self._reach.words

    def encode(self, text: str) -> Encoding:
        """Return all tokens of a text, with special tokens and offsets."""
        return self._encode(text, frame=True)

    def settled(self, encoding: Encoding, text: str) -> int:
        """Return how many of the first tokens stay the same if text follows; the token after them
        begins a word.
        """
        return self._first(encoding, text, len(text))

    def borders(self, encoding: Encoding) -> NDArray[np.int64]:
        """Return the rows of tokens that begin a word."""
        return self._borders(encoding, _own(encoding))

    @staticmethod
    def ordinary(most: int) -> int:
        """Return the characters up to which a text is tokenised whole if `most` of its tokens are
        kept."""
        return max(MIN_CUT_CHARACTERS, _CHARACTERS_PER_TOKEN * most)

    def parts(
        self,
        texts: Sequence[str],
        most: int,
        side: Truncation,
        check_cancelled: CancelCheck,
        *,
        prompt: str = "",
        before: str = "",
        after: str = "",
        frame: bool = True,
        placed: bool = False,
    ) -> Iterator[TextEncoding]:
        """Encode each text in order, after the prompt, which may also be cut: `before + text +
        after`, or a part of the text.

        A part has more than `most` tokens, without the special ones of the `frame`. Truncating it
        within the text to that number or fewer gives the same tokens as truncating the whole.

        Args:
            side: "start" keeps the text's end, otherwise its beginning is kept.
            placed: Tokens have offsets in `prompt + text`.
        """
        encode = self._tokenizer.encode_batch if placed else self._tokenizer.encode_batch_fast
        ordinary, lead = self.ordinary(most), before + prompt
        shared: dict[str, TextEncoding] | None = {} if prompt else None
        sizes = [len(prompt) + len(text) for text in texts]
        for numbers in sliced(
            [len(before) + min(size, ordinary) + len(after) for size in sizes], check_cancelled
        ):
            short = [texts[number] for number in numbers if sizes[number] <= ordinary]
            chosen = [f"{lead}{text}{after}" for text in short] if lead or after else short
            found = iter(encode(chosen, add_special_tokens=frame))
            for number in numbers:
                if sizes[number] <= ordinary:
                    yield TextEncoding(next(found))
                else:
                    yield self._long(
                        prompt + texts[number],
                        most,
                        side,
                        check_cancelled,
                        before,
                        after,
                        frame=frame,
                        placed=placed,
                        shared=shared,
                    )

    def _long(
        self,
        text: str,
        most: int,
        side: Truncation,
        check_cancelled: CancelCheck,
        before: str,
        after: str,
        *,
        frame: bool,
        placed: bool,
        shared: dict[str, TextEncoding] | None,
    ) -> TextEncoding:
        """Encode a long text. `shared` is the last long text's result, which is reused if both are
        cut to the same prompt and no text.
        """
        size, is_start = self.ordinary(most), side == "start"
        is_framed = bool(before if is_start else after)
        while size < len(text):
            check_cancelled()
            is_far = size >= FAR_CHARACTERS
            cut = self._cut(text, size, is_start=is_start, is_framed=is_framed)
            if is_far and (cut is None or cut == (size, len(text))):
                cut = _aligned(text, size, is_start=is_start, is_framed=is_framed)
            if cut is None:
                if is_far or len(text) <= FAR_CHARACTERS:
                    break
                size = FAR_CHARACTERS
                continue
            begin, end = cut
            shorter = f"{before}{text[:begin]}{text[end:]}{after}"
            if shared is not None and shorter in shared:
                return shared[shorter]
            encoding = self._encode(shorter, frame=frame)
            seam = len(before) + begin
            if self._kept(encoding, shorter, seam, is_start=is_start, is_far=is_far) > most:
                part = TextEncoding(encoding, is_whole=False, before=0 if begin else end)
                if shared is not None:
                    shared.clear()
                    shared[shorter] = part
                return part
            size *= 2
        check_cancelled()
        return TextEncoding(self._encode(before + text + after, frame=frame, placed=placed))

    def _encode(self, text: str, *, frame: bool, placed: bool = True) -> Encoding:
        """Encode a batch of one, because `encode` would hold the GIL, and so block the device
        thread, until it returns. Without offsets this takes two thirds of the memory.
        """
        encode = self._tokenizer.encode_batch if placed else self._tokenizer.encode_batch_fast
        encoding: Encoding = encode([text], add_special_tokens=frame)[0]
        return encoding

    def _cut(
        self, text: str, size: int, *, is_start: bool, is_framed: bool
    ) -> tuple[int, int] | None:
        """Return the range to remove: about `size` characters stay on one side and, with
        `is_framed`, some on the other. None for no cut.
        """
        if not (self._reach.backward if is_start or is_framed else self._reach.forward):
            return None
        cut = _cut_anywhere(text, size, is_start=is_start, is_framed=is_framed)
        if cut is None or not (is_start or is_framed):
            return cut
        begin, end = cut
        if is_framed:
            begin = _border(text, begin, begin + size)
        end = _border(text, end, end + MIN_CUT_CHARACTERS // 8)
        return (begin, end) if 0 <= begin < end else None

    def _kept(
        self, encoding: Encoding, text: str, seam: int, *, is_start: bool, is_far: bool
    ) -> int:
        """Return the number of tokens on the kept side that do not depend on the other side; with
        `is_far`, all but NEAR tokens at the seam.
        """
        found = self._last(encoding, seam) if is_start else self._first(encoding, text, seam)
        if not is_far:
            return found
        rows, (starts, _) = _own(encoding), _offsets(encoding)
        before = int(np.count_nonzero(starts[rows] < seam))
        return max(found, (len(rows) - before if is_start else before) - NEAR)

    def _first(self, encoding: Encoding, text: str, seam: int) -> int:
        """Return the number of first tokens that do not depend on the text after the seam (the
        position of the cut).
        """
        rows = _own(encoding)
        starts, ends = _offsets(encoding)
        there = int(np.count_nonzero(starts[rows] < seam))
        if there <= NEAR:
            return 0
        near = _settled(text, max(0, min(seam - MARGIN, int(starts[rows[there - NEAR]]))))
        beyond = rows[ends[rows] > near]
        borders = self._borders(encoding, rows)
        return int(borders[borders <= beyond[0]][-1]) if len(beyond) else 0

    def _last(self, encoding: Encoding, seam: int) -> int:
        """Return the number of last tokens that do not depend on the text before the seam, which is
        at a border.
        """
        rows = _own(encoding)
        starts, _ = _offsets(encoding)
        borders = self._borders(encoding, rows)
        beyond = borders[starts[borders] >= seam + MARGIN]
        return int(rows[-1]) + 1 - int(beyond[0]) if len(beyond) else 0

    def _borders(self, encoding: Encoding, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of tokens that begin a word in any context."""
        words = np.array(
            [-1 if word is None else word for word in encoding.word_ids], dtype=np.int64
        )[rows]
        begins = np.diff(words, prepend=-1) != 0
        if self._reach.marks:
            names = encoding.tokens
            marked = np.array([names[row].startswith(_MARK) for row in rows], dtype=bool)
            ending = np.array([names[row].endswith(_MARK) for row in rows], dtype=bool)
            begins |= marked & ~np.concatenate([[False], ending[:-1]])
        found: NDArray[np.int64] = rows[begins]
        return found


def _own(encoding: Encoding) -> NDArray[np.int64]:
    """Return the rows of tokens that are not special tokens."""
    return np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)


def _offsets(encoding: Encoding) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    found = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _cut_anywhere(
    text: str, size: int, *, is_start: bool, is_framed: bool
) -> tuple[int, int] | None:
    """Return a range to remove as `Cutter._cut` does, without regard to words."""
    kept = MIN_CUT_CHARACTERS // 4 if is_framed else 0
    begin, end = (kept, len(text) - size) if is_start else (size, len(text) - kept)
    return (begin, end) if begin < end else None


def _aligned(text: str, size: int, *, is_start: bool, is_framed: bool) -> tuple[int, int] | None:
    """Return a range as `_cut_anywhere` does, of a multiple of PERIOD characters."""
    cut = _cut_anywhere(text, size, is_start=is_start, is_framed=is_framed)
    if cut is None:
        return None
    begin, end = cut
    further = (end - begin) % PERIOD
    begin, end = (begin, end - further) if is_start else (begin + further, end)
    return (begin, end) if begin < end else None


def _border(text: str, begin: int, end: int) -> int:
    """Return the first border between the two, -1 without one."""
    found = _BORDER.search(text, begin, end)
    return -1 if found is None else found.start()


def _settled(text: str, near: int) -> int:
    """Return the last position up to `near` outside spaces and a letter's combining marks, which
    later text may change.
    """
    near = len(text[:near].rstrip())
    for place in range(near, max(near - _MAX_MARKS, 0), -1):
        if place == len(text) or not unicodedata.combining(text[place]):
            return place
    return 0


def _parts(part: Any) -> list[dict[str, object]]:
    """Return a normaliser or pre-tokeniser and its components, as in tokenizer.json."""
    if part is None:
        return []
    found: list[dict[str, object]] = []
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and "type" in one:
            found.append(one)
            for inner in ("normalizers", "pretokenizers"):
                waiting += one.get(inner, [])
    return found


def _pattern(part: dict[str, object]) -> tuple[str, str]:
    """Return the pattern as a string and as a regular expression; one of them is empty."""
    pattern = part.get("pattern")
    found = pattern if isinstance(pattern, dict) else {}
    return str(found.get("String", "")), str(found.get("Regex", ""))


def _replaces_nearby(part: dict[str, object]) -> bool:
    string, pattern = _pattern(part)
    return 0 < len(string) < NEAR or bool(_SPACES.fullmatch(pattern))


def _splits_nearby(part: dict[str, object]) -> bool:
    """Return whether matches stay words, or are only spaces, and depend on no text outside the
    match."""
    string, pattern = _pattern(part)
    if part.get("invert"):
        return False
    if _SPACES.fullmatch(pattern) or 0 < len(string) < NEAR:
        return True
    looks = _LOOKS.search(_CLASS.sub("", pattern.replace(r"(?!\S)", "")))
    return bool(pattern) and looks is None and part.get("behavior") != "Removed"


def _splits_at_borders(part: dict[str, object]) -> bool:
    match part["type"]:
        case "Metaspace":
            return part.get("split") is not False
        case "ByteLevel":
            return part.get("use_regex") is not False
        case "Split":
            return (
                _pattern(part)[1] in _PUBLISHED
                and part.get("behavior") == "Isolated"
                and not part.get("invert")
            )
    return part["type"] in _SPLITTERS


def _loses_spaces(part: dict[str, object]) -> bool:
    string, pattern = _pattern(part)
    content = str(part.get("content", ""))
    return (
        part["type"] == "Replace"
        and (" " in string or bool(pattern))
        and not any(space in content for space in (" ", _MARK))
    )

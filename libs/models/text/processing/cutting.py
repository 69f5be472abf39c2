"""How much of a long text must be tokenised, when only its first or last tokens are kept: exactly those of the whole text.

Tokenizers work piece by piece: what a piece becomes depends on what is near it. So a text is shortened, tokenised, and of the
result only the tokens count that are whole words and far enough from where it was cut; while these are too few, more is taken.
That holds for normalisers and pre-tokenisers whose reach is known (`_Reach`). With others, and for a text that is one single word
(its pieces may depend on its last letter), the whole text is tokenised.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from libs.models.work import GoOn, Truncation

SLICE: Final = 32 << 10
"""Characters that are tokenised between two looks at whether the job is still wanted, and others wait; a single longer text if it
cannot be cut. About 15 ms of one thread."""

LEAST: Final = 4096
"""Characters: texts up to so long are tokenised whole."""

_TOKEN: Final = 16
"""Characters a token, of a text that is taken whole and of the first attempt at a longer one: hardly any text needs more."""

_MARGIN: Final = 256
"""Characters and, beside it, `_NEAR` tokens at a cut that do not count. Added tokens are shorter (`_Reach`)."""

_NEAR: Final = 64
_MOST_MARKS: Final = 1024
_MARK: Final = "▁"
"""What stands for a space in the pieces of SentencePiece."""

# A letter or digit, then a space: every pre-tokeniser of `_SPLITTERS` begins a word there, whatever comes before or after.
_LETTER: Final = "0-9A-Za-zÀ-ÖØ-öø-ɏΑ-Ωα-ωА-я가-힣"
_BORDER: Final = re.compile(f"(?<=[{_LETTER}]) ")

_NORMALIZERS: Final = frozenset(
    ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer", "Prepend", "Precompiled",
     "Strip", "ByteLevel", "Replace"]
)  # fmt: skip
_PRE_TOKENIZERS: Final = frozenset(
    ["Sequence", "BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Metaspace", "ByteLevel", "Digits", "Punctuation", "Split"]
)
_SPLITTERS: Final = frozenset(["BertPreTokenizer", "Whitespace", "WhitespaceSplit"])
_SPACES: Final = re.compile(r"(?: |\\s|\[ \])(?:\+|\{\d+,\d*\})?")
"""Patterns that find nothing but spaces."""
_LOOKS: Final = re.compile(r"\(\?(?:[=!]|<[=!])|\\[bBAzZG]|\^|\$")
_CLASS: Final = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]")
_PUBLISHED: Final = frozenset(
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        # Llama 3, Qwen 2
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
"""Patterns that begin a word at every border, as can be read in them."""


def sliced(sizes: Many[int], go_on: GoOn) -> Iterator[range]:
    """The numbers of items of so many characters each, in order, at most SLICE at a time or one item; `go_on` before each."""
    begin = total = 0
    for number, size in enumerate(sizes):
        if number > begin and total + size > SLICE:
            go_on()
            yield range(begin, number)
            begin, total = number, 0
        total += size
    if begin < len(sizes):
        go_on()
        yield range(begin, len(sizes))


def encoded(texts: Many[str], encode: Callable[[list[str]], list[Encoding]], go_on: GoOn) -> Iterator[Encoding]:
    """Of each text in order, whole."""
    for numbers in sliced([len(text) for text in texts], go_on):
        yield from encode([texts[number] for number in numbers])


@dataclass(frozen=True, slots=True)
class Part:
    """`encoding` of a text, or of a part of it; `before`: characters of the text that are left out before all that is here."""

    encoding: Encoding
    is_whole: bool = True
    before: int = 0


@dataclass(frozen=True, slots=True)
class _Reach:
    """Of a tokenizer. `forward`: a beginning of a text tells its first tokens. `backward`: so does its end from a border on.

    `marks`: a token that begins with the mark of a space begins at one, as no token has the mark behind anything else.
    """

    forward: bool
    backward: bool
    marks: bool

    @staticmethod
    def of(tokenizer: Tokenizer) -> _Reach:
        normalizers, splitters = _parts(tokenizer.normalizer), _parts(tokenizer.pre_tokenizer)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        forward = (
            all(one["type"] in _NORMALIZERS and (one["type"] != "Replace" or _replaces_nearby(one)) for one in normalizers)
            and all(one["type"] in _PRE_TOKENIZERS and (one["type"] != "Split" or _splits_nearby(one)) for one in splitters)
            and max(map(len, added), default=0) < _NEAR
        )
        splits = any(map(_splits_at_borders, splitters))
        marks = forward and not splits and not any(_MARK in token.lstrip(_MARK) for token in tokenizer.get_vocab())
        keeps = all(one["type"] != "Split" or _splits_at_borders(one) for one in splitters) and not any(
            map(_loses_spaces, normalizers)
        )
        is_sum = type(tokenizer.model).__name__ == "Unigram"  # of scores from the beginning, which a rounding could tip
        backward = forward and keeps and (splits or (marks and not is_sum)) and not any(" " in token.strip() for token in added)
        return _Reach(forward, backward, marks)


class Cutter:
    """Of one tokenizer, which must not change any more once the first text came."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _reach(self) -> _Reach:
        return _Reach.of(self._tokenizer)

    @staticmethod
    def ordinary(most: int) -> int:
        """Characters of a text that is tokenised whole in any case, where `most` of its tokens are kept."""
        return max(LEAST, _TOKEN * most)

    def parts(
        self,
        texts: Many[str],
        most: int,
        side: Truncation,
        go_on: GoOn,
        *,
        prompt: str = "",
        before: str = "",
        after: str = "",
        frame: bool = True,
        placed: bool = False,
    ) -> Iterator[Part]:
        """Of each text in order, with the prompt before it, which may be cut, too: `before + text + after`, or less of the text.

        Then there are more than `most` tokens, the special ones of the `frame` not counted, and what is left when they are cut to
        so many or fewer, within the text, is what is left of the whole. `side` "start": the text's end is kept, else its beginning.
        `placed`: tokens know their places in `prompt + text`.
        """
        encode = self._tokenizer.encode_batch if placed else self._tokenizer.encode_batch_fast
        ordinary, lead = self.ordinary(most), before + prompt
        shared: dict[str, Part] | None = {} if prompt else None
        sizes = [len(prompt) + len(text) for text in texts]
        for numbers in sliced([len(before) + min(size, ordinary) + len(after) for size in sizes], go_on):
            short = [texts[number] for number in numbers if sizes[number] <= ordinary]
            chosen = [f"{lead}{text}{after}" for text in short] if lead or after else short
            found = iter(encode(chosen, add_special_tokens=frame))
            for number in numbers:
                if sizes[number] <= ordinary:
                    yield Part(next(found))
                else:
                    yield self._long(prompt + texts[number], most, side, go_on, before, after, frame=frame, shared=shared)

    def _long(
        self,
        text: str,
        most: int,
        side: Truncation,
        go_on: GoOn,
        before: str,
        after: str,
        *,
        frame: bool,
        shared: dict[str, Part] | None,
    ) -> Part:
        """`shared`: what became of the text before, which is this one's too where both are cut to nothing but the same prompt."""
        size = self.ordinary(most)
        while size < len(text):
            go_on()
            cut = self._cut(text, size, is_start=side == "start", is_framed=bool(before if side == "start" else after))
            if cut is None:
                break
            begin, end = cut
            shorter = f"{before}{text[:begin]}{text[end:]}{after}"
            if shared is not None and shorter in shared:
                return shared[shorter]
            encoding = self._encode(shorter, frame=frame)
            seam = len(before) + begin
            if (self._last(encoding, seam) if side == "start" else self._first(encoding, shorter, seam)) > most:
                part = Part(encoding, is_whole=False, before=0 if begin else end)
                if shared is not None:
                    shared.clear()
                    shared[shorter] = part
                return part
            size *= 2
        go_on()
        return Part(self._encode(before + text + after, frame=frame))

    def _encode(self, text: str, *, frame: bool) -> Encoding:
        """As a batch of one: `encode` would keep the interpreter, and so the device's thread waiting, until it is done."""
        encoding: Encoding = self._tokenizer.encode_batch([text], add_special_tokens=frame)[0]
        return encoding

    def _cut(self, text: str, size: int, *, is_start: bool, is_framed: bool) -> tuple[int, int] | None:
        """What to leave out: about `size` characters stay at one side; `is_framed`: some at the other as well. None: nothing."""
        if not (self._reach.backward if is_start or is_framed else self._reach.forward):
            return None
        if not (is_start or is_framed):
            return size, len(text)
        kept = LEAST // 4
        begin = (kept if is_framed else 0) if is_start else size
        end = len(text) - (size if is_start else kept)
        if is_framed:
            begin = _border(text, begin, begin + size)
        end = _border(text, end, end + kept // 2)
        return (begin, end) if 0 <= begin < end else None

    def _first(self, encoding: Encoding, text: str, seam: int) -> int:
        """How many tokens of the encoding, from its first, are those of any text that begins as this one does before the seam."""
        rows = _own(encoding)
        starts, ends = _offsets(encoding)
        there = int(np.count_nonzero(starts[rows] < seam))
        if there <= _NEAR:
            return 0
        near = _settled(text, max(0, min(seam - _MARGIN, int(starts[rows[there - _NEAR]]))))
        beyond = rows[ends[rows] > near]
        borders = self._borders(encoding, rows)
        return int(borders[borders <= beyond[0]][-1]) if len(beyond) else 0

    def _last(self, encoding: Encoding, seam: int) -> int:
        """The same from the last token, of any text that ends as this one does behind the seam, which is at a border."""
        rows = _own(encoding)
        starts, _ = _offsets(encoding)
        borders = self._borders(encoding, rows)
        beyond = borders[starts[borders] >= seam + _MARGIN]
        return int(rows[-1]) + 1 - int(beyond[0]) if len(beyond) else 0

    def _borders(self, encoding: Encoding, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of tokens that begin a word, whatever stands before."""
        words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)[rows]
        begins = np.diff(words, prepend=-1) != 0
        if self._reach.marks:
            names = encoding.tokens
            marked = np.array([names[row].startswith(_MARK) for row in rows], dtype=bool)
            ending = np.array([names[row].endswith(_MARK) for row in rows], dtype=bool)
            begins |= marked & ~np.concatenate([[False], ending[:-1]])
        found: NDArray[np.int64] = rows[begins]
        return found


def _own(encoding: Encoding) -> NDArray[np.int64]:
    """Rows of the tokens that no frame has put there."""
    return np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)


def _offsets(encoding: Encoding) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    found = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _border(text: str, begin: int, end: int) -> int:
    """The first border between the two, -1 if there is none."""
    found = _BORDER.search(text, begin, end)
    return -1 if found is None else found.start()


def _settled(text: str, near: int) -> int:
    """The last place before `near` that is not within spaces, nor within a letter and its accents: what comes may change these."""
    near = len(text[:near].rstrip())
    for place in range(near, max(near - _MOST_MARKS, 0), -1):
        if place == len(text) or not unicodedata.combining(text[place]):
            return place
    return 0


def _parts(part: Any) -> list[dict[str, object]]:
    """A normaliser or pre-tokeniser and those that it is made of, as tokenizer.json has them."""
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
    """As a string and as a regular expression: one of them is empty."""
    pattern = part.get("pattern")
    found = pattern if isinstance(pattern, dict) else {}
    return str(found.get("String", "")), str(found.get("Regex", ""))


def _replaces_nearby(part: dict[str, object]) -> bool:
    string, pattern = _pattern(part)
    return 0 < len(string) < _NEAR or bool(_SPACES.fullmatch(pattern))


def _splits_nearby(part: dict[str, object]) -> bool:
    """A match that is seen as a word, or has nothing but spaces, and does not depend on what it does not hold."""
    string, pattern = _pattern(part)
    if part.get("invert"):
        return False
    if _SPACES.fullmatch(pattern) or 0 < len(string) < _NEAR:
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
            return _pattern(part)[1] in _PUBLISHED and part.get("behavior") == "Isolated" and not part.get("invert")
    return part["type"] in _SPLITTERS


def _loses_spaces(part: dict[str, object]) -> bool:
    string, pattern = _pattern(part)
    content = str(part.get("content", ""))
    return part["type"] == "Replace" and (" " in string or bool(pattern)) and not any(space in content for space in (" ", _MARK))

"""Limits on the requests of a tokenizer.json: growth of texts and of ids, special tokens around a
text, sizes of the vocabulary.

The `tokenizers` library obeys any file, even one that adds twenty million tokens around each text,
and aborts the process when memory runs out. The JSON is therefore validated before the library
reads it, and every violation is a ModelBroken that names the key.
"""

from __future__ import annotations

import base64
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final

from libs.catalog.checkpoint.files import CheckpointConfig, shortened
from libs.models.text.tokenising.regexes import PUBLISHED, slow, tried

MAX_SPECIAL: Final = 64
"""Maximum special tokens added around a text or a pair."""
MAX_GROWTH: Final = 16
"""Maximum growth factor in bytes of normaliser and pre-tokenizer, beyond that of Unicode's normal
forms and the first ByteLevel.
"""
MAX_PUT_BEFORE: Final = 1024
MAX_PARTS: Final = 64
MAX_NAME: Final = 1024
"""Maximum characters of an added or special token: each occurrence in a text gets a copy."""
MAX_ADDED: Final = 100_000
MAX_ADDED_CHARACTERS: Final = 4_000_000
"""Maximum characters of all added tokens, after the normaliser's growth."""
MAX_WORD: Final = 200
"""Maximum characters of a word of WordPiece, which takes quadratic time. Published tokenizers have
100."""
MAX_PIECE: Final = 256
MAX_PIECES: Final = 4_000_000
"""Maximum characters of all pieces of Unigram. Each takes the library up to 200 bytes."""
_MAX_SHARED: Final = 64
_COMMON_REPLACEMENT: Final = 33
"""Maximum bytes into which published charsmaps expand one character, as NFKC does."""
_FACTORS: Final[Mapping[str, int]] = {"ByteLevel": 12, "Metaspace": 4}
"""Growth factor in bytes of a second such step, with Unicode's normal forms after it. Published
tokenizers have at most one of each.
"""


def refuse_bombs(config: CheckpointConfig) -> None:
    """Raise ModelBroken with the key of a tokenizer.json that would take too much time or memory
    (resource exhaustion).
    """
    _refuse_frames(config)
    growth = _refuse_growth(config)
    _refuse_decoder(config)
    _refuse_added(config, growth)
    model = config.part("model")
    _refuse_words(model)
    _refuse_vocabulary(model)
    _refuse_patterns(config)


def _refuse_frames(config: CheckpointConfig) -> None:
    """Limit special tokens around texts. A template may contain each text only once, because every
    repetition would copy it.
    """
    counts: Counter[str] = Counter()
    for part in _objects(config.values.get("post_processor")):
        special = part.get("special_tokens")
        sizes = (
            {name: _count_ids(value) for name, value in special.items()}
            if isinstance(special, dict)
            else {}
        )
        for key in ("single", "pair"):
            pieces = part.get(key)
            if isinstance(pieces, list):
                counts[key] += sum(_special(piece, sizes) for piece in pieces)
                texts = Counter(_text(piece) for piece in pieces)
                if any(count > 1 for text, count in texts.items() if text):
                    raise config.broken("post_processor", f"repeats a text in `{key}`")
        for text in _texts(part):
            if len(text) > MAX_NAME:
                raise config.broken(
                    "post_processor",
                    f"has a token of {len(text):,} characters; the maximum is {MAX_NAME:,}",
                )
    for key, what in (("single", "a single text"), ("pair", "a pair of texts")):
        if counts[key] > MAX_SPECIAL:
            raise config.broken(
                "post_processor",
                f"adds {counts[key]:,} tokens around {what}; the maximum is {MAX_SPECIAL}",
            )


def _count_ids(special: object) -> int:
    """Return the number of ids of a template's special token."""
    if not isinstance(special, dict):
        return 1
    return max(
        (len(ids) for key in ("ids", "tokens") if isinstance(ids := special.get(key), list)),
        default=1,
    )


def _special(piece: object, sizes: Mapping[str, int]) -> int:
    inner = piece.get("SpecialToken") if isinstance(piece, dict) else None
    name = inner.get("id") if isinstance(inner, dict) else None
    return sizes.get(name, 1) if isinstance(name, str) else 0


def _text(piece: object) -> str:
    inner = piece.get("Sequence") if isinstance(piece, dict) else None
    return str(inner.get("id")) if isinstance(inner, dict) else ""


def _refuse_growth(config: CheckpointConfig) -> int:
    """Return the growth factor in bytes. Raises ModelBroken above the limit."""
    growth, before = 1, 0
    seen: Counter[str] = Counter()
    for key in ("normalizer", "pre_tokenizer"):
        parts = [
            part for part in _objects(config.values.get(key)) if isinstance(part.get("type"), str)
        ]
        if len(parts) > MAX_PARTS:
            raise config.broken(key, f"has {len(parts):,} parts; the maximum is {MAX_PARTS}")
        for part in parts:
            kind = str(part["type"])
            growth *= _growth(part) if kind not in _FACTORS or seen[kind] == 0 else _FACTORS[kind]
            before += len(str(part.get("prepend") or ""))
            seen[kind] += 1
        if growth > MAX_GROWTH:
            raise config.broken(
                key, f"can expand one byte to {growth:,}; the maximum is {MAX_GROWTH}"
            )
        if before > MAX_PUT_BEFORE:
            raise config.broken(
                key,
                f"puts {before:,} characters before a text; the maximum is {MAX_PUT_BEFORE:,}",
            )
    return growth


def _refuse_decoder(config: CheckpointConfig) -> None:
    """Limit the ratio of the decoder's text to the names of its tokens."""
    growth = 1
    parts = [
        part for part in _objects(config.values.get("decoder")) if isinstance(part.get("type"), str)
    ]
    if len(parts) > MAX_PARTS:
        raise config.broken("decoder", f"has {len(parts):,} parts; the maximum is {MAX_PARTS}")
    for part in parts:
        growth *= _growth(part)
        for text in _texts(part):
            if len(text) > MAX_NAME:
                raise config.broken(
                    "decoder",
                    f"has a text of {len(text):,} characters; the maximum is {MAX_NAME:,}",
                )
        if growth > MAX_GROWTH:
            raise config.broken(
                "decoder", f"can expand one byte to {growth:,}; the maximum is {MAX_GROWTH}"
            )


def _growth(part: Mapping[str, object]) -> int:
    """Return the growth factor of a normaliser or pre-tokenizer for a text that it replaces
    entirely."""
    charsmap = part.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        return max(1, ceil(_longest_replacement(charsmap) / _COMMON_REPLACEMENT))
    content, pattern = part.get("content"), part.get("pattern")
    if part.get("type") != "Replace" or not isinstance(content, str) or not content:
        return 1
    found = pattern.get("String") if isinstance(pattern, dict) else None
    # A pattern may match the empty string everywhere, which changes nothing.
    return (
        ceil(_bytes(content) / _bytes(found))
        if isinstance(found, str) and found
        else _bytes(content) + _finds_nothing(pattern)
    )


def _finds_nothing(pattern: object) -> int:
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return 0 if regex in PUBLISHED else 1


def _longest_replacement(charsmap: str) -> int:
    """Return the bytes of the longest replacement.

    SentencePiece's format is four bytes with the length of a table, the table, then replacements
    that end with a zero.
    """
    try:
        data = base64.b64decode(charsmap)
    except ValueError:
        return 0  # the library reports the error
    return max(
        _bytes(part.decode("utf-8", "replace"))
        for part in data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    )


def _bytes(text: str) -> int:
    """Return the UTF-8 bytes after NFKD, the longest of Unicode's normal forms."""
    return len(unicodedata.normalize("NFKD", text).encode("utf-8", "replace"))


def _refuse_added(config: CheckpointConfig, growth: int) -> None:
    """Limit added tokens, because the library builds one automaton of all of them, normalised."""
    tokens = config.values.get("added_tokens")
    if not isinstance(tokens, list):
        return
    if len(tokens) > MAX_ADDED:
        raise config.broken(
            "added_tokens", f"has {len(tokens):,} tokens; the maximum is {MAX_ADDED:,}"
        )
    lengths = [len(str(token.get("content") or "")) for token in tokens if isinstance(token, dict)]
    if max(lengths, default=0) > MAX_NAME:
        raise config.broken(
            "added_tokens",
            f"has a token of {max(lengths):,} characters; the maximum is {MAX_NAME:,}",
        )
    if sum(lengths) * growth > MAX_ADDED_CHARACTERS:
        raise config.broken(
            "added_tokens", f"has {sum(lengths):,} characters, {growth} times as many normalised; "
            f"the maximum is {MAX_ADDED_CHARACTERS:,}"
        )  # fmt: skip


def _refuse_words(model: CheckpointConfig) -> None:
    most = model.values.get("max_input_chars_per_word")
    if isinstance(most, int | float) and most > MAX_WORD:
        raise model.broken("max_input_chars_per_word", f"is {most}; the maximum is {MAX_WORD}")
    for key, value in model.values.items():
        if isinstance(value, str) and len(value) > MAX_PIECE:
            raise model.broken(key, f"has {len(value):,} characters; the maximum is {MAX_PIECE}")


def _refuse_vocabulary(model: CheckpointConfig) -> None:
    vocabulary = model.values.get("vocab")
    if isinstance(vocabulary, list):
        lengths = [
            len(entry[0])
            for entry in vocabulary
            if isinstance(entry, list) and entry and isinstance(entry[0], str)
        ]
        if max(lengths, default=0) > MAX_PIECE:
            raise model.broken(
                "vocab",
                f"has a piece of {max(lengths):,} characters; the maximum is {MAX_PIECE}",
            )
        if sum(lengths) > MAX_PIECES:
            raise model.broken(
                "vocab", f"has {sum(lengths):,} characters; the maximum is {MAX_PIECES:,}"
            )
    # The library may return either of two names of one id: a long one instead of a short one.
    elif isinstance(vocabulary, dict) and max(map(len, vocabulary), default=0) > _MAX_SHARED:
        numbers = [number for number in vocabulary.values() if isinstance(number, int)]
        if len(set(numbers)) < len(numbers):
            raise model.broken(
                "vocab",
                f"has tokens of more than {_MAX_SHARED} characters, and tokens that share an id",
            )


def _refuse_patterns(config: CheckpointConfig) -> None:
    unknown: dict[str, str] = {}
    for key in ("normalizer", "pre_tokenizer", "decoder"):
        for part in _objects(config.values.get(key)):
            pattern = part.get("Regex")
            if isinstance(pattern, str) and (problem := slow(pattern)):
                raise config.broken(
                    key, f"has the pattern {shortened(pattern, 100)!r}, which {problem}"
                )
            if isinstance(pattern, str) and pattern not in PUBLISHED:
                unknown.setdefault(pattern, key)
    if unknown and (found := tried(list(unknown))) is not None:
        raise config.broken(
            unknown[found[0]], f"has the pattern {shortened(found[0], 100)!r}, which {found[1]}"
        )


def _objects(value: object) -> Iterator[Mapping[str, object]]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _texts(part: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys and strings of an object, without nested objects."""
    for name, value in part.items():
        yield name
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (one for one in value if isinstance(one, str))

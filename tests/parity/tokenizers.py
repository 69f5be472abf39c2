"""Small real tokenizers, trained on a text of every Debian installation, one for each style of
models.

They are the same in every process, because tests compare the outputs of random models. The trainers
of WordPiece and Unigram are not deterministic (they iterate over hash maps), so those vocabularies
are counted here; that of byte pairs is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

Style = Literal[
    "bert", "mpnet", "roberta", "xlm-roberta", "deberta-v2", "qwen", "llama", "gemma", "t5"
]

# Tokens of language models by their roles; the other styles use the same names.
ROLES: dict[Style, dict[str, str]] = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
    "gemma": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    },
    "t5": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}

_CORPUS = Path("/usr/share/common-licenses/GPL-3")
_FALLBACK_TEXT = (
    "The quick brown fox jumps over the lazy dog, while forty-two small models embed, rank and "
    "label every sentence."
)


@lru_cache
def train_tokenizer(style: Style, vocabulary: int) -> Tokenizer:
    """Train at most `vocabulary` tokens, special ones included."""
    text = _CORPUS.read_text() if _CORPUS.exists() else _FALLBACK_TEXT * 50
    lines = text.splitlines()[:300]
    if style == "bert":
        return _wordpiece(
            lines,
            vocabulary,
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
            "[CLS]",
            "[SEP]",
            "$B:1 [SEP]:1",
        )
    if style == "mpnet":
        return _wordpiece(
            lines,
            vocabulary,
            ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"],
            "<s>",
            "</s>",
            "</s> $B </s>",
        )
    if style == "roberta":
        return _byte_pairs(lines, vocabulary)
    if style == "qwen":
        return _chat_byte_pairs(lines, vocabulary)
    if style == "llama":
        return _piece_pairs(
            lines, vocabulary, ["<unk>", "<s>", "</s>"], "<s> $A", "<s> $A <s> $B", first=True
        )
    if style == "gemma":
        special = ["<pad>", "<eos>", "<bos>", "<unk>"]
        return _piece_pairs(
            lines, vocabulary, special, "<bos> $A <eos>", "<bos> $A <eos> $B <eos>", first=False
        )
    if style == "t5":
        return _t5_unigram(lines, vocabulary)
    if style == "deberta-v2":
        return _unigram(
            lines,
            vocabulary,
            ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"],
            "[CLS]",
            "[SEP]",
            "$B:1 [SEP]:1",
        )
    return _unigram(
        lines,
        vocabulary,
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        "<s>",
        "</s>",
        "</s> $B </s>",
    )


def _words(tokenizer: Tokenizer, lines: list[str]) -> Counter[str]:
    """Count each word of the text, as the tokenizer divides it before it searches for pieces."""
    normal, cut = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    return Counter(word for line in lines for word, _ in cut(normal(line)))


def _pieces(words: Counter[str], room: int, mark: str = "") -> Counter[str]:
    """Return all characters and, up to the size, the pieces that save most tokens. `mark` precedes
    those within a word.
    """
    counts: Counter[str] = Counter()
    for word, times in words.items():
        for begin, end in _spans(len(word)):
            counts[(mark if begin else "") + word[begin:end]] += times
        # Any word can then be divided into pieces.
        counts.update({piece: 0 for character in word for piece in (character, mark + character)})
    length = {piece: len(piece.removeprefix(mark)) for piece in counts}
    chosen = sorted(
        counts, key=lambda piece: (length[piece] > 1, -counts[piece] * (length[piece] - 1), piece)
    )
    return Counter({piece: counts[piece] for piece in chosen[:room]})


def _spans(length: int) -> Iterator[tuple[int, int]]:
    return (
        (begin, end)
        for begin in range(length)
        for end in range(begin + 1, min(length, begin + 8) + 1)
    )


def _wordpiece(
    lines: list[str], vocabulary: int, special: list[str], start: str, end: str, second: str
) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokens = [*special, *_pieces(_words(tokenizer, lines), vocabulary - len(special), "##")]
    tokenizer.model = models.WordPiece(
        {token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"
    )
    tokenizer.add_special_tokens(special)
    _frame(tokenizer, start, end, second)
    return tokenizer


def _byte_pairs(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    _frame(tokenizer, "<s>", "</s>", "</s> $B </s>")
    return tokenizer


def _unigram(
    lines: list[str], vocabulary: int, special: list[str], start: str, end: str, second: str
) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _count_pieces(tokenizer, lines, vocabulary, special, special[3])
    _frame(tokenizer, start, end, second)
    return tokenizer


def _count_pieces(
    tokenizer: Tokenizer, lines: list[str], vocabulary: int, special: list[str], unknown: str
) -> None:
    pieces = _pieces(_words(tokenizer, lines), vocabulary - len(special))
    scored = [(piece, math.log(times / pieces.total())) for piece, times in pieces.items()]
    tokenizer.model = models.Unigram(
        [*((token, 0.0) for token in special), *scored], special.index(unknown)
    )
    tokenizer.add_special_tokens(special)


def _frame(tokenizer: Tokenizer, start: str, end: str, second: str) -> None:
    tokens = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    single = f"{start} $A {end}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} {second}", special_tokens=tokens
    )


# GPT-4's and Qwen's pattern: contractions, words with the preceding character, single digits,
# punctuation, breaks, spaces.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _chat_byte_pairs(lines: list[str], vocabulary: int) -> Tokenizer:
    """Build Qwen's tokenizer: every byte has a token, a text has no frame, and a chat's marks are
    tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_alone])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    # The answers of rerankers must be tokens.
    tokenizer.train_from_iterator([*lines, *["yes", "no", "Yes"] * 100], trainer)
    return tokenizer


def _piece_pairs(
    lines: list[str], vocabulary: int, special: list[str], single: str, pair: str, *, first: bool
) -> Tokenizer:
    """Build Llama's and Gemma's tokenizer: pairs of pieces, with "▁" for spaces; with `first`, one
    precedes the text.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if first else spaces
    )
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokens = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=tokens
    )
    return tokenizer


def _t5_unigram(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    _count_pieces(tokenizer, lines, vocabulary, special, "<unk>")
    end = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=end
    )
    return tokenizer

"""Small real tokenizers, trained on a text that every Debian has, one for each style that families of models use."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Style = Literal["bert", "mpnet", "roberta", "xlm-roberta"]

_CORPUS = Path("/usr/share/common-licenses/GPL-3")
_FALLBACK_TEXT = "The quick brown fox jumps over the lazy dog, while forty-two small models embed, rank and label every sentence."


@lru_cache
def tokenizer_of(style: Style, vocabulary: int) -> Tokenizer:
    """At most `vocabulary` tokens, special ones included."""
    text = _CORPUS.read_text() if _CORPUS.exists() else _FALLBACK_TEXT * 50
    lines = text.splitlines()[:300]
    if style == "bert":
        return _wordpiece(lines, vocabulary, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "[CLS]", "[SEP]", "$B:1 [SEP]:1")
    if style == "mpnet":
        return _wordpiece(lines, vocabulary, ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"], "<s>", "</s>", "</s> $B </s>")
    if style == "roberta":
        return _byte_pairs(lines, vocabulary)
    return _unigram(lines, vocabulary)


def _wordpiece(lines: list[str], vocabulary: int, special: list[str], start: str, end: str, second: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    _frame(tokenizer, start, end, second)
    return tokenizer


def _byte_pairs(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    _frame(tokenizer, "<s>", "</s>", "</s> $B </s>")
    return tokenizer


def _unigram(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=vocabulary, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    _frame(tokenizer, "<s>", "</s>", "</s> $B </s>")
    return tokenizer


def _frame(tokenizer: Tokenizer, start: str, end: str, second: str) -> None:
    tokens = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    single = f"{start} $A {end}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} {second}", special_tokens=tokens)

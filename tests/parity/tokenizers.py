"""Small real tokenizers, trained on a text that every Debian has, one for each style that families of models use."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Style = Literal["bert", "mpnet", "roberta", "xlm-roberta", "deberta-v2", "qwen", "llama", "gemma", "t5"]

# Tokens of language models by their roles; the other styles name theirs alike.
ROLES: dict[Style, dict[str, str]] = {
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"},
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "t5": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}

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
    if style == "qwen":
        return _chat_byte_pairs(lines, vocabulary)
    if style == "llama":
        return _piece_pairs(lines, vocabulary, ["<unk>", "<s>", "</s>"], "<s> $A", "<s> $A <s> $B", first=True)
    if style == "gemma":
        special = ["<pad>", "<eos>", "<bos>", "<unk>"]
        return _piece_pairs(lines, vocabulary, special, "<bos> $A <eos>", "<bos> $A <eos> $B <eos>", first=False)
    if style == "t5":
        return _t5_unigram(lines, vocabulary)
    if style == "deberta-v2":
        return _unigram(lines, vocabulary, ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"], "[CLS]", "[SEP]", "$B:1 [SEP]:1")
    return _unigram(lines, vocabulary, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s>", "</s>", "</s> $B </s>")


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


def _unigram(lines: list[str], vocabulary: int, special: list[str], start: str, end: str, second: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=vocabulary, special_tokens=special, unk_token=special[3], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    _frame(tokenizer, start, end, second)
    return tokenizer


def _frame(tokenizer: Tokenizer, start: str, end: str, second: str) -> None:
    tokens = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    single = f"{start} $A {end}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} {second}", special_tokens=tokens)


# How GPT-4 and Qwen cut texts: contractions, words with what stands before them, single digits, punctuation, breaks, spaces.
_QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _chat_byte_pairs(lines: list[str], vocabulary: int) -> Tokenizer:
    """Qwen's: every byte has a token, nothing is put around a text, and a chat's marks are tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_alone])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    # The words that rerankers answer with must be tokens.
    tokenizer.train_from_iterator([*lines, *["yes", "no", "Yes"] * 100], trainer)
    return tokenizer


def _piece_pairs(lines: list[str], vocabulary: int, special: list[str], single: str, pair: str, *, first: bool) -> Tokenizer:
    """Llama's and Gemma's: pairs of pieces, spaces being "▁"; with `first` one is put before the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if first else spaces
    tokenizer.decoder = decoders.Replace("▁", " ")
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokens = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)
    return tokenizer


def _t5_unigram(lines: list[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=vocabulary, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    end = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=end)
    return tokenizer

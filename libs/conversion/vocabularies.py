"""Builds a fast tokenizer from the vocabulary files of a slow one, with the token ids that
transformers gives.

The rules are those of `transformers.convert_slow_tokenizer` (4.x and 5), by which the hub's
tokenizer.json files were made: WordPiece of vocab.txt, byte-level BPE of vocab.json with
merges.txt, and Unigram or BPE of a SentencePiece model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from libs.conversion.archive import CheckpointRefused
from libs.conversion.plan import BPE_FILES, MARIAN_FILES, SENTENCEPIECE_FILES, WORDPIECE_FILE
from libs.conversion.sentencepiece import BPE, CONTROL, UNIGRAM, USER_DEFINED, Pieces, read_pieces

_SETTINGS_FILES: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
_SPACE: Final = "▁"
_SLOTS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MAX_TOKENS: Final = 1 << 20
_MAX_UNUSED: Final = 1_000
"""Ids that no token has, between two that the files name."""

_OTHER_LANGUAGE_PENALTY: Final = 1_000.0
QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BERT: Final = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA: Final = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>",
    "pad_token": "<pad>", "cls_token": "<s>",
    "mask_token": "<mask>",
}  # fmt: skip
_GPT2: Final = {
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
}


@dataclass(frozen=True, slots=True)
class _Class:
    """The differences of one tokenizer class of transformers from others of its kind.

    Args:
        specials: its special tokens, unless its files name others.
        single: the template of one text; `$A` is the text, `{cls}` and the like are slots.
        pair: the template of two texts.
        lowercase: the default of `do_lower_case`.
        head: pieces that stand before those of the model, instead of its first `skipped`.
        tail: pieces that follow those of the model.
        unk_id: the id of the unknown token; None: the model's own.
    """

    specials: Mapping[str, str]
    single: str = ""
    pair: str = ""
    lowercase: bool = False
    head: Sequence[tuple[str, float]] = ()
    skipped: int = 0
    tail: Sequence[str] = ()
    unk_id: int | None = None


_SINGLE: Final = "{cls}:0 $A:0 {sep}:0"
_PAIR: Final = "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"
_TWO_SEPARATORS: Final = "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0"
_FAIRSEQ: Final = (("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0))
_CAMEMBERT: Final = (
    ("<s>NOTUSED", 0.0),
    ("<pad>", 0.0),
    ("</s>NOTUSED", 0.0),
    ("<unk>", 0.0),
    ("<unk>NOTUSED", -100.0),
)

_CLASSES: Final[Mapping[str, _Class]] = {
    "Bert": _Class(_BERT, _SINGLE, _PAIR, lowercase=True),
    "MPNet": _Class(
        {**_ROBERTA, "unk_token": "[UNK]"},
        _SINGLE,
        "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:1 {sep}:1",
        lowercase=True,
    ),
    "GPT2": _Class(_GPT2),
    "Qwen2": _Class(
        {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    ),
    "Roberta": _Class(_ROBERTA),
    "Deberta": _Class({**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]"}, _SINGLE, _PAIR),
    "XLMRoberta": _Class(
        _ROBERTA, _SINGLE, _TWO_SEPARATORS, head=_FAIRSEQ, skipped=3, tail=("<mask>",), unk_id=3
    ),
    "Camembert": _Class(
        _ROBERTA, _SINGLE, _TWO_SEPARATORS, head=_CAMEMBERT, skipped=1, tail=("<mask>",), unk_id=3
    ),
    "DebertaV2": _Class({**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]"}, _SINGLE, _PAIR),
    "Albert": _Class(
        {
            **_BERT,
            "bos_token": "[CLS]",
            "eos_token": "[SEP]",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
        _SINGLE,
        _PAIR,
        lowercase=True,
    ),
    "Marian": _Class(
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        "$A:0 {eos}:0",
        "$A:0 $B:0 {eos}:0",
    ),
    "T5": _Class(
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        "$A:0 {eos}:0",
        "$A:0 {eos}:0 $B:0 {eos}:0",
    ),
    "Llama": _Class({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, unk_id=0),
    "Gemma": _Class(
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
        unk_id=3,
    ),
}
_ALIASES: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "DistilBert",
            "Electra",
            "MobileBert",
            "ConvBert",
            "LayoutLM",
            "SqueezeBert",
            "RetriBert",
            "DPR",
        ),
        "Bert",
    ),
    **dict.fromkeys(("Bart", "Longformer", "LED"), "Roberta"),
    "CodeGen": "GPT2",
}
_MODEL_TYPES: Final[Mapping[str, str]] = {
    "bert": "Bert", "distilbert": "Bert", "electra": "Bert", "mobilebert": "Bert",
    "convbert": "Bert", "mpnet": "MPNet",
    "roberta": "Roberta", "bart": "Roberta", "longformer": "Roberta", "gpt2": "GPT2",
    "qwen2": "Qwen2", "qwen3": "Qwen2",
    "deberta": "Deberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert",
    "deberta-v2": "DebertaV2", "albert": "Albert",
    "marian": "Marian",
    "t5": "T5", "mt5": "T5", "llama": "Llama", "gemma": "Gemma", "gemma2": "Gemma",
    "gemma3_text": "Gemma",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """The report of a conversion: the output's digest, its number of tokens, and the version of the
    library that wrote it.
    """

    sha256: str
    tokens: int
    tokenizers: str


def convert(
    source: BinaryIO, mapping: mmap.mmap, output: BinaryIO, on_progress: Callable[[int, int], None]
) -> Made:
    """Write the tokenizer.json of a bundle of files to `output`. Raises CheckpointRefused as
    `tokenizer_json`.
    """
    files = {str(name): base64.b64decode(content) for name, content in json.load(source).items()}
    made = tokenizer_json(files).encode()
    on_progress(len(made), len(made))
    output.write(made)
    return Made(
        hashlib.sha256(made).hexdigest(),
        Tokenizer.from_buffer(made).get_vocab_size(),
        tokenizers.__version__,
    )


def tokenizer_json(files: Mapping[str, bytes]) -> str:
    """Return the tokenizer.json of a folder's vocabulary files.

    Args:
        files: the contents of the folder's files by name; those that are not in VOCABULARY_FILES
            are not read.

    Raises:
        CheckpointRefused: for files that cannot be read, and for a tokenizer class without rules
        here.
    """
    settings = _Settings.read(files)
    if WORDPIECE_FILE in files and not any(name in files for name in SENTENCEPIECE_FILES):
        tokenizer = _wordpiece(settings, files[WORDPIECE_FILE])
    elif all(name in files for name in BPE_FILES) and not any(
        name in files for name in SENTENCEPIECE_FILES
    ):
        tokenizer = _byte_level(settings, *(files[name] for name in BPE_FILES))
    elif all(name in files for name in MARIAN_FILES):
        tokenizer = _marian(settings, *(files[name] for name in MARIAN_FILES))
    else:
        name = next((name for name in SENTENCEPIECE_FILES if name in files), "")
        if not name:
            raise CheckpointRefused(
                f"no vocabulary: neither {WORDPIECE_FILE}, nor {' with '.join(BPE_FILES)}, nor a "
                "SentencePiece model"
            )
        tokenizer = _sentencepiece(settings, read_pieces(files[name]))
    return _finished(tokenizer, settings)


def from_pieces(values: Mapping[str, Any], pieces: Pieces) -> str:
    """Return the tokenizer.json of a SentencePiece vocabulary. Raises CheckpointRefused.

    Args:
        values: The contents of tokenizer_config.json.
    """
    settings = _Settings.read({"tokenizer_config.json": json.dumps(values).encode()})
    return _finished(_sentencepiece(settings, pieces), settings)


def _finished(tokenizer: Tokenizer, settings: _Settings) -> str:
    _add_tokens(tokenizer, settings)
    tokenizer.post_processor = _post_processor(tokenizer, settings)
    made: str = tokenizer.to_str()
    return made


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings in the JSON files of a folder: the class, its values, special tokens by slot,
    and added tokens by id.
    """

    name: str
    values: Mapping[str, Any]
    specials: Mapping[str, AddedToken]
    added: Mapping[int, AddedToken] = field(default_factory=dict)

    @property
    def rules(self) -> _Class:
        return _CLASSES[self.name]

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        return value if isinstance(value, bool) else default

    @staticmethod
    def read(files: Mapping[str, bytes]) -> _Settings:
        parsed = {name: _object(name, files[name]) for name in _SETTINGS_FILES if name in files}
        values, config = parsed.get("tokenizer_config.json", {}), parsed.get("config.json", {})
        name = _class_name(values, config)
        specials = {
            slot: _token(text, special=True) for slot, text in _CLASSES[name].specials.items()
        }
        if "mask_token" in specials and name not in ("Bert", "DebertaV2"):
            specials["mask_token"] = AddedToken(
                specials["mask_token"].content, lstrip=True, special=True, normalized=False
            )
        for source in (values, parsed.get("special_tokens_map.json", {})):
            specials |= {
                slot: _token(source[slot], special=True) for slot in _SLOTS if source.get(slot)
            }
        added = {
            _id(key): _token(value, special=bool(isinstance(value, dict) and value.get("special")))
            for key, value in _mapping(values.get("added_tokens_decoder")).items()
        }
        for content, number in parsed.get("added_tokens.json", {}).items():
            is_special = content in {token.content for token in specials.values()}
            added.setdefault(_id(number), _token(content, special=is_special))
        return _Settings(name, values, specials, dict(sorted(added.items())))


def _class_name(values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    class_name = str(values.get("tokenizer_class") or config.get("tokenizer_class") or "")
    stem = class_name.removesuffix("Fast").removesuffix("Tokenizer")
    name = _ALIASES.get(stem, stem)
    if name in _CLASSES:
        return name
    kind = str(config.get("model_type", ""))
    if not class_name and kind in _MODEL_TYPES:
        return _MODEL_TYPES[kind]
    what = (
        f"tokenizer_class {class_name!r}"
        if class_name
        else f"model_type {kind!r} without a tokenizer_class"
    )
    raise CheckpointRefused(
        f"{what} has no conversion to tokenizer.json; known are {', '.join(sorted(_CLASSES))}"
    )


def _wordpiece(settings: _Settings, data: bytes) -> Tokenizer:
    words = _text(WORDPIECE_FILE, data).split("\n")
    vocab = {
        word.rstrip("\r"): number for number, word in enumerate(words if words[-1] else words[:-1])
    }
    _bound(len(words))
    unknown = settings.specials["unk_token"].content
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    accents = settings.values.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=settings.flag("do_lower_case", settings.rules.lowercase),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _byte_level(settings: _Settings, vocabulary: bytes, merges: bytes) -> Tokenizer:
    vocab = {str(piece): _id(number) for piece, number in _object(BPE_FILES[0], vocabulary).items()}
    lines = _text(BPE_FILES[1], merges).split("\n")
    pairs = [_pair(line) for line in lines if line.strip() and not line.startswith("#version")]
    _bound(max(len(vocab), len(pairs)))
    tokenizer = Tokenizer(
        bpe_model(vocab, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    has_space = settings.flag("add_prefix_space", False)
    if settings.name == "Qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(has_space, use_regex=False)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bpe_model(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    """Return a model of byte-pair encoding. Raises CheckpointRefused for merges of pieces that the
    vocabulary does not have.
    """
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:  # the library raises no narrower class
        raise CheckpointRefused(
            f"has merges that do not fit its vocabulary: {str(error)[:200]}"
        ) from None


def _pair(line: str) -> tuple[str, str]:
    match line.split():
        case [left, right]:
            return left, right
    raise CheckpointRefused(f"{BPE_FILES[1]}: the line {line[:100]!r} is not two pieces")


def _sentencepiece(settings: _Settings, found: Pieces) -> Tokenizer:
    rules, name = settings.rules, settings.name
    pieces = [*rules.head, *((piece.text, piece.score) for piece in found.pieces[rules.skipped :])]
    pieces += [(text, 0.0) for text in rules.tail]
    if name == "T5":
        extra = settings.values.get("extra_ids", 100)
        number = extra if isinstance(extra, int) and 0 <= extra <= 10_000 else 100
        pieces += [(f"<extra_id_{index}>", 0.0) for index in reversed(range(number))]
    elif name == "Albert":
        pieces = [
            (text, score if _has_number_comma(text) else score - 100) for text, score in pieces
        ]
    elif name in ("Llama", "Gemma"):
        slots = (
            ("unk_token", "bos_token", "eos_token")
            if name == "Llama"
            else ("pad_token", "eos_token", "bos_token")
        )
        pieces[:3] = [(settings.specials[slot].content, 0.0) for slot in slots]
    _bound(len(pieces))
    tokenizer = Tokenizer(
        _piece_model(pieces, found, rules.unk_id, byte_fallback=name in ("Llama", "Gemma"))
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = _around(settings, found)
    own = [piece for piece in found.pieces if piece.kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(piece.text, normalized=False, special=piece.kind == CONTROL) for piece in own]
    )
    return tokenizer


def _marian(settings: _Settings, source: bytes, vocabulary: bytes) -> Tokenizer:
    """Return a tokenizer with the pieces of the source language under the ids of vocab.json, which
    also has those of the target language.

    Pieces of the target language alone have so low a score that they stand for nothing but
    characters that the source lacks.
    """
    if settings.flag("separate_vocabs", False):
        raise CheckpointRefused(
            "`separate_vocabs`: models with a vocabulary for each language are not converted"
        )
    found = read_pieces(source)
    if found.model_type != UNIGRAM:
        raise CheckpointRefused(
            f"{MARIAN_FILES[0]}: a SentencePiece model of type {found.model_type}; Unigram (1) "
            "is converted"
        )
    ids = {
        str(piece): _id(number) for piece, number in _object(MARIAN_FILES[1], vocabulary).items()
    }
    _bound(len(ids))
    if sorted(ids.values()) != list(range(len(ids))):
        raise CheckpointRefused(f"{MARIAN_FILES[1]}: its ids are not 0 to {len(ids) - 1}")
    unknown = ids.get(settings.specials["unk_token"].content)
    if unknown is None:
        raise CheckpointRefused(f"{MARIAN_FILES[1]}: has no unknown token")
    scores = {piece.text: piece.score for piece in found.pieces}
    other = min(scores.values()) - _OTHER_LANGUAGE_PENALTY
    ordered = sorted(ids, key=ids.__getitem__)
    tokenizer = Tokenizer(
        models.Unigram([(piece, scores.get(piece, other)) for piece in ordered], unk_id=unknown)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = _around(settings, found)
    codes = [piece for piece in ordered if piece.startswith(">>") and piece.endswith("<<")]
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in codes])
    return tokenizer


def _piece_model(
    pieces: list[tuple[str, float]], found: Pieces, unk_id: int | None, *, byte_fallback: bool
) -> Any:
    if found.model_type == UNIGRAM:
        return models.Unigram(
            pieces, unk_id=found.unk_id if unk_id is None else unk_id, byte_fallback=byte_fallback
        )
    if found.model_type != BPE:
        raise CheckpointRefused(
            f"a SentencePiece model of type {found.model_type}; Unigram (1) and BPE (2) are "
            "converted"
        )
    vocab = {text: number for number, (text, _) in enumerate(pieces)}
    return bpe_model(
        vocab,
        _merges(pieces, vocab),
        unk_token=found.unk_piece,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _merges(pieces: Sequence[tuple[str, float]], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that lead to each piece, by the score of the piece, best first; those of
    one piece by the ids of its halves.
    """
    merges: list[tuple[float, str, str]] = []
    for text, score in pieces:
        halves = [
            (text[:cut], text[cut:])
            for cut in range(1, len(text))
            if text[:cut] in vocab and text[cut:] in vocab
        ]
        merges += [
            (score, *pair)
            for pair in sorted(halves, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ]
    return [(left, right) for _, left, right in sorted(merges, key=lambda merge: -merge[0])]


def _around(settings: _Settings, found: Pieces) -> tuple[Any, Any, Any]:
    """Return the normalizer, the pre-tokenizer and the decoder of a SentencePiece model."""
    charsmap = [normalizers.Precompiled(found.charsmap)] if found.charsmap else []
    has_prefix = settings.flag("add_prefix_space", True)
    scheme = ("always" if settings.flag("legacy", True) else "first") if has_prefix else "never"
    space = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    decoder: Any = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    steps: list[Any]
    pre: Any = space
    match settings.name:
        case "DebertaV2":
            lower = [normalizers.Lowercase()] if settings.flag("do_lower_case", False) else []
            steps = [
                *lower,
                normalizers.Strip(),
                *charsmap,
                normalizers.Replace(Regex(" {2,}"), " "),
            ]
            punctuation = (
                [pre_tokenizers.Punctuation(behavior="isolated")]
                if settings.flag("split_by_punct", False)
                else []
            )
            pre = pre_tokenizers.Sequence([*punctuation, space])
        case "Albert":
            steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
            if not settings.flag("keep_accents", False):
                steps += [normalizers.NFKD(), normalizers.StripAccents()]
            lower = (
                [normalizers.Lowercase()]
                if settings.flag("do_lower_case", settings.rules.lowercase)
                else []
            )
            steps = [*steps, *lower, *charsmap, normalizers.Replace(Regex(" {2,}"), " ")]
        case "Llama" | "Gemma":
            is_old = settings.name == "Llama" and settings.flag("legacy", True)
            steps = [normalizers.Prepend(_SPACE)] if is_old and has_prefix else []
            steps.append(normalizers.Replace(" ", _SPACE))
            pre = (
                pre_tokenizers.Split(" ", "merged_with_previous")
                if settings.name == "Gemma"
                else None
            )
            if settings.name == "Llama" and not is_old:
                steps, pre = (
                    [],
                    pre_tokenizers.Metaspace(
                        replacement=_SPACE, prepend_scheme=scheme, split=False
                    ),
                )
            strip = (
                [decoders.Strip(content=" ", left=1)]
                if settings.name == "Llama" and has_prefix
                else []
            )
            decoder = decoders.Sequence(
                [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
            )
        case _:
            steps = [
                *charsmap,
                normalizers.Strip(left=False, right=True),
                normalizers.Replace(Regex(" {2,}"), _SPACE),
            ]
    return normalizers.Sequence(steps) if steps else None, pre, decoder


def _add_tokens(tokenizer: Tokenizer, settings: _Settings) -> None:
    """Add the tokens that the files name, each under the id that they give it. Raises
    CheckpointRefused where that is not possible.
    """
    for number, token in settings.added.items():
        if tokenizer.token_to_id(token.content) is None:
            _fill(tokenizer, token, number)
        _add(tokenizer, token)
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointRefused(
                f"the added token {token.content[:100]!r} has the id {number} in one file and "
                "another one in another"
            )
    known = {token.content for token in settings.added.values()}
    for token in settings.specials.values():
        if token.content not in known:
            _add(tokenizer, token)


def _fill(tokenizer: Tokenizer, token: AddedToken, number: int) -> None:
    """Add placeholders for the ids before `number` that no token has, as transformers' slow
    tokenizers leave them out.
    """
    following = tokenizer.get_vocab_size()
    if not 0 <= number - following <= _MAX_UNUSED:
        raise CheckpointRefused(
            f"the added token {token.content[:100]!r} has the id {number}, but {following} is next"
        )
    tokenizer.add_tokens(
        [
            AddedToken(f"<|unused id {unused}|>", normalized=False)
            for unused in range(following, number)
        ]
    )


def _add(tokenizer: Tokenizer, token: AddedToken) -> None:
    if token.special:
        tokenizer.add_special_tokens([token])
    else:
        tokenizer.add_tokens([token])


def _post_processor(tokenizer: Tokenizer, settings: _Settings) -> Any:
    if settings.name == "Roberta":
        separator, first = (_slot(tokenizer, settings, slot) for slot in ("sep_token", "cls_token"))
        return processors.RobertaProcessing(
            separator, first, True, settings.flag("add_prefix_space", False)
        )
    if settings.name in ("GPT2", "Qwen2") and not settings.flag("add_bos_token", False):
        return processors.ByteLevel(trim_offsets=False)
    single, pair_template = settings.rules.single, settings.rules.pair
    if not single:
        single, pair_template = _with_ends(settings)
    if single == "$A:0":
        return None
    slots = {
        slot.removesuffix("_token"): _slot(tokenizer, settings, slot) for slot in settings.specials
    }
    used = {name: token for name, token in slots.items() if f"{{{name}}}" in pair_template}
    texts = {name: token[0] for name, token in used.items()}
    return template_processor(
        [part.format(**texts) for part in single.split()],
        [part.format(**texts) for part in pair_template.split()],
        list(dict.fromkeys(used.values())),
    )


def template_processor(single: list[str], pair: list[str], special: list[tuple[str, int]]) -> Any:
    """Return the post-processor that adds special tokens to texts. Raises CheckpointRefused for
    tokens that cannot stand in a template.
    """
    try:
        return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    except ValueError as error:
        raise CheckpointRefused(
            f"has special tokens that no template can have: {str(error)[:200]}"
        ) from None


def _with_ends(settings: _Settings) -> tuple[str, str]:
    """Return the templates of a class that puts its first and last token around a text where its
    files say so.
    """
    first = (
        "{bos}:0 " if settings.flag("add_bos_token", settings.name in ("Llama", "Gemma")) else ""
    )
    last = " {eos}:0" if settings.flag("add_eos_token", False) else ""
    second = f"{first}$B:1{last}".replace(":0", ":1")
    return f"{first}$A:0{last}", f"{first}$A:0{last} {second}"


def _slot(tokenizer: Tokenizer, settings: _Settings, slot: str) -> tuple[str, int]:
    content = settings.specials[slot].content
    number = tokenizer.token_to_id(content)
    if number is None:
        raise CheckpointRefused(f"the {slot} {content[:100]!r} is not in the vocabulary")
    return content, number


def _token(value: object, *, special: bool) -> AddedToken:
    match value:
        case str(content):
            return AddedToken(content, special=special, normalized=not special)
        case {"content": str(content)}:
            ways = {key: bool(value.get(key, False)) for key in ("lstrip", "rstrip", "single_word")}  # type: ignore[attr-defined]
            normalized = bool(value.get("normalized", not special))  # type: ignore[attr-defined]
            return AddedToken(content, special=special, normalized=normalized, **ways)
    raise CheckpointRefused("an added token is neither a text nor an object with `content`")


def _id(value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number <= _MAX_TOKENS * 4:
        raise CheckpointRefused(
            f"a token has the id {str(value)[:40]!r}; ids are numbers from 0 to {_MAX_TOKENS * 4:,}"
        )
    return number


def _object(name: str, data: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(name, data))
    except (ValueError, RecursionError) as error:
        raise CheckpointRefused(f"{name}: is not JSON: {str(error)[:100]}") from None
    return _mapping(found)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointRefused(f"{name}: is not UTF-8: {error}") from None


def _bound(tokens: int) -> None:
    if tokens > _MAX_TOKENS:
        raise CheckpointRefused(f"has {tokens:,} tokens; at most {_MAX_TOKENS:,} are converted")


def _has_number_comma(piece: str) -> bool:
    """Return True for a piece that ends in neither a digit nor a comma, which ALBERT splits
    (transformers' check_number_comma).
    """
    return len(piece) < 2 or piece[-1] != "," or not piece[-2].isdigit()

"""Apply tokenizer_config.json to a tokenizer as transformers does, where it contradicts or
completes tokenizer.json.

transformers' tokenizer classes rebuild their normaliser or pre-tokenizer from keys of
tokenizer_config.json, and add tokens that only this file names. In most published checkpoints the
files agree and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from libs.catalog.checkpoint.files import CheckpointConfig, read_config

FILE: Final = "tokenizer_config.json"

_BERT: Final = "BertTokenizer"
_ROBERTA: Final = "RobertaTokenizer"
_CLASSES: Final[Mapping[str, str]] = {
    "BertTokenizer": _BERT,
    "ConvBertTokenizer": _BERT,
    "DistilBertTokenizer": _BERT,
    "ElectraTokenizer": _BERT,
    "LayoutLMTokenizer": _BERT,
    "MPNetTokenizer": _BERT,
    "BartTokenizer": _ROBERTA,
    "DebertaTokenizer": _ROBERTA,
    "GPT2Tokenizer": _ROBERTA,
    "LongformerTokenizer": _ROBERTA,
    "RobertaTokenizer": _ROBERTA,
}
"""transformers' classes, without the suffix Fast, with the class that builds their normaliser or
pre-tokenizer.
"""
_DEFAULT_CLASSES: Final[Mapping[str, str]] = {
    "bart": _ROBERTA,
    "bert": _BERT,
    "deberta": _ROBERTA,
    "distilbert": _BERT,
    "electra": _BERT,
    "longformer": _ROBERTA,
    "mpnet": _BERT,
    "nomic_bert": _BERT,
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
}
"""The class of a model_type if no file names one."""
_ROLES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_SEGMENTS: Final = "token_type_ids"
_MAX_ID_DIGITS: Final = 9
_FLAGS: Final = {"special": False, "single_word": False, "lstrip": False, "rstrip": False}


def missing_tokens(directory: Path, present: frozenset[str]) -> list[dict[str, object]]:
    """Return the entries of `added_tokens_decoder` that tokenizer.json does not add, in the order
    of their ids.

    The entries have the form of tokenizer.json's `added_tokens`. Raises ModelBroken for entries of
    another form.

    Args:
        present: The added tokens of tokenizer.json.
    """
    config = read_config(directory, FILE)
    if config is None or not config.values.get("added_tokens_decoder"):
        return []
    listed = config.part("added_tokens_decoder")
    found: dict[int, dict[str, object]] = {}
    for key, value in listed.values.items():
        if not key.isdecimal() or len(key) > _MAX_ID_DIGITS or not isinstance(value, dict):
            raise config.broken(
                "added_tokens_decoder",
                f"has the entry {key!r}; it must map ids of tokens to objects",
            )
        entry = CheckpointConfig(FILE, value)
        content = entry.text("content")
        if content and content not in present:
            flags = {name: entry.flag(name, default) for name, default in _FLAGS.items()}
            flags["normalized"] = entry.flag("normalized", not flags["special"])
            found[int(key)] = {"id": int(key), "content": content, **flags}
    return [found[number] for number in sorted(found)]


def apply_settings(tokenizer: Tokenizer, directory: Path, missing: list[dict[str, object]]) -> None:
    """Change the tokenizer according to tokenizer_config.json.

    Args:
        missing: The result of `missing_tokens`.
    """
    config = read_config(directory, FILE) or CheckpointConfig(FILE, {})
    name = _tokenizer_class(config, directory)
    if name == _BERT and isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=config.flag("tokenize_chinese_chars", True),
            strip_accents=config.flag("strip_accents")
            if config.values.get("strip_accents") is not None
            else None,
            lowercase=config.flag("do_lower_case", True),
        )
    if name == _ROBERTA and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        tokenizer.pre_tokenizer.add_prefix_space = config.flag("add_prefix_space")
    for entry in missing:
        content, flags = (
            str(entry["content"]),
            {key: bool(entry[key]) for key in (*_FLAGS, "normalized")},
        )
        tokenizer.add_tokens([AddedToken(content, **flags)])
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    # A token without an id in the vocabulary has no vector, so it is not added.
    special = [
        token
        for token in _special(config)
        if token not in added and tokenizer.token_to_id(token) is not None
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )


def has_segments(directory: Path) -> bool:
    """Return whether the tokenizer passes token types to the model: `model_input_names`, if
    present, must contain them.
    """
    config = read_config(directory, FILE)
    names = () if config is None else config.texts("model_input_names")
    return not names or _SEGMENTS in names


def _tokenizer_class(config: CheckpointConfig, directory: Path) -> str:
    model = read_config(directory, "config.json") or CheckpointConfig("config.json", {})
    name = config.text("tokenizer_class") or model.text("tokenizer_class")
    if name:
        return _CLASSES.get(name.removesuffix("Fast"), "")
    return _DEFAULT_CLASSES.get(model.text("model_type"), "")


def _special(config: CheckpointConfig) -> Iterator[str]:
    """Yield the special tokens that the file names, without repetition."""
    seen: set[str] = set()
    values: list[object] = [config.values.get(role) for role in _ROLES]
    for key in _LISTS:
        listed = config.values.get(key)
        values += listed if isinstance(listed, list) else []
    for value in values:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content and content not in seen:
            seen.add(content)
            yield content

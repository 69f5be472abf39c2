"""Completes a GLiNER directory that has neither tokenizer nor encoder configuration, as the gliner package does when it loads one.

Published directories of urchade, NuMind and others hold only weights and training settings: the package takes the rest from the
repository that `model_name` names, and adds its markers to that tokenizer. The result is what `GLiNER.save_pretrained` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from libs.catalog.checkpoint.files import read_config, tensor_entries
from libs.catalog.kinds.extraction.gliner import ENCODER_PREFIX, FILE
from libs.conversion.plan import BASE_FOLDER, TOKENIZER
from libs.errors import ModelBroken

_EMBEDDING: Final = "embeddings.word_embeddings.weight"
_EMBEDDINGS: Final = (f"{ENCODER_PREFIX}{_EMBEDDING}", f"{ENCODER_PREFIX}embeddings.tok_embeddings.weight")


def is_needed(directory: Path) -> bool:
    """Whether the directory has files of a base model that it is to be completed with."""
    return (directory / FILE).is_file() and (directory / BASE_FOLDER / "config.json").is_file()


def complete(directory: Path) -> None:
    """Write tokenizer.json and the keys of gliner_config.json that are missing, from the files below BASE_FOLDER.

    The directory has its weights as safetensors, and a tokenizer.json below BASE_FOLDER unless it has one itself. Raises
    ModelBroken for a base model to which the weights do not fit.
    """
    config = _object(directory, FILE)
    base = _object(directory, f"{BASE_FOLDER}/config.json")
    rows = _rows(directory)
    added: dict[str, int] = {}
    if not (directory / TOKENIZER).is_file():
        tokenizer = json.loads((directory / BASE_FOLDER / TOKENIZER).read_text(encoding="utf-8"))
        added = _add_markers(tokenizer, config, rows)
        _write(directory / TOKENIZER, tokenizer)
        settings = read_config(directory, f"{BASE_FOLDER}/tokenizer_config.json")
        _write(directory / "tokenizer_config.json", dict(settings.values) if settings else {})
    given = config.get("class_token_index", -1)
    marker = added.get(str(config.get("ent_token", "<<ENT>>")), given)
    _write(
        directory / FILE,
        {**config, "encoder_config": {**base, "vocab_size": rows}, "class_token_index": marker, "vocab_size": rows},
    )


def _add_markers(tokenizer: dict[str, Any], config: Mapping[str, Any], rows: int) -> dict[str, int]:
    """Add the package's markers, and return their ids. The rows of the embedding tell which of them the weights have."""
    known = [entry["id"] for entry in tokenizer["added_tokens"]]
    first = 1 + max([*known, _largest(tokenizer["model"]["vocab"])])
    ent, sep = str(config.get("ent_token", "<<ENT>>")), str(config.get("sep_token", "<<SEP>>"))
    markers = [ent, sep, str(config.get("rel_token", "<<REL>>"))] if config.get("relations_layer") else ["[FLERT]", ent, sep]
    if rows == first + 2:
        markers = [ent, sep]
    if rows != first + len(markers):
        raise ModelBroken(
            f"{FILE}: model_name is {config.get('model_name')!r}, whose tokenizer has {first:,} tokens; with the markers "
            f"{', '.join(markers)} that is not the {rows:,} rows of the weights' embedding"
        )
    ways = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ids = {content: first + place for place, content in enumerate(markers)}
    tokenizer["added_tokens"] += [{"id": number, "content": content, **ways} for content, number in ids.items()]
    return ids


def _largest(vocab: object) -> int:
    if isinstance(vocab, dict):
        return max(vocab.values(), default=-1)
    return len(vocab) - 1 if isinstance(vocab, list) else -1


def _rows(directory: Path) -> int:
    """The rows of the encoder's embedding."""
    for path in sorted(directory.glob("*.safetensors")):
        entries = tensor_entries(directory, path.name)
        for name in _EMBEDDINGS:
            if name in entries:
                return int(entries[name].shape[0])
    raise ModelBroken(f"model.safetensors: has no tensor {_EMBEDDINGS[0]!r}, so its base model's tokenizer cannot be completed")


def _object(directory: Path, name: str) -> Mapping[str, Any]:
    found = read_config(directory, name)
    if found is None:
        raise ModelBroken(f"{name}: missing from {directory}")
    return found.values


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

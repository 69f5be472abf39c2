"""Complete a GLiNER or GLiREL directory that lacks its tokenizer or its encoders' configurations,
as the packages do on loading.

Published directories of urchade, NuMind and others hold only weights and training settings: the
package takes the rest from the repository that `model_name` names, and adds its markers to that
tokenizer. The result equals the package's `save_pretrained` with a saved tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from libs.catalog.checkpoint.files import read_config, tensor_entries
from libs.conversion.plan import BASE_FOLDER, TOKENIZER
from libs.errors import ModelBroken
from libs.kinds.gliner import card as gliner
from libs.kinds.gliner.card import ENCODER_PREFIX, LABELS_FOLDER
from libs.kinds.glirel import card as glirel

_EMBEDDING: Final = "embeddings.word_embeddings.weight"
_EMBEDDINGS: Final = (
    f"{ENCODER_PREFIX}{_EMBEDDING}",
    f"{ENCODER_PREFIX}embeddings.tok_embeddings.weight",
)
_SEPARATOR: Final = "[FLERT]"
"""A token of flair; the first versions of both packages used its embeddings."""


@dataclass(frozen=True, slots=True)
class _Marker:
    """A token that a package adds to the base model's tokenizer.

    Attributes:
        is_special: Whether it is added as a special token.
    """

    content: str
    is_special: bool = True

    def entry(self, number: int) -> dict[str, object]:
        """Return the token's entry of `added_tokens` under an id."""
        ways = {"single_word": False, "lstrip": False, "rstrip": False}
        return {
            "id": number,
            "content": self.content,
            **ways,
            "normalized": not self.is_special,
            "special": self.is_special,
        }


def is_needed(directory: Path) -> bool:
    """Return True if the directory has files of a base model with which it is to be completed."""
    has_base = (directory / BASE_FOLDER / "config.json").is_file()
    has_labels = (directory / LABELS_FOLDER / "config.json").is_file()
    return _find_config_file(directory) != "" and (has_base or has_labels)


def complete(directory: Path) -> None:
    """Write tokenizer.json and the missing keys of gliner_config.json or glirel_config.json, from
    the files of base models.

    The directory has its weights as safetensors, and below BASE_FOLDER a tokenizer.json unless it
    has one itself. Raises ModelBroken for a base model to which the weights do not fit.
    """
    file = _find_config_file(directory)
    config = dict(_object(directory, file))
    if (directory / BASE_FOLDER / "config.json").is_file():
        config |= _from_base_model(directory, file, config)
    if (
        file == gliner.FILE
        and (directory / LABELS_FOLDER / "config.json").is_file()
        and not config.get("labels_encoder_config")
    ):
        config["labels_encoder_config"] = dict(_object(directory, f"{LABELS_FOLDER}/config.json"))
    _write(directory / file, config)


def _find_config_file(directory: Path) -> str:
    """Return the package's configuration file in a directory; empty if it has none."""
    return next((file for file in (gliner.FILE, glirel.FILE) if (directory / file).is_file()), "")


def _from_base_model(directory: Path, file: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Write the tokenizer if it is missing, and return the configuration's keys that the base model
    decides.
    """
    base, rows = _object(directory, f"{BASE_FOLDER}/config.json"), _rows(directory)
    ids: dict[str, int] = {}
    if not (directory / TOKENIZER).is_file():
        tokenizer = json.loads((directory / BASE_FOLDER / TOKENIZER).read_text(encoding="utf-8"))
        ids = _add_markers(tokenizer, file, config, rows)
        _write(directory / TOKENIZER, tokenizer)
        settings = read_config(directory, f"{BASE_FOLDER}/tokenizer_config.json")
        _write(directory / "tokenizer_config.json", dict(settings.values) if settings else {})
    encoder = {**base, "vocab_size": rows}
    if file == glirel.FILE:
        return {"encoder_config": encoder}
    given = config.get("class_token_index", -1)
    marker = ids.get(str(config.get("ent_token", "<<ENT>>")), given)
    return {"encoder_config": encoder, "class_token_index": marker, "vocab_size": rows}


def _add_markers(
    tokenizer: dict[str, Any], file: str, config: Mapping[str, Any], rows: int
) -> dict[str, int]:
    """Add the package's markers, and return their ids. The rows of the embedding show which markers
    the weights have.

    Raises ModelBroken if no version of the package adds as many tokens.
    """
    known = {str(entry["content"]): int(entry["id"]) for entry in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"]
    first = 1 + max([*known.values(), _largest(vocab)])
    versions = _glirel_versions(vocab, known) if file == glirel.FILE else _gliner_versions(config)
    markers = next((version for version in versions if first + len(version) == rows), None)
    if markers is None:
        names = " or ".join(", ".join(marker.content for marker in version) for version in versions)
        raise ModelBroken(
            f"{file}: model_name is {config.get('model_name')!r}, and its tokenizer has {first:,} "
            "tokens; with the markers "
            f"{names} that is not the {rows:,} rows of the weights' embedding"
        )
    ids = {marker.content: first + place for place, marker in enumerate(markers)}
    tokenizer["added_tokens"] += [marker.entry(ids[marker.content]) for marker in markers]
    return ids


def _gliner_versions(config: Mapping[str, Any]) -> Sequence[Sequence[_Marker]]:
    """Return the tokens that versions of gliner add, newest last."""
    ent, sep = (
        _Marker(str(config.get("ent_token", "<<ENT>>"))),
        _Marker(str(config.get("sep_token", "<<SEP>>"))),
    )
    if config.get("relations_layer"):
        return ((ent, sep, _Marker(str(config.get("rel_token", "<<REL>>")))), (ent, sep))
    return ((_Marker(_SEPARATOR), ent, sep), (ent, sep))


def _glirel_versions(vocab: object, known: Mapping[str, int]) -> Sequence[Sequence[_Marker]]:
    """Return the tokens that versions of glirel add; the separator of most base models is in their
    vocabulary already.
    """
    words = (
        vocab.keys()
        if isinstance(vocab, dict)
        else {entry[0] for entry in vocab}
        if isinstance(vocab, list)
        else ()
    )
    added = [
        _Marker(_SEPARATOR),
        *(_Marker(token, is_special=False) for token in (glirel.LABEL_MARKER, glirel.TEXT_MARKER)),
    ]
    newer = [*added, _Marker("[E]", is_special=False), _Marker("[/E]", is_special=False)]
    return [
        [
            marker
            for marker in version
            if marker.content not in known and marker.content not in words
        ]
        for version in (newer, added)
    ]


def _largest(vocab: object) -> int:
    if isinstance(vocab, dict):
        return max(vocab.values(), default=-1)
    return len(vocab) - 1 if isinstance(vocab, list) else -1


def _rows(directory: Path) -> int:
    """Return the rows of the encoder's embedding."""
    for path in sorted(directory.glob("*.safetensors")):
        entries = tensor_entries(directory, path.name)
        for name in _EMBEDDINGS:
            if name in entries:
                return int(entries[name].shape[0])
    raise ModelBroken(
        f"model.safetensors: has no tensor {_EMBEDDINGS[0]!r}, so its base model's tokenizer "
        "cannot be completed"
    )


def _object(directory: Path, name: str) -> Mapping[str, Any]:
    found = read_config(directory, name)
    if found is None:
        raise ModelBroken(f"{name}: missing from {directory}")
    return found.values


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

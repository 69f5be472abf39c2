"""Read a directory in the layout of transformers and sentence-transformers: its parsed files, and
the fields of a card that every kind in this layout has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from libs.catalog.card import Card, Representation, Truncation
from libs.catalog.checkpoint.adapter import FILE as ADAPTER
from libs.catalog.checkpoint.adapter import WEIGHTS as ADAPTER_WEIGHTS
from libs.catalog.checkpoint.chat import template_files
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    digest,
    locate,
    need_config,
    need_tokenizer,
    read_config,
    tensor_files,
)
from libs.catalog.checkpoint.modules import Modules, read_modules, read_prompts, sentence_settings
from libs.catalog.checkpoint.tasks import read_own_adapters
from libs.errors import ModelBroken

# Families with a position table that begins with rows for padding (transformers:
# create_position_ids_from_input_ids).
_OFFSET_POSITIONS = (
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "camembert",
    "mpnet",
    "longformer",
)
_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_NOT_SERVED: dict[str, str] = {
    "cost_wise_gemma": (
        "Gemma 2 with layers that merge tokens and a score after each layer, which exist only as "
        "code in the checkpoint: use BAAI/bge-reranker-v2-gemma or BAAI/bge-reranker-v2-m3"
    ),
    "big_bird": (
        "with sparse attention, which is not served: long texts are read by Longformer (model_type "
        "'longformer'), by ModernBERT (model_type 'modernbert', 8,192 tokens) and by "
        "GTE (model_type 'new', such as Alibaba-NLP/gte-multilingual-base)"
    ),
}
"""Families that users ask for and that are not served, each with an alternative."""
_TOKENIZER_HEAD_BYTES = 1 << 12
_SAVED_SIDE = re.compile(rb'"truncation"\s*:\s*\{[^{}]*"direction"\s*:\s*"(Left|Right)"')
_SIDES: dict[str, Truncation] = {"right": "end", "left": "start"}
_UNLIMITED = 1 << 31  # tokens; tokenizers write a huge number for "no limit"
_DEFAULT_MAX_TOKENS = (
    1 << 15
)  # tokens, for models with unlimited positions and no limit in any file: T5
LAYERS: Final[Mapping[str, Representation]] = {
    "sparse_linear.safetensors": "sparse",
    "colbert_linear.safetensors": "multi_vector",
}
"""Linear layers next to the encoder's, of the kind `hybrid` (BAAI/bge-m3), and their outputs."""
_SERVED_TYPES = (
    "",
    "SentenceTransformer",
    "CrossEncoder",
    "MultiVectorEncoder",
    "ColBERT",
    "SparseEncoder",
)


def read_checkpoint(directory: Path) -> Checkpoint:
    if not directory.is_dir():
        raise ModelBroken(f"{directory}: not a directory")
    return modules_checkpoint(directory, read_modules(directory))


def modules_checkpoint(directory: Path, modules: Modules) -> Checkpoint:
    folder = modules.encoder_folder
    config = need_config(directory, str(Path(folder) / "config.json"))
    if not config.text("model_type"):
        raise config.broken("model_type", "is missing: it names the family")
    if config.text("model_type") in _NOT_SERVED:
        kind = config.text("model_type")
        raise config.broken("model_type", f"is {kind!r}, {_NOT_SERVED[kind]}")
    need_tokenizer(directory / folder)
    top = read_config(directory, "config_sentence_transformers.json") or CheckpointConfig(
        "config_sentence_transformers.json", {}
    )
    if top.text("model_type") not in _SERVED_TYPES:
        raise top.broken(
            "model_type",
            (
                f"is {top.text('model_type')!r}, which is not served: "
                f"{', '.join(_SERVED_TYPES[1:])} "
                "are"
            ),
        )
    return Checkpoint(
        directory,
        config,
        top,
        modules,
        sentence_settings(directory, folder),
        tensor_files(directory, folder),
    )


def common_card(files: Checkpoint, model: str, kind: str) -> Card:
    """Return a card with the fields that every kind has; its reader fills in the others."""
    prompts, default = read_prompts(files.top)
    return Card(
        model=model,
        revision=model.partition("@")[2]
        or files.directory.name.partition("@")[2]
        or _revision(files),
        family=files.config.text("model_type"),
        kind=kind,
        tasks=(),
        representations=(),
        max_tokens=_max_tokens(files),
        prompts=prompts,
        default_prompt=default,
        encoder_folder=files.modules.encoder_folder,
        truncation=_truncation(files),
        lowercase=files.sentence.flag("do_lower_case"),
    )


def _revision(files: Checkpoint) -> str:
    """Return the revision of a checkpoint that neither its id nor its folder names: a digest of
    configurations and tensor headers.
    """
    parts = [module.folder for module in files.modules.dense]
    configs = [f"{folder}/config.json" for folder in parts]
    configs += [
        files.config.file,
        files.sentence.file,
        files.top.file,
        "modules.json",
        "1_Pooling/config.json",
        "artifact.metadata",
        "idf.json",
        "router_config.json",
        "generation_config.json",
    ]
    tensors = [name for folder in parts for name in tensor_files(files.directory, folder)]
    own = read_own_adapters(files.config)
    if own.folder:
        configs += [f"{own.folder}/{name}/{ADAPTER}" for name in own.names]
        tensors += [f"{own.folder}/{name}/{ADAPTER_WEIGHTS}" for name in own.names]
    tensors += layer_files(files)
    if files.modules.queries is not None:
        of_queries = [
            files.modules.queries.encoder_folder,
            *(module.folder for module in files.modules.queries.dense),
        ]
        configs += [str(Path(folder) / "config.json") for folder in of_queries]
        tensors += [name for folder in of_queries for name in tensor_files(files.directory, folder)]
    configs += template_files(files)
    if files.modules.answers is not None:
        configs.append(files.modules.answers.file)
    if files.modules.splade is not None:
        configs.append(files.modules.splade.file)
    if files.modules.static is not None and files.modules.static.file.endswith(".safetensors"):
        tensors += tensor_files(files.directory, files.modules.static.folder)
    return digest(files.directory, configs, files.tensors + tensors)


def layer_files(files: Checkpoint) -> tuple[str, ...]:
    """Return the files of linear layers next to the encoder's that the checkpoint has as
    safetensors; a hybrid model has at least one.
    """
    return tuple(name for name in LAYERS if (files.directory / name).is_file())


def _max_tokens(files: Checkpoint) -> int:
    """Return sentence-transformers' limit, else the tokenizer's, at most the number of
    positions.
    """
    tokenizer = _tokenizer_config(files)
    wanted = files.sentence.number("max_seq_length", most=math.inf) or tokenizer.number(
        "model_max_length", most=math.inf
    )
    found = (
        wanted,
        files.config.number("model_max_length", most=math.inf),
        _positions(files.config),
    )
    limits = [limit for limit in found if 0 < limit < _UNLIMITED]
    if not limits and wanted:
        return _DEFAULT_MAX_TOKENS
    if not limits:
        raise files.config.broken(
            "max_position_embeddings", "is missing, and no other file limits the length of a text"
        )
    return min(limits)


def _tokenizer_config(files: Checkpoint) -> CheckpointConfig:
    name = str(Path(files.modules.encoder_folder) / "tokenizer_config.json")
    return read_config(files.directory, name) or CheckpointConfig(name, {})


def _truncation(files: Checkpoint) -> Truncation:
    config = _tokenizer_config(files)
    side = config.text("truncation_side") or _saved_side(files) or "right"
    if side not in _SIDES:
        raise config.broken(
            "truncation_side", f"is {side!r}, which is not one of {', '.join(_SIDES)}"
        )
    return _SIDES[side]


def _saved_side(files: Checkpoint) -> str:
    """Return the side that tokenizer.json truncates; empty if the file has no truncation.

    Only the head of the file is read, where the `tokenizers` library writes its settings: the
    vocabulary has many megabytes.
    """
    path = locate(files.directory, str(Path(files.modules.encoder_folder) / "tokenizer.json"))
    if path is None:
        return ""
    with path.open("rb") as file:
        found = _SAVED_SIDE.search(file.read(_TOKENIZER_HEAD_BYTES))
    return "" if found is None else found[1].decode().lower()


def _positions(config: CheckpointConfig) -> int:
    """Return the number of positions for a text's tokens; 0: unlimited."""
    positions = next((count for key in _POSITION_KEYS if (count := config.number(key))), 0)
    if positions and config.text("model_type") in _OFFSET_POSITIONS:
        positions -= config.number("pad_token_id", 1) + 1
    if (
        config.values.get("rotary_scaling_factor") is not None
    ):  # Nomic BERT rotates otherwise beyond the trained length.
        positions = min(positions, config.number("max_trained_positions", 2048))
    return positions

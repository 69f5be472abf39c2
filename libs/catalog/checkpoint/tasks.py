"""Read the LoRA adapters in a checkpoint, one for each of its tasks, and how roles choose among
them.

Two layouts are known. jina-embeddings-v3: config.json names the tasks in `lora_adaptations`, and
their factors lie among the model's tensors. jina-embeddings-v5-text: config.json names them in
`task_names`, and each has a directory in PEFT's layout. Both name custom code in modules.json that
is equivalent to `Transformer` of sentence-transformers; the code is never run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from libs.catalog.checkpoint.files import CheckpointConfig, read_config

CUSTOM_TRANSFORMER: Final = "custom_st.Transformer"
V5: Final = "jina_embeddings_v5"
FOLDER: Final = "adapters"
"""The folder of jina-embeddings-v5's adapters."""

_DEFAULT: Final = "retrieval"
"""The task of jina-embeddings-v5 where a request names none."""

_QUERY, _PASSAGE = "retrieval.query", "retrieval.passage"
_UNSERVED: Final = {
    "JinaEmbeddingsV4Model": (
        "jina-embeddings-v4 is not served, as only its own code describes its adapters and its "
        "projector. For texts use "
        "jinaai/jina-embeddings-v5-text-small or jinaai/jina-embeddings-v3, for pages "
        "vidore/colqwen2.5-v0.2"
    ),
    "JinaForRanking": (
        "jina-reranker-v3 and its successors are not served, as a score depends on all documents "
        "of the request. Use jinaai/jina-reranker-m0 or jinaai/jina-reranker-v2-base-multilingual"
    ),
}
_MAX_TASKS: Final = 64
_TASK: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class OwnAdapters:
    """The adapters in a checkpoint.

    Args:
        names: The tasks, in the checkpoint's order; may be empty.
        by_role: The adapter of each role (`query`, `document`, empty for none) that has one.
        prompts: The prompt of each task with a specific one, whatever the role; empty: prompts go
            by the role.
        rank: The rank of the factors among the model's tensors.
        scale: The factor of their product.
        folder: The folder of the adapters' directories; empty: the factors lie among the model's
            tensors.
    """

    names: tuple[str, ...] = ()
    by_role: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=dict)
    rank: int = 0
    scale: float = 1.0
    folder: str = ""


def has_tasks(directory: Path) -> bool:
    """Return True if the checkpoint's custom `Transformer` is known to equal that of
    sentence-transformers.
    """
    config = read_config(directory, "config.json")
    return config is not None and bool(read_own_adapters(config).names)


def refuse_unserved(directory: Path) -> None:
    """Raise ModelBroken, with what to use instead, for a relative of these models that is not
    served.
    """
    config = read_config(directory, "config.json")
    for name in () if config is None else config.texts("architectures"):
        if config is not None and name in _UNSERVED:
            raise config.broken("architectures", f"is {name}: {_UNSERVED[name]}")


def is_parametrized(tensor: str) -> bool:
    """Return whether a tensor is of a layer with adapters, by its name in jina-embeddings-v3."""
    return ".parametrizations." in tensor


def read_own_adapters(config: CheckpointConfig) -> OwnAdapters:
    """Return the adapters that config.json names. Raise ModelBroken for names and numbers that
    cannot be.
    """
    if config.text("model_type") == V5:
        names = _names(config, "task_names")
        default = _DEFAULT if _DEFAULT in names else next(iter(names), "")
        return OwnAdapters(
            names,
            dict.fromkeys(("", "query", "document"), default) if default else {},
            folder=FOLDER,
        )
    names = _names(config, "lora_adaptations")
    if not names:
        return OwnAdapters()
    rank = config.number("lora_rank", 4)
    if not rank:
        raise config.broken("lora_rank", "must be at least 1")
    by_role = {
        role: task for role, task in (("query", _QUERY), ("document", _PASSAGE)) if task in names
    }
    instructions = config.part("task_instructions")
    prompts = {name: instructions.text(name) for name in names}
    return OwnAdapters(names, by_role, prompts, rank, _alpha(config) / rank)


def _alpha(config: CheckpointConfig) -> float:
    value = config.values.get("lora_alpha", 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise config.broken("lora_alpha", f"must be a number, not {value!r}")
    return float(value)


def _names(config: CheckpointConfig, key: str) -> tuple[str, ...]:
    names = config.texts(key)
    if len(names) > _MAX_TASKS or len(set(names)) < len(names):
        raise config.broken(key, f"must name at most {_MAX_TASKS} tasks, each once")
    for name in names:
        if not _TASK.fullmatch(name):
            raise config.broken(
                key,
                (
                    f"has {name!r}, which is not a plain name of A-Z a-z 0-9 . _ - and at most 128 "
                    "characters"
                ),
            )
    return names

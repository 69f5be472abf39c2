"""A LoRA adapter's directory as PEFT writes it: adapter_config.json -> what the adapter asks for, or why it is not served.

Read by workers before the adapter's tensors (`libs/models/lora.py`). With nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from libs.catalog.checkpoint.files import Config, need_config
from libs.catalog.checkpoint.patterns import Pattern, Unsupported, compiled

FILE: Final = "adapter_config.json"
"""It makes a directory an adapter."""

WEIGHTS: Final = "adapter_model.safetensors"

ALL_LINEAR: Final = "all-linear"

REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA also scales the model's own weights; only plain LoRA is served",
    "modules_to_save": (
        "whole layers trained beside the low-rank ones (a new classifier, say) are not served; save the adapter without them, or "
        "merge it into a model of its own with merge_and_unload"
    ),
    "trainable_token_indices": "trained token vectors are not served",
    "target_parameters": "adapters of bare parameters (the experts of a mixture) are not served, only those of linear layers",
    "lora_bias": "a bias of the low-rank part is not served",
    "layer_replication": "layers that are there several times are not served",
    "alora_invocation_tokens": "an adapter that only some tokens activate (aLoRA) is not served",
    "use_qalora": "QALoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "a choice among several adapters by token (Arrow) is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "MonteCLoRA is not served",
    "velora_config": "VeLoRA is not served",
}
"""Keys that change what is computed, and why they are refused where they are set."""

IGNORED: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version", "lora_dropout",
        # PEFT itself resets it for linear layers, and no model served here has others.
        "fan_in_fan_out",
        # Which modules have an adapter is told by the file's tensors.
        "exclude_modules", "layers_to_transform", "layers_pattern",
        # Of training and of how a model is spread over devices.
        "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
        "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
"""Keys that change nothing in what is computed with the tensors of the file."""

READ: Final = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias",
        "init_lora_weights",
    }
)  # fmt: skip

_INITIAL: Final = ("gaussian", "eva", "orthogonal")
"""Ways to begin a training that leave the model's own weights alone. Others (PiSSA, OLoRA, CorDA, LoftQ) change them."""

_MOST_TARGETS: Final = 10_000
_MOST_PATTERNS: Final = 32_768
"""Characters of all patterns of a key: some adapters have one for each of their modules."""

Numbers: TypeAlias = Sequence[tuple[Pattern, float]]
"""What modules have whose names a pattern matches; the first that does counts."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What adapter_config.json says. `targets`: the last parts of the names of adapted modules; None: whichever have tensors."""

    base: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Numbers
    alphas: Numbers
    targets: frozenset[str] | None

    def is_target(self, module: str) -> bool:
        """Whether the module (its name in the model that was trained) is among `target_modules`."""
        if self.targets is None:
            return True
        parts = module.split(".")
        return any(".".join(parts[number:]) in self.targets for number in range(len(parts)))

    def rank_of(self, module: str) -> int:
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_adapter(directory: Path) -> Adapter:
    """Raises ModelBroken naming the key of adapter_config.json that cannot be served."""
    config = need_config(directory, FILE)
    kind = config.text("peft_type")
    if kind != "LORA":
        raise config.broken("peft_type", f"is {kind!r}; only LORA is served" if kind else "is missing; LORA is needed")
    _refuse(config)
    return Adapter(
        base=config.text("base_model_name_or_path"),
        rank=_rank(config, "r", config.values.get("r")),
        alpha=_number(config, "lora_alpha", config.values.get("lora_alpha")),
        rslora=config.flag("use_rslora"),
        ranks=_numbers(config, "rank_pattern", _rank),
        alphas=_numbers(config, "alpha_pattern", _number),
        targets=_targets(config),
    )


def _refuse(config: Config) -> None:
    for key, reason in REFUSED.items():
        value = config.values.get(key)
        if value:
            raise config.broken(key, f"is {_short(value)}: {reason}")
    for key, value in config.values.items():
        if value and key not in REFUSED and key not in IGNORED and key not in READ:
            raise config.broken(key, f"is {_short(value)}, which is not known here and could change what is computed")
    bias = config.text("bias", "none")
    if bias != "none":
        raise config.broken("bias", f"is {bias!r}: trained biases are not served, only `none` is")
    initial = config.values.get("init_lora_weights", True)
    if not (isinstance(initial, bool) or initial is None or initial in _INITIAL):
        raise config.broken(
            "init_lora_weights",
            f"is {_short(initial)}: such adapters belong to changed weights of the model. PEFT's save_pretrained converts them, "
            "with path_initial_model_for_weight_conversion",
        )


def _targets(config: Config) -> frozenset[str] | None:
    """A single string is `all-linear` or a pattern. It is not tried: the file's tensors tell what it matched."""
    value = config.values.get("target_modules")
    if value is None or isinstance(value, str):
        return None
    found = config.texts("target_modules")
    if len(found) > _MOST_TARGETS:
        raise config.broken("target_modules", f"names {len(found):,} modules; at most {_MOST_TARGETS:,} are served")
    return frozenset(found)


def _numbers(config: Config, key: str, read: Callable[[Config, str, object], float]) -> Numbers:
    """By patterns of module names. They are others' regular expressions, so none is tried in a way that may take long."""
    values = config.part(key).values
    total = sum(map(len, values))
    if total > _MOST_PATTERNS:
        raise config.broken(key, f"has patterns of {total:,} characters; at most {_MOST_PATTERNS:,} are served")
    return tuple((_pattern(config, key, text), read(config, key, value)) for text, value in values.items())


def _pattern(config: Config, key: str, text: str) -> Pattern:
    try:
        return compiled(text)
    except Unsupported as problem:
        advice = "which is not served: name the modules, with `.*` or `[0-9]+` where they differ"
        raise config.broken(key, f"has the pattern {_short(text)}, {advice}. It {problem}") from None


def _matching(values: Numbers, module: str, default: float) -> float:
    """That of the first pattern which the end of the module's name matches (PEFT: get_pattern_key)."""
    return next((value for pattern, value in values if pattern.matches_end(module)), default)


def _rank(config: Config, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise config.broken(key, f"must be a whole number of at least 1, not {_short(value)}")
    return value


def _number(config: Config, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise config.broken(key, f"must be a number, not {_short(value)}")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

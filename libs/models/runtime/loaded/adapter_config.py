"""Parses adapter_config.json of a LoRA adapter, as PEFT writes it, and refuses adapters that are
not served, with the reason.

Workers read it before the adapter's tensors (`libs/models/runtime/loaded/peft.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from libs.catalog.checkpoint.adapter import FILE
from libs.catalog.checkpoint.files import CheckpointConfig, need_config
from libs.models.runtime.loaded.patterns import Pattern, UnsupportedPattern, compile_pattern

REFUSED: Final[Mapping[str, str]] = {
    "modules_to_save": (
        "layers trained in full (a new classifier, say) are not served; save the adapter without "
        "them, or merge it into a separate model with merge_and_unload"
    ),
    "trainable_token_indices": "trained token vectors are not served",
    "target_parameters": (
        "adapters of bare parameters (the experts of a mixture) are not served, only those of "
        "linear layers"
    ),
    "lora_bias": "a bias of the low-rank part is not served",
    "layer_replication": "repeated layers are not served",
    "alora_invocation_tokens": "an adapter that only some tokens activate (aLoRA) is not served",
    "use_qalora": "QALoRA is not served",
    "use_bdlora": "block-diagonal LoRA is not served",
    "arrow_config": "routing of tokens among several adapters (Arrow) is not served",
    "kasa_config": "KaSA is not served",
    "monteclora_config": "MonteCLoRA is not served",
    "velora_config": "VeLoRA is not served",
}
"""Keys that would change the computation if they are set, and the reason for refusing them."""

IGNORED: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type",
        "peft_version", "lora_dropout",
        # PEFT itself resets it for linear layers, and no model served here has others.
        "fan_in_fan_out",
        # The file's tensors determine which modules have an adapter.
        "exclude_modules", "layers_to_transform", "layers_pattern",
        # Training, and sharding over devices.
        "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config",
        "lora_ga_config", "qalora_group_size",
        "runtime_config", "ensure_weight_tying",
    }
)  # fmt: skip
"""Keys that do not change the computation with the file's tensors."""

READ: Final = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern",
        "target_modules", "bias",
        "init_lora_weights",
    }
)  # fmt: skip

_INITIAL: Final = ("gaussian", "eva", "orthogonal")
"""Initialisations that do not change the model's own weights. Others (PiSSA, OLoRA, CorDA, LoftQ)
do.
"""

_MAX_TARGETS: Final = 10_000
_MAX_PATTERNS: Final = 32_768
"""Characters of all patterns of a key together: some adapters have a pattern for each of their
modules.
"""

Numbers: TypeAlias = Sequence[tuple[Pattern, float]]
"""Values for modules by patterns of their names; the first pattern that matches counts."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's configuration.

    Attributes:
        targets: The last components of the adapted modules' names; None: all modules with tensors.
        dora: Whether each module also has a magnitude for each of its outputs (DoRA).
    """

    base: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Numbers
    alphas: Numbers
    targets: frozenset[str] | None
    dora: bool = False

    def is_target(self, module: str) -> bool:
        """Return True if the module (its name in the trained model) is among `target_modules`."""
        if self.targets is None:
            return True
        parts = module.split(".")
        return any(".".join(parts[number:]) in self.targets for number in range(len(parts)))

    def module_rank(self, module: str) -> int:
        """The rank r of the module's A and B."""
        return int(_matching(self.ranks, module, self.rank))

    def module_scale(self, module: str) -> float:
        """The factor of the product B A: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv
        2312.03732).
        """
        rank = self.module_rank(module)
        return _matching(self.alphas, module, self.alpha) / (
            math.sqrt(rank) if self.rslora else rank
        )


def read_adapter(directory: Path) -> Adapter:
    """The configuration of the adapter in `directory`. Raises ModelBroken naming the key that is
    not served.
    """
    config = need_config(directory, FILE)
    kind = config.text("peft_type")
    if kind != "LORA":
        raise config.broken(
            "peft_type",
            f"is {kind!r}; only LORA is served" if kind else "is missing; it must be LORA",
        )
    _refuse(config)
    return Adapter(
        base=config.text("base_model_name_or_path"),
        rank=_rank(config, "r", config.values.get("r")),
        alpha=_number(config, "lora_alpha", config.values.get("lora_alpha")),
        rslora=config.flag("use_rslora"),
        ranks=_numbers(config, "rank_pattern", _rank),
        alphas=_numbers(config, "alpha_pattern", _number),
        targets=_targets(config),
        dora=config.flag("use_dora"),
    )


def _refuse(config: CheckpointConfig) -> None:
    for key, reason in REFUSED.items():
        value = config.values.get(key)
        if value:
            raise config.broken(key, f"is {_short(value)}: {reason}")
    for key, value in config.values.items():
        if value and key not in REFUSED and key not in IGNORED and key not in READ:
            raise config.broken(
                key, f"is {_short(value)}, which is unknown and could change the computation"
            )
    bias = config.text("bias", "none")
    if bias != "none":
        raise config.broken("bias", f"is {bias!r}: trained biases are not served, only `none` is")
    initial = config.values.get("init_lora_weights", True)
    if not (isinstance(initial, bool) or initial is None or initial in _INITIAL):
        raise config.broken(
            "init_lora_weights",
            f"is {_short(initial)}: such an adapter fits only weights that this initialisation "
            "has changed. PEFT's save_pretrained "
            "converts it, with path_initial_model_for_weight_conversion",
        )


def _targets(config: CheckpointConfig) -> frozenset[str] | None:
    """Return the list of `target_modules`; None for a single string (`all-linear` or a pattern), as
    the tensors show the modules that it matched.
    """
    value = config.values.get("target_modules")
    if value is None or isinstance(value, str):
        return None
    found = config.texts("target_modules")
    if len(found) > _MAX_TARGETS:
        raise config.broken(
            "target_modules", f"names {len(found):,} modules; at most {_MAX_TARGETS:,} are served"
        )
    return frozenset(found)


def _numbers(
    config: CheckpointConfig, key: str, read: Callable[[CheckpointConfig, str, object], float]
) -> Numbers:
    """Values by patterns of module names. The patterns are untrusted, so they are matched in linear
    time (`libs/models/runtime/loaded/patterns.py`).
    """
    values = config.part(key).values
    total = sum(map(len, values))
    if total > _MAX_PATTERNS:
        raise config.broken(
            key, f"has patterns of {total:,} characters; at most {_MAX_PATTERNS:,} are served"
        )
    return tuple(
        (_pattern(config, key, text), read(config, key, value)) for text, value in values.items()
    )


def _pattern(config: CheckpointConfig, key: str, text: str) -> Pattern:
    try:
        return compile_pattern(text)
    except UnsupportedPattern as problem:
        advice = "which is not supported: name the modules, with `.*` or `[0-9]+` where they differ"
        raise config.broken(
            key, f"has the pattern {_short(text)}, {advice}. It {problem}"
        ) from None


def _matching(values: Numbers, module: str, default: float) -> float:
    """The value of the first pattern that matches the end of the module's name (PEFT:
    get_pattern_key), else the default.
    """
    return next((value for pattern, value in values if pattern.matches_end(module)), default)


def _rank(config: CheckpointConfig, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise config.broken(key, f"must be a whole number of at least 1, not {_short(value)}")
    return value


def _number(config: CheckpointConfig, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise config.broken(key, f"must be a number, not {_short(value)}")
    return float(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

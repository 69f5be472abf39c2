"""Read the rotary positions (RoPE) and RoPE scaling of a config.json into a Rope, for every family
with rotary positions.

Scalings are in `rope_parameters`, flat or with an entry for each layer type (transformers 5), or in
`rope_scaling` (older). The formulas follow transformers' modeling_rope_utils step by step in
float32, so that frequencies agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from libs.errors import ModelBroken
from libs.models.layers.spec import MIN_POSITIVE, Config, Rope

_THETA = 10_000.0
_MAX_TURNED = 1 << 13


def read_rope(
    config: Config,
    size: int,
    *,
    theta: float | None = None,
    kind: str = "",
    scaled: bool = True,
    partial: bool = False,
) -> Rope:
    """Return the rotation of heads of `size` dimensions.

    Raises ModelBroken for an unknown scaling, naming the key, and for a size that cannot be
    rotated.

    Args:
        partial: The family reads `partial_rotary_factor`, which may leave the last dimensions
            unrotated.
            transformers' Llama and families like it ignore that key without a scaling and fail with
            one, so the combination is refused.
        theta: The base, unless the scaling has one; None for `rope_theta`.
        kind: The layer type ("full_attention", "sliding_attention"), where `rope_parameters` has an
            entry for each.
        scaled: False if `rope_scaling` does not apply to these layers.
    """
    values = config.part("rope_scaling")
    if not scaled or not config.has("rope_scaling"):
        values = config.part("rope_parameters")
        values = values.part(kind) if values.has(kind) else values
    base = values.number(
        "rope_theta", config.number("rope_theta", _THETA) if theta is None else theta
    )
    key = "rope_type" if values.has("rope_type") else "type"
    name = values.text(key, "default")
    share = values.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if not partial and share != 1.0 and name != "default":
        where = values if values.has("partial_rotary_factor") else config
        raise where.unsupported(
            "partial_rotary_factor", f"this family rotates whole heads where {key} is {name}"
        )
    turned = int(size * share) if partial else size
    if turned < 2 or turned % 2 or turned > _MAX_TURNED:
        wanted = f"an even number of numbers of each head, at most {_MAX_TURNED:,}"
        raise ModelBroken(
            f"config.json: rotary positions need {wanted}: of {size} they get {turned}"
        )
    if name not in _SCALINGS:
        raise values.unsupported(key, f"supported are {', '.join(_SCALINGS)}")
    frequencies, factor = _SCALINGS[name](values, config, base, turned)
    rope = Rope(tuple(frequencies.tolist()), factor, _axes(values, turned // 2))
    return _with_long(rope, values, config, base, turned) if _SCALINGS[name] is _longrope else rope


def _axes(values: Config, pairs: int) -> tuple[int, ...]:
    """Read M-RoPE (arXiv 2409.12191): which of time, height and width rotates each pair.

    Returns an empty tuple for a model with one dimension.
    """
    if not values.has("mrope_section"):
        return ()
    sections = [int(size) for size in values.numbers("mrope_section", (0.0, 0.0, 0.0))]
    if sum(sections) != pairs or min(sections) < 0:
        raise values.unsupported(
            "mrope_section", f"three numbers are needed that make up the {pairs} pairs of a head"
        )
    if not values.flag("mrope_interleaved", False):
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs))


def _plain(base: float, size: int) -> Tensor:
    """Return RoFormer's base^(-2i / size) (arXiv 2104.09864): float32 [size / 2], on the CPU even
    if the model is built on another device.
    """
    return 1.0 / base ** _exponents(size)


def _exponents(size: int) -> Tensor:
    return torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size


def _default(values: Config, config: Config, base: float, size: int) -> tuple[Tensor, float]:
    """Return plain frequencies, also for `dynamic`, which changes them only beyond
    `max_position_embeddings`, a length never served.
    """
    return _plain(base, size), 1.0


def _linear(values: Config, config: Config, base: float, size: int) -> tuple[Tensor, float]:
    """Divide positions by `factor` (arXiv 2306.15595)."""
    return _plain(base, size) / values.number("factor"), 1.0


def _ntk(values: Config, config: Config, base: float, size: int) -> tuple[Tensor, float]:
    """Scale as Alibaba-NLP/new-impl: fixed NTK and, with `mixed_b`, mixed NTK
    (kexue.fm/archives/9706,
    formulas 6 and 10 to 13).
    """
    factor = values.number("factor")
    if factor <= 1.0:
        return _plain(base, size), 1.0
    if not values.has("mixed_b"):
        return _plain(base * factor, size) / factor ** (2 / size), 1.0
    power = values.number("mixed_b")
    step = math.log(factor) / (size / 2) ** power
    return _plain(base, size) / (
        step * torch.arange(1, size // 2 + 1, device="cpu").float() ** power
    ).exp(), 1.0


def _yarn(values: Config, config: Config, base: float, size: int) -> tuple[Tensor, float]:
    """Scale by YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, with a linear
    ramp between them.
    """
    original = _original_length(values, config)
    factor = (
        values.number("factor")
        if values.has("factor")
        else config.size("max_position_embeddings") / original
    )

    def pair(turns: float) -> float:
        """Return the index of the pair with this number of turns in the original context length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(values.number("beta_fast", 32)), pair(values.number("beta_slow", 1))
    if values.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32, device="cpu") - low) / (
        high - low or 0.001
    )
    kept = 1 - ramp.clamp(0, 1)
    periods = base ** _exponents(size)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, _yarn_factor(
        values, factor
    )


def _yarn_factor(values: Config, factor: float) -> float:
    """Return YaRN's attention factor on cos and sin: the given one, the paper's, or DeepSeek's
    ratio of two.
    """

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.has("attention_factor"):
        return values.number("attention_factor")
    upper, lower = values.number("mscale", 0), values.number("mscale_all_dim", 0)
    return scale(upper) / scale(lower) if upper and lower else scale(1)


def _llama3(values: Config, config: Config, base: float, size: int) -> tuple[Tensor, float]:
    """Stretch long wavelengths by `factor`, keep short ones and blend those between (Llama 3.1's
    reference code).
    """
    original = _original_length(values, config)
    factor, low, high = (
        values.number("factor"),
        values.number("low_freq_factor"),
        values.number("high_freq_factor"),
    )
    plain = _plain(base, size)
    waves = 2 * math.pi / plain
    share = (original / waves - low) / (high - low)
    blended = (1 - share) * plain / factor + share * plain
    stretched = torch.where(waves > original / low, plain / factor, blended)
    return torch.where(waves < original / high, plain, stretched), 1.0


def _longrope(values: Config, config: Config, base: float, size: int) -> tuple[Tensor, float]:
    """Scale by LongRoPE (arXiv 2402.13753), for sequences within the original context: each pair
    has its own factor.
    """
    original = _original_length(values, config)
    factor = values.positive("factor", config.size("max_position_embeddings") / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _slowed("short_factor", values, base, size), values.number("attention_factor", scale)


def _with_long(rope: Rope, values: Config, config: Config, base: float, size: int) -> Rope:
    """Add the frequencies of longer sequences to `rope`, unless no sequence is longer."""
    frequencies, original = (
        _slowed("long_factor", values, base, size),
        _original_length(values, config),
    )
    if config.size("max_position_embeddings") <= original:
        return rope
    return replace(rope, long=tuple(frequencies.tolist()), long_from=original)


def _slowed(key: str, values: Config, base: float, size: int) -> Tensor:
    if not values.has(key):
        raise values.unsupported(key, f"a list of {size // 2} numbers is needed")
    factors = values.numbers(key, (0.0,) * (size // 2), least=MIN_POSITIVE)
    return 1.0 / (
        torch.tensor(factors, dtype=torch.float32, device="cpu") * base ** _exponents(size)
    )


def _original_length(values: Config, config: Config) -> int:
    """Return the context length before RoPE scaling. config.json's top-level key takes precedence,
    as in transformers.
    """
    inner = values.size("original_max_position_embeddings", config.size("max_position_embeddings"))
    return config.size("original_max_position_embeddings", inner)


_SCALINGS: dict[str, Callable[[Config, Config, float, int], tuple[Tensor, float]]] = {
    "default": _default,
    "mrope": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "ntk": _ntk,
    "su": _longrope,  # its name in the first files of Phi-3
    "yarn": _yarn,
}

"""The specification of an encoder, as data; and the typed reader of a checkpoint's config.json,
from which families build it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from libs.catalog.checkpoint.files import shortened
from libs.errors import ModelBroken

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]

# Names of activations in config.json; plain gelu is the exact one (erf).
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


# Upper bounds: far above every model's, and low enough that an encoder without weights takes
# neither long nor memory to build.
_MAX_SIZE: Final = 1 << 24
_MAX_HEADS: Final = 1 << 10
_MAX_LAYERS: Final = 1 << 10
MAX_NUMBER: Final = 1e12
"""Of fractional settings: below it no product with a size overflows float32 or int64."""
MIN_POSITIVE: Final = 1e-30
"""Of settings that are divided by, or whose logarithm is taken."""
_MAX_RATIO: Final = 64.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the frequency of each pair of a head's dimensions, in radians per token,
    and the factor on cos and sin.

    `axes`: which row of `Packed.axes` turns each pair, for positions in several dimensions; empty:
    a token's place turns all. `long`: the frequencies of sequences of more than `long_from` tokens
    (LongRoPE); empty: the same for all lengths.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    axes: tuple[int, ...] = ()
    long: tuple[float, ...] = ()
    long_from: int = 0


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta net. `value_heads` is a multiple of `key_heads`; `width`: tokens that its
    convolution covers.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of all queries, keys and values of a token."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Settings that may differ between layers. `window`: tokens visible on each side; None: the
    whole sequence.
    """

    rope: Rope | None = None
    window: int | None = None
    attention_norm: bool = True  # ModernBERT's first layer has none before its attention
    experts: int = 0  # of a mixture; 0: one feed-forward
    delta: DeltaSpec | None = None  # a gated delta net in place of attention, always causal


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The embedding layer: the sum of token and, where the family has them, position and segment
    embeddings; normalised, projected.

    `positions`: the rows of the position table, of which the first `offset` are for padding
    (RoBERTa); the rest are the longest sequence. `table` False: no position embeddings (RoPE,
    ALiBi). `norm_eps` None: no norm. `scale`: the factor on the sum. `hidden` None: as `size`.
    `norm_last`: projected first, without a bias, then normalised. `projected`: the projection
    exists even if `size` equals `hidden` (ALBERT).
    """

    vocabulary: int
    size: int
    positions: int
    norm_eps: float | None
    norm_bias: bool = True
    table: bool = True
    offset: int = 0
    segments: int = 0  # token types; 0: none
    scale: float = 1.0
    hidden: int | None = None
    norm_last: bool = False
    projected: bool = False


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A stack of transformer layers.

    `norm`: after each residual add (post), before each block and once at the end (pre), or both
    before and after each block, the residual left out (sandwich). `norm_shift`: what RMSNorm adds
    to its weights. `gated`: activation(gate) * up, the gate stored first or, with `gate_last`,
    after up. `scale` of attention scores None: head_size ** -0.5.
    """

    hidden: int
    heads: int
    head_size: int
    ffn: int
    layers: tuple[LayerSpec, ...]
    norm: Literal["post", "pre", "sandwich"]
    norm_eps: float
    activation: Activation
    final_eps: float | None = None  # of the norm at the end; None: as norm_eps
    kv_heads: int | None = None  # None: as many as heads
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_bias: bool = True
    norm_shift: float = 0.0
    qk_norm: bool = False  # RMSNorm of each head's queries and keys
    gated: bool = False
    gate_last: bool = False
    gate_limit: float = 0.0  # of gated experts: what clamps gate and up
    experts_used: int = 1  # by each token, in layers with experts
    causal: bool = False
    scale: float | None = None
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    order: tuple[
        int, ...
    ] = ()  # indices of `layers` in the order of computation, with repetitions (ALBERT); empty: each once
    softcap: float | None = (
        None  # replaces attention scores by softcap * tanh(scores / softcap) (Gemma 2)
    )

    @property
    def shared(self) -> int:
        """Heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads


class Config:
    """Typed access to a config.json. A value that cannot be served raises ModelBroken with its
    key.
    """

    def __init__(
        self, values: Mapping[str, object], place: str = "", file: str = "config.json"
    ) -> None:
        """For messages: `place`, the keys that lead to these values, empty for the whole file, and
        `file`, its name.
        """
        self._values, self._place, self._file = values, place, file

    @property
    def values(self) -> Mapping[str, object]:
        """All keys, as they were read."""
        return self._values

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null, for keys whose absence means something else."""
        return key in self._values and self._values[key] is None

    def part(self, key: str) -> Config:
        """An object within this one; empty if it is missing."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.unsupported(key, "an object is needed")
        return Config(value, f"{self._place}{key}.", self._file)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.unsupported(key, "true or false is needed")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty if it is missing."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.unsupported(key, "a list of texts is needed")
        return tuple(value)

    def words(self, key: str) -> tuple[str, ...]:
        """A list of texts, or one text in which `|` stands between them."""
        value = self._value(key, [])
        return (
            tuple(word.strip() for word in value.split("|"))
            if isinstance(value, str)
            else self.texts(key)
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.unsupported(key, "a whole number is needed")
        if abs(value) > _MAX_SIZE:
            raise self.unsupported(key, f"at most {_MAX_SIZE:,} is served")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least one."""
        value = self.integer(key, default)
        if value < 1:
            raise self.unsupported(key, "a number of at least 1 is needed")
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """How many layers there are."""
        return self._few(key, _MAX_LAYERS, default)

    def heads(self, key: str, default: int | None = None) -> int:
        """How many attention heads there are."""
        return self._few(key, _MAX_HEADS, default)

    def _few(self, key: str, most: int, default: int | None) -> int:
        value = self.size(key, default)
        if value > most:
            raise self.unsupported(key, f"at most {most:,} are served")
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        least: float = -MAX_NUMBER,
        most: float = MAX_NUMBER,
    ) -> float:
        """A finite number from `least` to `most`; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.unsupported(key, "a number is needed")
        if not math.isfinite(value):
            raise self.unsupported(key, "a finite number is needed")
        if not least <= value <= most:
            raise self.unsupported(key, f"a number from {least:g} to {most:g} is needed")
        return float(value)

    def positive(
        self, key: str, default: float | None = None, *, most: float = MAX_NUMBER
    ) -> float:
        """A number above 0, for settings that are divided by."""
        return self.number(key, default, least=MIN_POSITIVE, most=most)

    def ratio(self, key: str, default: float) -> float:
        """How many times wider a feed-forward is than its input."""
        return self.positive(key, default, most=_MAX_RATIO)

    def is_number(self, key: str) -> bool:
        """Whether the key has a number, for keys that may also have an object."""
        return isinstance(self._values.get(key), int | float)

    def numbers(
        self,
        key: str,
        default: tuple[float, ...],
        *,
        least: float = -MAX_NUMBER,
        most: float = MAX_NUMBER,
    ) -> tuple[float, ...]:
        """As many numbers from `least` to `most` as the default has."""
        value = self._value(key, list(default))
        if not isinstance(value, list) or len(value) != len(default):
            raise self.unsupported(key, f"a list of {len(default)} numbers is needed")
        found = Config(
            {f"{key}[{place}]": number for place, number in enumerate(value)},
            self._place,
            self._file,
        )
        return tuple(
            found.number(f"{key}[{place}]", least=least, most=most) for place in range(len(default))
        )

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.unsupported(key, "a text is needed")
        return value

    def activation(self, key: str, default: str = "gelu") -> Activation:
        """The activation that `key` names."""
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise self.unsupported(key, f"supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def head_count(self, key: str, hidden: int, default: int | None = None) -> int:
        """The number of attention heads, which must divide the hidden size."""
        heads = self.heads(key, default)
        if hidden % heads:
            raise self.unsupported(key, f"it does not divide the hidden size {hidden}")
        return heads

    def require(self, key: str, wanted: object) -> None:
        """Refuse a checkpoint that asks for anything but `wanted` (which also stands for an absent
        key).
        """
        if self._value(key, wanted) != wanted:
            raise self.unsupported(key, f"only {wanted!r} is supported")

    def unsupported(self, key: str, reason: str) -> ModelBroken:
        """The error for a key's value, to be raised by the caller."""
        if self._values.get(key) is None:
            return ModelBroken(f"{self._file}: {self._place}{key} is missing: {reason}")
        return ModelBroken(
            f"{self._file}: {self._place}{key} is {shortened(repr(self._values[key]), 200)}: {reason}"
        )

    def _value(self, key: str, default: object) -> object:
        """Null counts as absent, as it does for transformers."""
        value = self._values.get(key)
        return default if value is None else value

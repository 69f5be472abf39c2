"""The specification of an encoder, as data, and the typed reader of a checkpoint's config.json,
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
"""Bound of fractional settings: below it, no product with a size overflows float32 or int64."""
MIN_POSITIVE: Final = 1e-30
"""Bound of settings that are divisors or arguments of a logarithm."""
_MAX_RATIO: Final = 64.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions."""

    frequencies: tuple[float, ...]
    """Radians per token of each pair of a head's dimensions."""
    factor: float = 1.0
    """Factor on cos and sin."""
    axes: tuple[int, ...] = ()
    """The row of `Packed.axes` that rotates each pair; empty if the token's position rotates
    all."""
    long: tuple[float, ...] = ()
    """Frequencies of sequences of more than `long_from` tokens (LongRoPE); empty if all lengths use
    the same."""
    long_from: int = 0


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + share * log(1 + position // every) (Llama 4)."""

    share: float
    every: int
    """Positions; queries before that one are not changed."""


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta net."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`."""
    key_size: int
    value_size: int
    width: int
    """Number of tokens that the convolution covers."""

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of all queries, keys and values of a token."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A short convolution."""

    width: int
    """Number of tokens that it covers."""
    after: int
    """Number of these tokens that follow the token; 0: causal."""
    bias: bool
    """Whether the convolution and both projections have a bias."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Settings that may differ between layers."""

    rope: Rope | None = None
    window: int | None = None  # tokens visible on each side; None: the whole sequence
    attention_norm: bool = True  # ModernBERT's first layer has none before its attention
    experts: int = 0  # of a mixture; 0: one feed-forward
    delta: DeltaSpec | None = None  # a gated delta net in place of attention, always causal
    convolution: ConvolutionSpec | None = None  # a short convolution in place of attention


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The embedding layer: the sum of token, position and segment embeddings, normalised and
    projected.
    """

    vocabulary: int
    size: int
    positions: int
    """Rows of the position table. Without the first `offset`, the length of the longest
    sequence."""
    norm_eps: float | None  # None: no norm
    norm_bias: bool = True
    table: bool = True  # False: no position embeddings (RoPE, ALiBi)
    offset: int = 0  # rows of the position table for padding (RoBERTa)
    segments: int = 0  # token types; 0: none
    scale: float = 1.0  # factor on the sum
    hidden: int | None = None  # None: the same as size
    norm_last: bool = False  # project first, without a bias, then normalise
    projected: bool = False  # the projection exists even if size equals hidden (ALBERT)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A stack of transformer layers."""

    hidden: int
    heads: int
    head_size: int
    ffn: int
    layers: tuple[LayerSpec, ...]
    norm: Literal["post", "pre", "sandwich"]
    """Place of the norms: after each residual add (post), before each block and once at the end
    (pre), or before and after each block inside the residual (sandwich)."""
    norm_eps: float
    activation: Activation
    final_eps: float | None = None  # of the norm at the end; None: as norm_eps
    kv_heads: int | None = None  # None: as many as heads
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_bias: bool = True
    norm_shift: float = 0.0  # added to the weights of RMSNorm
    qk_norm: bool = False  # RMSNorm of each head's queries and keys
    gated: bool = False  # activation(gate) * up, the gate stored first
    gate_last: bool = False  # the gate is stored after up
    gate_limit: float = 0.0  # bound to which gated experts clamp gate and up
    experts_used: int = 1  # by each token, in layers with experts
    causal: bool = False
    scale: float | None = None  # of attention scores; None: head_size ** -0.5
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    order: tuple[int, ...] = ()
    """Indices of `layers` in computation order, with repetitions (ALBERT); empty: each once."""
    softcap: float | None = None
    """Replaces attention scores by softcap * tanh(scores / softcap) (Gemma 2)."""
    growth: QueryGrowth | None = None
    """The growth of queries with their position (Ministral 3)."""

    @property
    def shared(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads


class Config:
    """Typed access to a config.json. A value that cannot be served raises ModelBroken with its
    key."""

    def __init__(
        self, values: Mapping[str, object], place: str = "", file: str = "config.json"
    ) -> None:
        """`place` and `file` are for messages: the keys that lead to these values (empty for the
        whole file), and the file's name.
        """
        self._values, self._place, self._file = values, place, file

    @property
    def values(self) -> Mapping[str, object]:
        """All keys and values of the file."""
        return self._values

    def has(self, key: str) -> bool:
        """Return whether the key exists and is not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Return whether the key exists and is null, for keys with another meaning when absent."""
        return key in self._values and self._values[key] is None

    def part(self, key: str) -> Config:
        """Return an object within this one; an empty one if it is missing."""
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
        """Return a list of texts; empty if it is missing."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.unsupported(key, "a list of texts is needed")
        return tuple(value)

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, or one text divided at each `|`."""
        value = self._value(key, [])
        return (
            tuple(word.strip() for word in value.split("|"))
            if isinstance(value, str)
            else self.texts(key)
        )

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number. Without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.unsupported(key, "a whole number is needed")
        if abs(value) > _MAX_SIZE:
            raise self.unsupported(key, f"at most {_MAX_SIZE:,} is served")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.unsupported(key, "a number of at least 1 is needed")
        return value

    def layers(self, key: str, default: int | None = None) -> int:
        """Return a number of layers."""
        return self._few(key, _MAX_LAYERS, default)

    def heads(self, key: str, default: int | None = None) -> int:
        """Return a number of attention heads."""
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
        """Return a finite number from `least` to `most`. Without a default the key is required."""
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
        """Return a number above 0, for divisors."""
        return self.number(key, default, least=MIN_POSITIVE, most=most)

    def ratio(self, key: str, default: float) -> float:
        """Return the ratio of a feed-forward's width to its input's."""
        return self.positive(key, default, most=_MAX_RATIO)

    def is_number(self, key: str) -> bool:
        """Return whether the key has a number, for keys that may also have an object."""
        return isinstance(self._values.get(key), int | float)

    def numbers(
        self,
        key: str,
        default: tuple[float, ...],
        *,
        least: float = -MAX_NUMBER,
        most: float = MAX_NUMBER,
    ) -> tuple[float, ...]:
        """Return a list of numbers from `least` to `most`, as long as the default."""
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
        """Return the activation that `key` names."""
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise self.unsupported(key, f"supported are {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def head_count(self, key: str, hidden: int, default: int | None = None) -> int:
        """Return the number of attention heads, which must divide the hidden size."""
        heads = self.heads(key, default)
        if hidden % heads:
            raise self.unsupported(key, f"it does not divide the hidden size {hidden}")
        return heads

    def require(self, key: str, wanted: object) -> None:
        """Refuse any value of `key` but `wanted`. An absent key counts as `wanted`."""
        if self._value(key, wanted) != wanted:
            raise self.unsupported(key, f"only {wanted!r} is supported")

    def unsupported(self, key: str, reason: str) -> ModelBroken:
        """Return the error for a key's value. The caller raises it."""
        if self._values.get(key) is None:
            return ModelBroken(f"{self._file}: {self._place}{key} is missing: {reason}")
        return ModelBroken(
            f"{self._file}: {self._place}{key} is {shortened(repr(self._values[key]), 200)}: "
            f"{reason}"
        )

    def _value(self, key: str, default: object) -> object:
        """Return the key's value. Null counts as absent, as it does for transformers."""
        value = self._values.get(key)
        return default if value is None else value

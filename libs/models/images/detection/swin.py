"""Swin (arXiv 2103.14030): feature maps from attention within windows; three sizes for a detector,
the last one for a decoder.

A map is padded to a multiple of the window's side, as in training, and split into windows; every
second layer shifts it first. Layer norms, products and biases use the encoder's type, softmax
float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.models.interface.sequences import YieldPoint, never_yield
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import Activation, Config

_STAGES = 4
SIDE = 4  # pixels of a patch
_MAX_WINDOW = 64


@dataclass(frozen=True, slots=True)
class SwinSpec:
    """Sizes of the model.

    Attributes:
        width: Width of the first stage; it doubles with each stage.
        depths: Layers of each stage.
        heads: Heads of each stage.
        eps: Epsilon of its norms.
    """

    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    window: int
    ratio: float
    bias: bool
    activation: Activation
    eps: float

    @staticmethod
    def from_config(config: Config, model_type: str = "swin") -> SwinSpec:
        """Read the sizes of a detector's backbone, or of Donut's encoder. Raises ModelBroken with
        the unsupported key.
        """
        config.require("model_type", model_type)
        config.require("num_channels", 3)
        config.require("patch_size", SIDE)
        config.require("use_absolute_embeddings", False)
        if model_type == "swin":
            config.require("out_indices", [2, 3, 4])
        spec = SwinSpec(
            width=config.size("embed_dim", 96),
            depths=_counts(config, "depths", (2, 2, 6, 2)),
            heads=_counts(config, "num_heads", (3, 6, 12, 24)),
            window=config.size("window_size", 7),
            ratio=config.ratio("mlp_ratio", 4.0),
            bias=config.flag("qkv_bias", True),
            activation=config.activation("hidden_act"),
            eps=config.number("layer_norm_eps", 1e-5),
        )
        if spec.window > _MAX_WINDOW:
            raise config.unsupported("window_size", f"at most {_MAX_WINDOW} is supported")
        if any(width % heads for width, heads in zip(spec.widths, spec.heads, strict=True)):
            raise config.unsupported("num_heads", "they do not divide the widths of the stages")
        return spec

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.width << stage for stage in range(_STAGES))


def _counts(config: Config, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    found = tuple(int(number) for number in config.numbers(key, default))
    if not all(1 <= number <= 1024 for number in found):
        raise config.unsupported(key, "integers from 1 to 1,024 are needed")
    return found


def map_sizes(height: int, width: int) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of the three maps of an image."""
    rows, columns = -(-height // SIDE), -(-width // SIDE)
    sizes = []
    for _ in range(_STAGES - 1):
        rows, columns = -(-rows // 2), -(-columns // 2)
        sizes.append((rows, columns))
    return tuple(sizes)


class Swin(nn.Module):
    """Maps pixels to feature maps. Parts have the names that `rename` returns."""

    def __init__(self, spec: SwinSpec, *, normed: bool = True) -> None:
        """Create the model. `normed`: with the norms of the three maps of `forward`."""
        super().__init__()
        self.patches = nn.Conv2d(3, spec.width, SIDE, SIDE)
        self.norm = nn.LayerNorm(spec.width)
        self.stages = nn.ModuleList(
            nn.ModuleList(
                Block(spec, width, heads, shift=spec.window // 2 * (place % 2))
                for place in range(depth)
            )
            for width, heads, depth in zip(spec.widths, spec.heads, spec.depths, strict=True)
        )
        self.merges = nn.ModuleList(Merge(width) for width in spec.widths[:-1])
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in spec.widths[1:] if normed)

    def forward(self, pixels: Tensor, yield_point: YieldPoint = never_yield) -> list[Tensor]:
        """Map [1, 3, height, width] to [1, rows, columns, width] for each stage from the second to
        the last.

        `yield_point` is called after each block.
        """
        maps = list(self.maps(pixels, yield_point))
        return [norm(x) for norm, x in zip(self.norms, maps[1:], strict=True)]

    def maps(self, pixels: Tensor, yield_point: YieldPoint) -> Iterator[Tensor]:
        """Yield the map of each stage in turn, before its norm."""
        height, width = pixels.shape[2:]
        x = self.patches.forward(F.pad(pixels, (0, -width % SIDE, 0, -height % SIDE)))
        x = self.norm.forward(x.permute(0, 2, 3, 1))
        for place, stage in enumerate(self.stages):
            x = x if place == 0 else self.merges[place - 1](x)
            for block in stage:  # type: ignore[attr-defined]
                x = block(x)
                yield_point()
            yield x


class Block(nn.Module):
    """One layer: attention within windows, then a feed-forward, each after a norm and with its
    residual.
    """

    def __init__(self, spec: SwinSpec, width: int, heads: int, *, shift: int) -> None:
        super().__init__()
        self.before, self.after = (
            nn.LayerNorm(width, eps=spec.eps),
            nn.LayerNorm(width, eps=spec.eps),
        )
        self.query, self.key, self.value = (
            nn.Linear(width, width, bias=spec.bias) for _ in range(3)
        )
        self.out = nn.Linear(width, width)
        self.table = nn.Parameter(
            torch.empty((2 * spec.window - 1) ** 2, heads), requires_grad=False
        )
        self.up, self.down = (
            nn.Linear(width, int(spec.ratio * width)),
            nn.Linear(int(spec.ratio * width), width),
        )
        self._function = FUNCTIONS[spec.activation]
        self._heads, self._window, self._shift = heads, spec.window, shift

    def forward(self, x: Tensor) -> Tensor:
        """Map [1, rows, columns, width] to the same shape."""
        x = x + self._attention(self.before.forward(x))
        return x + self.down.forward(self._function(self.up.forward(self.after.forward(x))))

    def _attention(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[1:3]
        side, shift = self._window, self._shift
        x = F.pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
        down, across = x.shape[1] // side, x.shape[2] // side
        x = x.roll((-shift, -shift), (1, 2)) if shift else x
        windows = (
            x.view(down, side, across, side, -1)
            .transpose(1, 2)
            .reshape(down * across, side * side, -1)
        )
        bias = self._bias(x.device)
        if shift:
            bias = bias + _across_edges(down * side, across * side, side, shift, x.device)
        q, k, v = (
            part.forward(windows).view(*windows.shape[:2], self._heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.to(q.dtype).expand(len(windows), -1, -1, -1)
        )
        mixed = self.out.forward(mixed.transpose(1, 2).flatten(2))
        x = (
            mixed.view(down, across, side, side, -1)
            .transpose(1, 2)
            .reshape(1, down * side, across * side, -1)
        )
        x = x.roll((shift, shift), (1, 2)) if shift else x
        return x[:, :rows, :columns]

    def _bias(self, device: torch.device) -> Tensor:
        """Return the bias [1, heads, side², side²] by the distance of two positions in a window."""
        side = self._window
        places = torch.arange(side, device=device)
        apart = (places[:, None] - places) + side - 1
        down = apart[:, None, :, None].expand(side, side, side, side)
        across = apart[None, :, None, :].expand(side, side, side, side)
        index = (down * (2 * side - 1) + across).reshape(-1)
        return self.table[index].view(side * side, side * side, -1).permute(2, 0, 1)[None].float()


def _across_edges(rows: int, columns: int, side: int, shift: int, device: torch.device) -> Tensor:
    """Return [windows, 1, side², side²]: -100 between positions that only the shift made
    neighbours, else 0.
    """

    def part(count: int) -> Tensor:
        places = torch.arange(count, device=device)
        return (places >= count - side).int() + (places >= count - shift).int()

    parts = part(rows)[:, None] * 3 + part(columns)
    parts = (
        parts.view(rows // side, side, columns // side, side)
        .transpose(1, 2)
        .reshape(-1, side * side)
    )
    return (parts[:, None, :] != parts[:, :, None])[:, None].float() * -100.0


class Merge(nn.Module):
    """Merges four neighbours to one position of twice the width. Odd maps are padded with a row or
    column of zeros.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, columns % 2, 0, rows % 2))
        x = torch.cat([x[:, row::2, column::2] for column in range(2) for row in range(2)], dim=-1)
        return self.reduction.forward(self.norm.forward(x))


_NAMES = (
    ("embeddings.patch_embeddings.projection.", "patches."),
    ("embeddings.norm.", "norm."),
    ("attention.self.relative_position_bias_table", "table"),
    ("attention.self.", ""),
    ("attention.output.dense.", "out."),
    ("intermediate.dense.", "up."),
    ("output.dense.", "down."),
    ("layernorm_before.", "before."),
    ("layernorm_after.", "after."),
)


def rename(name: str) -> str | None:
    """Map a tensor's name in a checkpoint, after the backbone's prefix, to ours; None for an unused
    tensor.
    """
    name = name.removeprefix("swin.")
    if name.startswith("layernorm.") or name.endswith("relative_position_index"):
        return None
    for theirs, ours in _NAMES:
        name = name.replace(theirs, ours)
    for stage in range(_STAGES):
        name = name.replace(f"encoder.layers.{stage}.blocks.", f"stages.{stage}.")
        name = name.replace(f"encoder.layers.{stage}.downsample.", f"merges.{stage}.")
        name = name.replace(f"hidden_states_norms.stage{stage + 1}.", f"norms.{stage - 1}.")
    return name

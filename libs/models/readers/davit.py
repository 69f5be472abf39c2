"""DaViT (arXiv 2204.03645), the image encoder of Florence-2: attention within windows of places,
then within groups of channels.

A window that extends beyond the map is padded with zeros, which take part in attention as in
training. All images of a batch have one size. Norms, products and biases are in the encoder's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.models.interface.sequences import YieldPoint, never_yield
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import Activation, Config

_MAX_NUMBER: Final = 4096
_MAX_WINDOW: Final = 64
_COLOURS: Final = 3


@dataclass(frozen=True, slots=True)
class DavitStage:
    """A stage of the encoder, which begins with a convolution to a smaller map."""

    width: int
    depth: int
    """Pairs of blocks."""
    heads: int
    """Heads of attention within windows."""
    groups: int
    """Groups of attention between channels."""
    patch: int
    """Kernel size of the convolution, in places of the previous map."""
    stride: int
    """Stride of the convolution, in places of the previous map."""
    padding: int
    """Padding of the convolution, in places of the previous map."""
    norm_first: bool
    """The LayerNorm precedes the convolution."""


@dataclass(frozen=True, slots=True)
class DavitSpec:
    """The settings of the image encoder."""

    stages: tuple[DavitStage, ...]
    window: int
    """Side of a window, in places."""
    ratio: float
    """Ratio of a feed-forward's width to its stage's."""
    bias: bool
    activation: Activation

    @staticmethod
    def from_config(config: Config) -> DavitSpec:
        """Read Florence-2's `vision_config`, in either of its layouts.

        Raises ModelBroken with the key that cannot be served.
        """
        config.require("in_channels", _COLOURS)
        config.require("in_chans", _COLOURS)
        widths = _counts(
            config, "embed_dim" if config.has("embed_dim") else "dim_embed", (128, 256, 512, 1024)
        )
        depths = _counts(config, "depths", (1, 1, 9, 1))
        heads, groups = (
            _counts(config, key, (4, 8, 16, 32)) for key in ("num_heads", "num_groups")
        )
        patches = _counts(config, "patch_size", (7, 3, 3, 3))
        strides = _counts(config, "patch_stride", (4, 2, 2, 2))
        paddings = _counts(config, "patch_padding", (3, 1, 1, 1), least=0)
        first = _flags(config, "patch_prenorm", (False, True, True, True))
        for key, counts in (("num_heads", heads), ("num_groups", groups)):
            if any(width % count for width, count in zip(widths, counts, strict=True)):
                raise config.unsupported(key, "they do not divide the widths of the stages")
        return DavitSpec(
            stages=tuple(
                DavitStage(*each)
                for each in zip(
                    widths, depths, heads, groups, patches, strides, paddings, first, strict=True
                )
            ),
            window=_side(config),
            ratio=config.ratio("mlp_ratio", 4.0),
            bias=config.flag("qkv_bias", True),
            activation=config.activation("activation_function")
            if config.has("activation_function")
            else "gelu",
        )

    @property
    def width(self) -> int:
        """Width of the last map."""
        return self.stages[-1].width

    def map_size(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last map for an image of this size in pixels."""
        for stage in self.stages:
            height, width = (
                (side + 2 * stage.padding - stage.patch) // stage.stride + 1
                for side in (height, width)
            )
        return height, width


def _counts(config: Config, key: str, default: tuple[int, ...], least: int = 1) -> tuple[int, ...]:
    found = tuple(int(number) for number in config.numbers(key, default))
    if not all(least <= number <= _MAX_NUMBER for number in found):
        raise config.unsupported(key, f"whole numbers from {least} to {_MAX_NUMBER:,} are needed")
    return found


def _flags(config: Config, key: str, default: tuple[bool, ...]) -> tuple[bool, ...]:
    found = config.values.get(key, list(default))
    if (
        not isinstance(found, list)
        or len(found) != len(default)
        or not all(isinstance(each, bool) for each in found)
    ):
        raise config.unsupported(key, f"a list of {len(default)} times true or false is needed")
    return tuple(found)


def _side(config: Config) -> int:
    side = config.size("window_size", 12)
    if side > _MAX_WINDOW:
        raise config.unsupported("window_size", f"at most {_MAX_WINDOW} is served")
    return side


class Davit(nn.Module):
    """Map pixels to the last stage's map."""

    def __init__(self, spec: DavitSpec) -> None:
        super().__init__()
        before = (_COLOURS, *(stage.width for stage in spec.stages))
        self.convs = nn.ModuleList(
            _Reduction(stage, source)
            for stage, source in zip(spec.stages, before[:-1], strict=True)
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList(
                    (_Block(spec, stage, windows=True), _Block(spec, stage, windows=False))
                )
                for _ in range(stage.depth)
            )
            for stage in spec.stages
        )

    def forward(self, pixels: Tensor, yield_point: YieldPoint = never_yield) -> Tensor:
        """Map [images, 3, height, width] to [images, rows, columns, width].

        `yield_point` is called where preemption is possible.
        """
        x = pixels.permute(0, 2, 3, 1)
        for conv, stage in zip(self.convs, self.blocks, strict=True):
            x = conv(x)
            for pair in stage:  # type: ignore[attr-defined]
                for block in pair:
                    x = block(x)
                    yield_point()
        return x


class _Reduction(nn.Module):
    """The convolution that begins a stage and reduces the map.

    It maps [images, rows, columns, source] to [..., width].
    """

    def __init__(self, stage: DavitStage, source: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(source, stage.width, stage.patch, stage.stride, stage.padding)
        self.norm = nn.LayerNorm(source if stage.norm_first else stage.width)
        self._norm_first = stage.norm_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm.forward(x) if self._norm_first else x
        x = self.conv.forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x if self._norm_first else self.norm.forward(x)


class _Block(nn.Module):
    """Attention, then a feed-forward. Before each are a residual convolution of neighbours and a
    norm; each has its residual.
    """

    def __init__(self, spec: DavitSpec, stage: DavitStage, *, windows: bool) -> None:
        super().__init__()
        width = stage.width
        self.conv1, self.conv2 = (
            nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=spec.bias)
        self.proj = nn.Linear(width, width)
        self.up, self.down = (
            nn.Linear(width, int(width * spec.ratio)),
            nn.Linear(int(width * spec.ratio), width),
        )
        self._function = FUNCTIONS[spec.activation]
        self._window = spec.window if windows else 0
        self._heads = stage.heads if windows else stage.groups

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to [images, rows, columns, width]."""
        x = _neighbours(self.conv1, x)
        x = x + (
            self._windows(self.norm1.forward(x))
            if self._window
            else self._channels(self.norm1.forward(x))
        )
        x = _neighbours(self.conv2, x)
        return x + self.down.forward(self._function(self.up.forward(self.norm2.forward(x))))

    def _windows(self, x: Tensor) -> Tensor:
        images, rows, columns, width = x.shape
        side = self._window
        x = F.pad(x, (0, 0, 0, -columns % side, 0, -rows % side))
        down, across = x.shape[1] // side, x.shape[2] // side
        windows = (
            x.view(images, down, side, across, side, width)
            .transpose(2, 3)
            .reshape(-1, side * side, width)
        )
        q, k, v = (
            self.qkv.forward(windows)
            .view(*windows.shape[:2], 3, self._heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = self.proj.forward(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        x = (
            mixed.view(images, down, across, side, side, width)
            .transpose(2, 3)
            .reshape(images, down * side, across * side, width)
        )
        return x[:, :rows, :columns]

    def _channels(self, x: Tensor) -> Tensor:
        """Attend between channels: each channel of a group is a query and a key, with one element
        per place."""
        tokens = x.flatten(1, 2)
        places = tokens.shape[1]
        q, k, v = (
            self.qkv.forward(tokens)
            .view(*tokens.shape[:2], 3, self._heads, -1)
            .permute(2, 0, 3, 4, 1)
        )
        # [images, groups, channels, places]
        mixed = F.scaled_dot_product_attention(q, k, v, scale=places**-0.5)
        return self.proj.forward(mixed.permute(0, 3, 1, 2).flatten(2)).view_as(x)


def _neighbours(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return x + conv.forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class DavitProjector(nn.Module):
    """Map the last map to rows of the language model's input: the mean of all places, then each
    place.

    A place adds learned vectors of its column, its row and the first frame.
    """

    def __init__(self, width: int, hidden: int, places: int, frames: int) -> None:
        """`places` is the size of the row and column tables, `frames` that of the frame table."""
        super().__init__()
        self.column, self.row = (
            nn.Parameter(torch.empty(places, part), requires_grad=False)
            for part in (width - width // 2, width // 2)
        )
        self.frames = nn.Parameter(torch.empty(frames, width), requires_grad=False)
        self.projection = nn.Linear(width, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [images, rows, columns, width] to [images, 1 + rows * columns, hidden]."""
        _, rows, columns, _ = x.shape
        across = self.column[:columns][None].expand(rows, -1, -1)
        down = self.row[:rows][:, None].expand(-1, columns, -1)
        x = (x + torch.cat([across, down], dim=-1)).flatten(1, 2) + self.frames[0]
        return self.norm.forward(
            self.projection.forward(torch.cat([x.mean(dim=1, keepdim=True), x], dim=1))
        )


_PARTS: Final = (
    (".spatial_block.", ".0."),
    (".channel_block.", ".1."),
    (".ffn.fc1.", ".up."),
    (".ffn.fc2.", ".down."),
    (".window_attn.", "."),
    (".channel_attn.", "."),
)
_MICROSOFT: Final = (
    (".window_attn.norm.", ".norm1."),
    (".channel_attn.norm.", ".norm1."),
    (".ffn.norm.", ".norm2."),
    (".fn.dw.", "."),
    (".fn.net.", "."),
    (".fn.", "."),
)


def rename(name: str) -> str:
    """Return our name of a checkpoint's tensor in either layout. `name` is without the image
    encoder's prefix.
    """
    if name.startswith("convs."):
        return name.replace(".proj.", ".conv.")
    for theirs, ours in (*_MICROSOFT, *_PARTS):
        name = name.replace(theirs, ours)
    return name

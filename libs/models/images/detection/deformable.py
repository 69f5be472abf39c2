"""Layers of Grounding DINO (arXiv 2303.05499) for one image and its labels, in float32, with the
checkpoint's names.

Deformable attention (arXiv 2010.04159) samples each map at a few points around a location;
`grid_sample` interpolates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import Activation

Sizes = Sequence[tuple[int, int]]
"""Rows and columns of an image's maps, one pair per level."""


@dataclass(frozen=True, slots=True)
class DinoSpec:
    """Sizes of the model."""

    width: int
    levels: int
    """Number of feature maps."""
    encoder_layers: int
    encoder_heads: int
    encoder_ffn: int
    encoder_points: int
    """Samples of deformable attention on each map, in the encoder."""
    decoder_layers: int
    decoder_heads: int
    decoder_ffn: int
    decoder_points: int
    """Samples of deformable attention on each map, in the decoder."""
    queries: int
    tokens: int
    """Length of the longest prompt."""
    temperature: float
    activation: Activation
    eps: float
    shares_boxes: bool

    def norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.width, eps=self.eps)

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        return FUNCTIONS[self.activation]


def sines(values: Tensor, width: int, temperature: float) -> Tensor:
    """Map [...] to [..., width]: alternating sines and cosines of decreasing frequency."""
    pairs = torch.arange(width, device=values.device) // 2
    angles = values[..., None] / temperature ** (2 * pairs.float() / width)
    return torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], dim=-1).flatten(-2)


class Mlp(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int, count: int) -> None:
        super().__init__()
        sizes = [inputs, *[hidden] * (count - 1), outputs]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        last: Tensor = self.layers[-1](x)
        return last


class DetectorAttention(nn.Module):
    """Attention of some heads between rows of one width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self._heads = heads

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Attend: [queries, width], [keys, width] twice -> [queries, width]. `mask`: [queries,
        keys], True to attend.
        """
        parts = ((self.query, queries), (self.key, keys), (self.value, values))
        q, k, v = (
            part.forward(x).view(len(x), self._heads, -1).transpose(0, 1)[None] for part, x in parts
        )
        return self.out_proj.forward(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1).flatten(1)
        )


class DeformableAttention(nn.Module):
    """Each row samples all maps at `points` locations per head, chosen relative to the row's
    location.
    """

    def __init__(self, spec: DinoSpec, heads: int, points: int) -> None:
        super().__init__()
        samples = heads * spec.levels * points
        self.sampling_offsets, self.attention_weights = (
            nn.Linear(spec.width, 2 * samples),
            nn.Linear(spec.width, samples),
        )
        self.value_proj, self.output_proj = (
            nn.Linear(spec.width, spec.width),
            nn.Linear(spec.width, spec.width),
        )
        self._heads, self._levels, self._points = heads, spec.levels, points

    def forward(self, rows: Tensor, maps: Tensor, places: Tensor, sizes: Sizes) -> Tensor:
        """Sample the maps for each row.

        Args:
            rows: [n, width].
            maps: [locations of all levels, width].
            places: Location of each row, [n, 2], or [n, 4] with a size; 0..1 of the image.
        """
        shape = (len(rows), self._heads, self._levels, self._points)
        values = self.value_proj.forward(maps).view(len(maps), self._heads, -1)
        offsets = self.sampling_offsets.forward(rows).view(*shape, 2)
        weights = self.attention_weights.forward(rows).view(*shape[:2], -1).softmax(-1).view(shape)
        centre = places[:, None, None, None, :2]
        if places.shape[1] == 2:
            reach = torch.tensor(
                [(columns, lines) for lines, columns in sizes], device=rows.device
            )[:, None]
            read = centre + offsets / reach
        else:
            read = centre + offsets / self._points * places[:, None, None, None, 2:] * 0.5
        grids = (2 * read - 1).permute(2, 1, 0, 3, 4)  # [levels, heads, n, points, 2]
        shares = weights.permute(2, 1, 0, 3)
        total = rows.new_zeros(self._heads, values.shape[2], len(rows))
        start = 0
        for level, (lines, columns) in enumerate(sizes):
            own = (
                values[start : start + lines * columns]
                .permute(1, 2, 0)
                .reshape(self._heads, -1, lines, columns)
            )
            found = F.grid_sample(
                own, grids[level], mode="bilinear", padding_mode="zeros", align_corners=False
            )
            total += (found * shares[level][:, None]).sum(-1)
            start += lines * columns
        return self.output_proj.forward(total.permute(2, 0, 1).flatten(1))


class Fusion(nn.Module):
    """Image and text attend to each other through one matrix of scores."""

    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.layer_norm_vision, self.layer_norm_text = spec.norm(), spec.norm()
        self.attn = ImageTextAttention(spec.width, spec.encoder_ffn // 2, spec.encoder_heads // 2)
        self.vision_param = nn.Parameter(torch.empty(spec.width), requires_grad=False)
        self.text_param = nn.Parameter(torch.empty(spec.width), requires_grad=False)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        image, text = self.layer_norm_vision.forward(image), self.layer_norm_text.forward(text)
        to_image, to_text = self.attn.forward(image, text)
        return image + self.vision_param * to_image, text + self.text_param * to_text


class ImageTextAttention(nn.Module):
    """Exchanges information between image and text: [locations, width], [tokens, width] -> the same
    two shapes.
    """

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.vision_proj, self.values_vision_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.text_proj, self.values_text_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.out_vision_proj, self.out_text_proj = nn.Linear(inner, width), nn.Linear(inner, width)
        self._heads = heads

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        pairs = (
            (self.vision_proj, image),
            (self.text_proj, text),
            (self.values_vision_proj, image),
            (self.values_text_proj, text),
        )
        places, tokens, seen, read = (
            part.forward(x).view(len(x), self._heads, -1).transpose(0, 1)[None] for part, x in pairs
        )
        to_image = (
            F.scaled_dot_product_attention(places, tokens, read)[0].transpose(0, 1).flatten(1)
        )
        to_text = F.scaled_dot_product_attention(tokens, places, seen)[0].transpose(0, 1).flatten(1)
        return self.out_vision_proj.forward(to_image), self.out_text_proj.forward(to_text)


class TextLayer(nn.Module):
    """Self-attention among the tokens of one label."""

    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.self_attn = DetectorAttention(spec.width, spec.encoder_heads // 2)
        self.fc1, self.fc2 = (
            nn.Linear(spec.width, spec.encoder_ffn // 2),
            nn.Linear(spec.encoder_ffn // 2, spec.width),
        )
        self.layer_norm_before, self.layer_norm_after = spec.norm(), spec.norm()
        self._function = spec.function

    def forward(self, text: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        placed = text + positions
        text = self.layer_norm_before.forward(
            text + self.self_attn.forward(placed, placed, text, mask)
        )
        return self.layer_norm_after.forward(
            text + self.fc2.forward(self._function(self.fc1.forward(text)))
        )


class DeformableLayer(nn.Module):
    """Deformable self-attention of an image."""

    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.self_attn = DeformableAttention(spec, spec.encoder_heads, spec.encoder_points)
        self.fc1, self.fc2 = (
            nn.Linear(spec.width, spec.encoder_ffn),
            nn.Linear(spec.encoder_ffn, spec.width),
        )
        self.self_attn_layer_norm, self.final_layer_norm = spec.norm(), spec.norm()
        self._function = spec.function

    def forward(self, image: Tensor, positions: Tensor, places: Tensor, sizes: Sizes) -> Tensor:
        image = self.self_attn_layer_norm.forward(
            image + self.self_attn.forward(image + positions, image, places, sizes)
        )
        return self.final_layer_norm.forward(
            image + self.fc2.forward(self._function(self.fc1.forward(image)))
        )


class EncoderLayer(nn.Module):
    """Fuses both sides, then applies self-attention to each."""

    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.fusion_layer, self.text_enhancer_layer, self.deformable_layer = (
            Fusion(spec),
            TextLayer(spec),
            DeformableLayer(spec),
        )

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        image_positions: Tensor,
        positions: Tensor,
        mask: Tensor,
        places: Tensor,
        sizes: Sizes,
    ) -> tuple[Tensor, Tensor]:
        image, text = self.fusion_layer.forward(image, text)
        text = self.text_enhancer_layer.forward(text, positions, mask)
        return self.deformable_layer.forward(image, image_positions, places, sizes), text


class DecoderLayer(nn.Module):
    """Queries attend to each other, to the text, and to the image around their boxes."""

    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.self_attn, self.encoder_attn_text = (
            DetectorAttention(spec.width, spec.decoder_heads),
            DetectorAttention(spec.width, spec.decoder_heads),
        )
        self.encoder_attn = DeformableAttention(spec, spec.decoder_heads, spec.decoder_points)
        self.self_attn_layer_norm, self.encoder_attn_text_layer_norm = spec.norm(), spec.norm()
        self.encoder_attn_layer_norm, self.final_layer_norm = spec.norm(), spec.norm()
        self.fc1, self.fc2 = (
            nn.Linear(spec.width, spec.decoder_ffn),
            nn.Linear(spec.decoder_ffn, spec.width),
        )
        self._function = spec.function

    def forward(
        self, x: Tensor, positions: Tensor, boxes: Tensor, image: Tensor, text: Tensor, sizes: Sizes
    ) -> Tensor:
        """Run the layer.

        Args:
            x: [queries, width]
            positions: [queries, width]
            boxes: [queries, 4]
        """
        placed = x + positions
        x = self.self_attn_layer_norm.forward(x + self.self_attn.forward(placed, placed, x))
        x = self.encoder_attn_text_layer_norm.forward(
            x + self.encoder_attn_text.forward(x + positions, text, text)
        )
        x = self.encoder_attn_layer_norm.forward(
            x + self.encoder_attn.forward(x + positions, image, boxes, sizes)
        )
        return self.final_layer_norm.forward(
            x + self.fc2.forward(self._function(self.fc1.forward(x)))
        )


def centres(sizes: Sizes, device: torch.device) -> Tensor:
    """Return the centres [locations of all levels, 2]: across and down, 0..1."""
    found = []
    for rows, columns in sizes:
        down = (torch.arange(rows, device=device) + 0.5) / rows
        across = (torch.arange(columns, device=device) + 0.5) / columns
        found.append(torch.stack([across.repeat(rows), down.repeat_interleave(columns)], dim=-1))
    return torch.cat(found)


def place_sines(sizes: Sizes, width: int, temperature: float, device: torch.device) -> Tensor:
    """Return positions [locations of all levels, width]: the first half encodes the row, the second
    the column.
    """
    found = []
    for rows, columns in sizes:
        down, across = (
            sines(
                torch.arange(1, count + 1, device=device) / (count + 1e-6) * (2 * math.pi),
                width // 2,
                temperature,
            )
            for count in (rows, columns)
        )
        found.append(
            torch.cat([down.repeat_interleave(columns, 0), across.repeat(rows, 1)], dim=-1)
        )
    return torch.cat(found)

"""Grounding DINO (arXiv 2303.05499): fuses the states of Swin and BERT; queries become boxes, which
are compared with the labels' tokens.

Labels share one prompt, `a cat. a dog.`, but no token attends to another label's before the fusion.
Each label's states are therefore computed one time and cached. A label's score for a box is the
maximum over its tokens (the reference takes all tokens', and decodes those above a second threshold
to a phrase, which may not be a label). The image's maps have the encoder's type up to Swin; fusion,
decoder and heads use float32. Images of a batch are processed one after another, so nothing is
padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.kernels.layout import to_device
from libs.models.images.detection.deformable import (
    DecoderLayer,
    DinoSpec,
    EncoderLayer,
    Mlp,
    Sizes,
    centres,
    place_sines,
    sines,
)
from libs.models.images.detection.regions import RegionOptions
from libs.models.images.detection.swin import Swin, SwinSpec, map_sizes
from libs.models.images.processing import ImageProcessing
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import (
    InputRows,
    InputSequence,
    Output,
    YieldPoint,
    never_yield,
)
from libs.models.layers.embeddings import InputLayer
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EncoderSpec
from libs.models.text.heads.extraction.label_vectors import LabelVectors
from libs.models.text.heads.extraction.words import Ids, Label

MODEL_TYPES = ("grounding-dino",)
THRESHOLD: Final = 0.25

# [CLS], and the other ids of bert-base-uncased that separate phrases: [SEP], full stop, question
# mark
FIRST: Final = 101
LAST: Final = 102
STOP: Final = 1012
QUESTION: Final = 1029
_PARTING: Final = np.array([FIRST, LAST, STOP, QUESTION])
# Labels without a token have these names.
_FRAME: Final = (Label("", np.array([FIRST], np.int32)), Label(" ", np.array([LAST], np.int32)))

_SMALLEST: Final = 0.05  # side of a proposal on the first level
_EDGE: Final = 0.01
_SAMPLE: Final = 128
"""Pixels per side of a sample."""


def read_spec(config: Config) -> DinoSpec:
    """Read the model's sizes, with transformers' defaults for missing keys. Raises ModelBroken with
    the unsupported key.
    """
    config.require("two_stage", True)
    config.require("embedding_init_target", True)
    config.require("two_stage_bbox_embed_share", False)
    config.require("position_embedding_type", "sine")
    config.require("query_dim", 4)
    width = config.size("d_model", 256)
    spec = DinoSpec(
        width=width,
        levels=config.layers("num_feature_levels", 4),
        encoder_layers=config.layers("encoder_layers", 6),
        encoder_heads=config.head_count("encoder_attention_heads", width, 8),
        encoder_ffn=config.size("encoder_ffn_dim", 2048),
        encoder_points=config.heads("encoder_n_points", 4),
        decoder_layers=config.layers("decoder_layers", 6),
        decoder_heads=config.head_count("decoder_attention_heads", width, 8),
        decoder_ffn=config.size("decoder_ffn_dim", 2048),
        decoder_points=config.heads("decoder_n_points", 4),
        queries=config.size("num_queries", 900),
        tokens=config.size("max_text_len", 256),
        temperature=config.positive("positional_embedding_temperature", 20),
        activation=config.activation("activation_function", "relu"),
        eps=config.number("layer_norm_eps", 1e-5),
        shares_boxes=config.flag("decoder_bbox_embed_share", True),
    )
    if width % 32:
        raise config.unsupported("d_model", "it must be a multiple of 32")
    if not 3 <= spec.levels <= 8:
        raise config.unsupported("num_feature_levels", "3 to 8 are supported")
    heads = spec.encoder_heads // 2
    if not heads or width % heads or spec.encoder_ffn // 2 % heads:
        raise config.unsupported(
            "encoder_attention_heads", "half of it must divide d_model, and half of encoder_ffn_dim"
        )
    return spec


@dataclass(frozen=True, slots=True)
class Levels:
    """The sizes of an image's maps, by the height and width that the model sees."""

    count: int

    def sizes(self, height: int, width: int) -> tuple[tuple[int, int], ...]:
        sizes = list(map_sizes(height, width))
        while len(sizes) < self.count:
            sizes.append((-(-sizes[-1][0] // 2), -(-sizes[-1][1] // 2)))
        return tuple(sizes)

    def tokens(self, height: int, width: int) -> int:
        return sum(rows * columns for rows, columns in self.sizes(height, width))


class ImageMaps(InputLayer):
    """The first layer: passes on an image's locations on all maps. Their projections compute in
    float32.
    """

    def __init__(
        self, spec: DinoSpec, swin: SwinSpec, processing: ImageProcessing, most: int
    ) -> None:
        """Create the layer. `most`: tokens of the largest image."""
        super().__init__()
        self.backbone = Swin(swin)
        self.max_positions, self.row_size = most, spec.width
        inputs = [*swin.widths[1:], swin.widths[-1], *[spec.width] * spec.levels][: spec.levels]
        self.input_proj_vision = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(size, spec.width, 1)
                if level < 3
                else nn.Conv2d(size, spec.width, 3, stride=2, padding=1),
                nn.GroupNorm(32, spec.width),
            )
            for level, size in enumerate(inputs)
        )
        self._processing = processing

    def forward(self, batch: Packed) -> Tensor:
        """Return [tokens, width] float32."""
        if batch.given is None:
            raise ValueError("an image encoder takes rows, not token ids")
        return batch.given.values

    def embed(self, image: NDArray[np.generic], yield_point: YieldPoint) -> Tensor:
        """Map uint8 [height, width, 3] to [locations of all levels, width] float32."""
        weight = self.backbone.patches.weight
        pixels = torch.tensor(image).to(weight.device).permute(2, 0, 1)[None].float()
        numbers = (self._processing.mean, self._processing.std)
        mean, std = (torch.tensor(one, device=weight.device).view(1, 3, 1, 1) for one in numbers)
        maps = self.backbone.forward(
            ((pixels / (1 / self._processing.scale) - mean) / std).to(weight.dtype), yield_point
        )
        maps = [one.permute(0, 3, 1, 2).float() for one in maps]
        found: list[Tensor] = []
        for level, project in enumerate(self.input_proj_vision):
            source = maps[level] if level < 3 else maps[-1] if level == 3 else found[-1]
            found.append(project(source))
        return torch.cat([one[0].flatten(1).T for one in found])


class ImageMapRows:
    """The tower of the backbone: the rows of its images. It shares the weights of the encoder's
    first layer.
    """

    def __init__(self, maps: ImageMaps) -> None:
        self._maps = maps

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        """Compute [locations of all, width] from uint8 images, [height, width, 3] each."""
        return self.forward_preemptible(inputs, never_yield)

    def forward_preemptible(
        self, inputs: Sequence[NDArray[np.generic]], yield_point: YieldPoint
    ) -> Tensor:
        """Compute `forward`, and call `yield_point` after each block of the backbone."""
        return torch.cat([self._maps.embed(image, yield_point) for image in inputs])

    def sample(self) -> InputSequence:
        """Return a sequence of one small image."""
        tokens = Levels(len(self._maps.input_proj_vision)).tokens(_SAMPLE, _SAMPLE)
        rows = InputRows(
            np.arange(tokens, dtype=np.int32), np.zeros((_SAMPLE, _SAMPLE, 3), np.uint8)
        )
        return InputSequence(np.zeros(tokens, np.int32), rows=rows)


class TextStates(LabelVectors):
    """The states [tokens, width] of a label's tokens. BERT reads each phrase separately."""

    def _encode(self, ids: Sequence[Ids]) -> Sequence[Tensor]:
        phrases = [
            phrase
            for label in ids
            for phrase in np.split(label, np.flatnonzero(_starts(label))[1:])
        ]
        states = self.encoder.forward(
            Packed.from_sequences(phrases, device=self.encoder.device)
        ).float()
        states = states if self.project is None else self.project.forward(states)
        return torch.split_with_sizes(states, [len(label) for label in ids])


def _starts(ids: Ids) -> NDArray[np.bool_]:
    """Mark the tokens that begin a phrase: the first, and every one after a separator."""
    return np.concatenate([[True], np.isin(ids[:-1], _PARTING)])


class Encoder(nn.Module):
    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(spec) for _ in range(spec.encoder_layers))


class DetectorDecoder(nn.Module):
    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(spec.decoder_layers))
        self.layer_norm = spec.norm()
        self.reference_points_head = Mlp(2 * spec.width, spec.width, spec.width, 2)


class DinoWeights(nn.Module):
    """The checkpoint's modules outside its backbones, with its names."""

    def __init__(self, spec: DinoSpec) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(spec), DetectorDecoder(spec)
        self.level_embed = nn.Parameter(torch.empty(spec.levels, spec.width), requires_grad=False)
        self.query_position_embeddings = nn.Embedding(spec.queries, spec.width)
        self.enc_output, self.enc_output_norm = nn.Linear(spec.width, spec.width), spec.norm()
        self.encoder_output_bbox_embed = Mlp(spec.width, spec.width, 4, 3)


def box_heads(spec: DinoSpec) -> nn.ModuleList:
    """Return the heads that move the boxes after each layer of the decoder, or one for all."""
    return nn.ModuleList(
        Mlp(spec.width, spec.width, 4, 3)
        for _ in range(1 if spec.shares_boxes else spec.decoder_layers)
    )


class DinoHead(nn.Module):
    """Returns [queries, 4 + labels] float32 per image: box, centre and size as fractions of the
    image, and the labels' logits.
    """

    rows: Rows | None = None

    def __init__(
        self,
        spec: DinoSpec,
        own: DinoWeights,
        moves: nn.ModuleList,
        labels: TextStates,
        sizes: Callable[[int, int], Sizes],
    ) -> None:
        """Create the head. `sizes`: returns the sizes of the maps by the original image's height
        and width.
        """
        super().__init__()
        self.own, self.moves, self.labels = own, moves, labels
        self._spec, self._sizes = spec, sizes

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        return self.forward_preemptible(hidden, batch, sequences, never_yield)

    def forward_preemptible(
        self,
        hidden: Tensor,
        batch: Packed,
        sequences: Sequence[InputSequence],
        yield_point: YieldPoint,
    ) -> tuple[Tensor, ...]:
        """Compute `forward`, and call `yield_point` after each layer of the encoder and the
        decoder.
        """
        found = []
        for image, sequence in zip(
            torch.split_with_sizes(hidden.float(), list(batch.lengths)), sequences, strict=True
        ):
            asked = sequence.input
            labels: tuple[Label, ...] = ()
            if isinstance(asked, RegionOptions):
                labels, sizes = asked.labels, self._sizes(asked.height, asked.width)
            else:  # in a probe, which only measures memory
                sizes = (
                    (1, len(image) - self._spec.levels + 1),
                    *[(1, 1)] * (self._spec.levels - 1),
                )
            logits, boxes = self.detect(image, labels, sizes, yield_point)
            ends = np.cumsum([1, *(len(label.ids) for label in labels)])
            scores = [
                logits[:, end : end + len(label.ids) - 1].amax(1)
                for label, end in zip(labels, ends, strict=False)
            ]
            found.append(torch.cat([boxes, *(score[:, None] for score in scores)], dim=1))
        return tuple(found)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return [array.astype("float32", copy=False) for array in arrays]

    def detect(
        self,
        image: Tensor,
        labels: Sequence[Label],
        sizes: Sizes,
        yield_point: YieldPoint = never_yield,
    ) -> tuple[Tensor, Tensor]:
        """Detect boxes: returns logits [queries, tokens of the prompt] and boxes [queries, 4],
        0..1.

        `image`: [locations, width]. The prompt has a first token, each label with its full stop,
        and a last token.
        """
        prompt = (_FRAME[0], *labels, _FRAME[1])
        ids = np.concatenate([label.ids for label in prompt])
        image, text = self._encoded(
            image, torch.cat(self.labels.each(prompt)), ids, sizes, yield_point
        )
        x, boxes = self._queries(image, text, sizes)
        decoder, spec = self.own.decoder, self._spec
        for place, layer in enumerate(decoder.layers):
            last = boxes
            across, down, width, height = sines(
                boxes * (2 * math.pi), spec.width // 2, 10_000.0
            ).unbind(1)
            positions = decoder.reference_points_head.forward(
                torch.cat([down, across, width, height], dim=-1)
            )
            x = layer(x, positions, boxes, image, text, sizes)
            move = self.moves[0 if spec.shares_boxes else place]
            boxes = (move(x) + torch.special.logit(boxes, eps=1e-5)).sigmoid()
            yield_point()
        x = decoder.layer_norm.forward(x)
        return x @ text.T, (move(x) + torch.special.logit(last, eps=1e-5)).sigmoid()

    def _encoded(
        self, image: Tensor, text: Tensor, ids: Ids, sizes: Sizes, yield_point: YieldPoint
    ) -> tuple[Tensor, Tensor]:
        starts = _starts(ids)
        phrases = np.cumsum(starts)
        parts = to_device(phrases.astype(np.int32), text.device)
        mask = parts[:, None] == parts
        places = to_device(
            (np.arange(len(ids)) - np.flatnonzero(starts)[phrases - 1]).astype(np.int32),
            text.device,
        )
        positions = sines(places * (2 * math.pi), self._spec.width, 10_000.0)
        levels = self.own.level_embed.repeat_interleave(
            torch.tensor([a * b for a, b in sizes], device=image.device), dim=0
        )
        image_positions = (
            place_sines(sizes, self._spec.width, self._spec.temperature, image.device) + levels
        )
        points = centres(sizes, image.device)
        for layer in self.own.encoder.layers:
            image, text = layer(image, text, image_positions, positions, mask, points, sizes)
            yield_point()
        return image, text

    def _queries(self, image: Tensor, text: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Return the decoder's learned first states, and their boxes: those of the locations that
        match the text best.
        """
        points = centres(sizes, image.device)
        counts = torch.tensor([rows * columns for rows, columns in sizes], device=image.device)
        sides = (
            _SMALLEST * 2.0 ** torch.arange(len(sizes), device=image.device)
        ).repeat_interleave(counts)
        proposals = torch.cat([points, sides[:, None].expand(-1, 2)], dim=1)
        outside = ~((proposals > _EDGE) & (proposals < 1 - _EDGE)).all(-1, keepdim=True)
        proposals = torch.log(proposals / (1 - proposals)).masked_fill(outside, math.inf)
        states = self.own.enc_output_norm.forward(
            self.own.enc_output.forward(image.masked_fill(outside, 0.0))
        )
        best = (states @ text.T).amax(-1).topk(min(self._spec.queries, len(states))).indices
        boxes = (
            self.own.encoder_output_bbox_embed.forward(states[best]) + proposals[best]
        ).sigmoid()
        return self.own.query_position_embeddings.weight[: len(best)], boxes


def maps_encoder(spec: DinoSpec, maps: ImageMaps) -> PackedEncoder:
    """Return the backbone's encoder, which is only `maps`. All layers need the labels, which the
    head has.
    """
    own = EncoderSpec(
        hidden=spec.width,
        heads=1,
        head_size=spec.width,
        ffn=1,
        layers=(),
        norm="post",
        norm_eps=spec.eps,
        activation="relu",
        causal=True,
    )  # causal: layers are not asked for windows
    return PackedEncoder(own, maps)

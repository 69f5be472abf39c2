"""OWL-ViT and OWLv2 (arXiv 2205.06230, 2306.09683): CLIP's towers; every patch of an image predicts
a box.

A patch's class vector is compared with the labels' vectors, one text each. OWLv2 differs only in
its pixels (`padded.py`): boxes are fractions of the padded square. Its objectness head, which needs
no label, is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libs.models.images.detection.regions import RegionOptions
from libs.models.images.families import clip
from libs.models.images.families.family import encoder_spec, square_grid
from libs.models.images.patches import PatchSpec
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec, EncoderSpec
from libs.models.text.heads.extraction.label_vectors import LabelVectors
from libs.models.text.heads.extraction.words import Ids
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.weights import SINGLE, HeadRule, Rule

MODEL_TYPES = ("owlvit", "owlv2")
THRESHOLD = 0.1

IMAGES: dict[str, Rule] = {
    ("pre_layernorm" if stem == "pre_layrnorm" else stem): rule
    for stem, rule in clip.IMAGES.items()
}

REST: dict[str, HeadRule] = {
    "text_projection": "text_projection",
    "visual_projection": None,
    "logit_scale": None,
}

HEADS: dict[str, HeadRule] = {
    "layer_norm": "layer_norm",
    "class_head.dense0": "class_head.dense0",
    "class_head.logit_shift": "class_head.logit_shift",
    "class_head.logit_scale": "class_head.logit_scale",
    "box_head.dense0": "box_head.dense0",
    "box_head.dense1": "box_head.dense1",
    "box_head.dense2": "box_head.dense2",
}
OBJECTNESS: dict[str, HeadRule] = {f"objectness_head.dense{number}": None for number in range(3)}


def text_encoder(config: Config) -> tuple[EncoderSpec, EmbeddingSpec]:
    texts = config.part("text_config")
    spec = encoder_spec(
        texts, hidden=512, layers=12, heads=8, ffn=2048, eps=1e-5, activation="quick_gelu"
    )
    positions = texts.size("max_position_embeddings", 16)
    vocabulary = texts.size("vocab_size", 49408)
    return replace(spec, causal=True), EmbeddingSpec(
        vocabulary, spec.hidden, positions, norm_eps=None
    )


def image_encoder(config: Config) -> tuple[EncoderSpec, PatchSpec]:
    images = config.part("vision_config")
    spec = encoder_spec(
        images, hidden=768, layers=12, heads=12, ffn=3072, eps=1e-5, activation="quick_gelu"
    )
    patch, grid = square_grid(images, 768, 16 if config.text("model_type") == "owlv2" else 32)
    return spec, PatchSpec(spec.hidden, patch, grid, bias=False, norm_eps=spec.norm_eps)


class TextVectors(LabelVectors):
    """A label's vector: the projected state of its last token, normalised twice like the
    reference.
    """

    def _encode(self, ids: Sequence[Ids]) -> Sequence[Tensor]:
        batch = Packed.from_sequences(ids, device=self.encoder.device)
        vectors = self.encoder.forward(batch, "last").float()
        vectors = vectors if self.project is None else self.project.forward(vectors)
        vectors = vectors / _length(vectors)
        return (vectors / (_length(vectors) + 1e-6)).unbind()


class OwlHead(nn.Module):
    """Returns [patches, 4 + labels] float32 per image: box, centre and size as fractions of the
    model's input, and the logits.
    """

    rows: Rows | None = None

    def __init__(
        self,
        state: Mapping[str, Tensor],
        spec: EncoderSpec,
        grid: tuple[int, int],
        texts: PackedEncoder,
        size: int,
    ) -> None:
        """Create the head. Raises ModelBroken for a tensor that is missing or has another shape.

        Args:
            state: Tensors by the names of HEADS and REST.
            texts: Encoder of labels.
            size: Length of the labels' vectors.
        """
        super().__init__()
        width = spec.hidden
        check_shape(state, "text_projection.weight", (size, texts.hidden_size), SINGLE)
        shapes = {
            "class_head.dense0": size,
            "class_head.logit_shift": 1,
            "class_head.logit_scale": 1,
        }
        shapes |= {"box_head.dense0": width, "box_head.dense1": width, "box_head.dense2": 4}
        for stem, outputs in shapes.items():
            check_shape(state, f"{stem}.weight", (outputs, width), SINGLE)
            check_shape(state, f"{stem}.bias", (outputs,), SINGLE)
        self.labels = TextVectors(texts, HeadLinear(state, "text_projection", "identity"))
        self.norm = nn.LayerNorm(width, eps=spec.norm_eps)
        for name in ("weight", "bias"):
            check_shape(state, f"layer_norm.{name}", (width,), SINGLE)
        self.norm.load_state_dict(
            {name: state[f"layer_norm.{name}"] for name in ("weight", "bias")}, assign=True
        )
        self.norm.requires_grad_(False)
        self.vector, self.shift, self.scale = (
            HeadLinear(state, stem, "identity") for stem in list(shapes)[:3]
        )
        self.box = nn.Sequential(
            HeadLinear(state, "box_head.dense0", "gelu"),
            HeadLinear(state, "box_head.dense1", "gelu"),
            HeadLinear(state, "box_head.dense2", "identity"),
        )
        self.places: Tensor
        self.register_buffer(
            "places", _places(*grid).to(state["layer_norm.weight"].device), persistent=False
        )

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        states = hidden.float().view(len(sequences), -1, hidden.shape[-1])
        features = self.norm.forward(states[:, 1:] * states[:, :1])
        vectors = self.vector.forward(features)
        vectors = vectors / (_length(vectors) + 1e-6)
        shift, scale = self.shift.forward(features), F.elu(self.scale.forward(features)) + 1
        boxes: Tensor = (self.box(features) + self.places).sigmoid()
        return tuple(
            torch.cat(
                [
                    boxes[number],
                    (vectors[number] @ self._wanted(one).T + shift[number]) * scale[number],
                ],
                dim=1,
            )
            for number, one in enumerate(sequences)
        )

    def _wanted(self, sequence: InputSequence) -> Tensor:
        if not isinstance(sequence.input, RegionOptions):
            raise TypeError("the sequence has no labels")
        return self.labels.forward(sequence.input.labels)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return [array.astype("float32", copy=False) for array in arrays]


def _length(vectors: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return length


def _places(rows: int, columns: int) -> Tensor:
    """Return the offsets [patches, 4] of a patch's box logits. With them, zeros mean a box of a
    patch's size at its corner.
    """
    down, across = torch.arange(1, rows + 1) / rows, torch.arange(1, columns + 1) / columns
    size = torch.tensor([1 / columns, 1 / rows])
    corners = torch.stack([across.repeat(rows), down.repeat_interleave(columns)], dim=-1)
    places = torch.cat([corners, size.expand(rows * columns, 2)], dim=-1)
    return torch.log(places + 1e-4) - torch.log1p(-places + 1e-4)

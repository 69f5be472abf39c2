"""Load Grounding DINO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from libs.catalog.checkpoint.files import need_config
from libs.errors import InvalidInput, ModelBroken
from libs.models.images.detection import dino
from libs.models.images.detection.building import fill, processor_values, tokenizer_for
from libs.models.images.detection.detector import HEAD, Detector
from libs.models.images.detection.swin import SIDE, SwinSpec, rename
from libs.models.images.processing import ImageProcessing
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import Config
from libs.models.runtime.backbone import Backbone
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.registry import build_encoder
from libs.models.weights import SINGLE, TensorFile

_MEAN: Final = [0.485, 0.456, 0.406]
_STD: Final = [0.229, 0.224, 0.225]
_BACKBONE: Final = "backbone.conv_encoder.model."

# BERT's defaults for missing keys.
_TEXTS: Final[dict[str, object]] = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


@dataclass(frozen=True, slots=True)
class LimitedProcessing(ImageProcessing):
    """Resizes the short side to `size`, or less if the long side would exceed `longest`."""

    longest: int = 1333

    def _resized(self, height: int, width: int, field: str) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return height, width
        short, long = min(height, width), max(height, width)
        exact: float = self.size
        if long / short * exact > self.longest:
            exact = self.longest * float(short) / float(long)
        size = round(exact)
        if size < 1:
            raise InvalidInput(f"the image is too thin: {width:,} x {height:,} pixels", field=field)
        if short == size:
            return height, width
        return (
            (int(exact * height / width), size)
            if width < height
            else (size, int(exact * width / height))
        )


def read_processing(directory: Path) -> LimitedProcessing:
    """Read the image processing. Raises ModelBroken with the unsupported key."""
    written, file = processor_values(directory)
    values = {key: value for key, value in written.items() if value is not None}
    config = Config(values, file=file)
    keys = ("image_processor_type", "feature_extractor_type")
    names = [
        str(values[key]).removesuffix("Fast").removesuffix("Pil") for key in keys if key in values
    ]
    if any(name != "GroundingDinoImageProcessor" for name in names):
        raise config.unsupported(keys[0], "it must be GroundingDinoImageProcessor")
    config.require("do_resize", True)
    short, longest = 800, config.integer("max_size", 1333)
    if config.is_number("size"):
        short = config.size("size")
    elif config.has("size"):
        size = config.part("size")
        short, longest = size.size("shortest_edge"), size.size("longest_edge")
    if not 0 < short <= longest <= 1 << 13:
        raise config.unsupported(
            "size", "it needs a shortest_edge and a longest_edge of at most 8,192"
        )
    defaults: dict[str, object] = {"image_mean": _MEAN, "image_std": _STD, "resample": 2}
    # Padding applies to batches, which are not padded here.
    plain = {
        key: value for key, value in values.items() if key not in (*keys, "do_pad", "max_size")
    }
    read = ImageProcessing.from_config(
        Config({**defaults, **plain, "size": short, "do_center_crop": False}, file=file),
        "CLIPImageProcessor",
    )
    return LimitedProcessing(
        short, read.resample, None, read.scale, read.mean, read.std, longest=longest
    )


def load_dino(
    directory: Path, config: Config, dtype: torch.dtype, device: torch.device
) -> Detector:
    """Load the detector. Raises ModelBroken with the file and the key or tensor that is not
    supported.
    """
    spec, swin, processing = (
        dino.read_spec(config),
        SwinSpec.from_config(config.part("backbone_config")),
        read_processing(directory),
    )
    levels = dino.Levels(spec.levels)
    own, boxes = TensorFile.open(directory).split("model.")
    backbone, own = own.split(_BACKBONE)
    texts, own = own.split("text_backbone.")
    projection, own = own.split("text_projection.")
    inputs, own = own.split("input_proj_vision.")

    most = levels.tokens(processing.longest, processing.longest)
    maps = on_meta(lambda: dino.ImageMaps(spec, swin, processing, most))
    fill(maps.backbone, backbone, dtype, device, rename)
    fill(maps.input_proj_vision, inputs, torch.float32, device)
    weights = on_meta(lambda: dino.DinoWeights(spec))
    fill(weights, own, torch.float32, device, _without_copies)
    moves = on_meta(lambda: dino.box_heads(spec))
    fill(moves, boxes, torch.float32, device, _first_box if spec.shares_boxes else _box)

    values = _TEXTS | dict(need_config(directory, "config.json").part("text_config").values)
    encoder, _ = build_encoder(values, texts, dtype=dtype, device=device, head_tables={})
    state = {
        f"text_projection.{name}": projection.read(name).to(device=device, dtype=torch.float32)
        for name in projection.names()
    }
    check_shape(state, "text_projection.weight", (spec.width, encoder.hidden_size), SINGLE)
    check_shape(state, "text_projection.bias", (spec.width,), SINGLE)
    labels = dino.TextStates(encoder, HeadLinear(state, "text_projection", "identity"))
    head = dino.DinoHead(
        spec,
        weights,
        moves,
        labels,
        lambda height, width: levels.sizes(*processing.seen(height, width, "")),
    )
    tokenizer = _tokenizer(directory, encoder.embed.vocabulary)

    def read_label(label: str) -> NDArray[np.int32]:
        ids = tokenizer.encode(label.strip().lower(), add_special_tokens=False).ids
        return np.array([*ids, dino.STOP], np.int32)

    return Detector(
        backbone=Backbone(dino.maps_encoder(spec, maps), {HEAD: head}, dino.ImageMapRows(maps)),
        processing=processing,
        read_label=read_label,
        count=levels.tokens,
        threshold=dino.THRESHOLD,
        most=min(spec.tokens, 1 << 12),
        most_each=encoder.max_positions,
        frame=1,
        spare=2,
        maps=levels.count,
        smallest=2 * SIDE,
    )


def _without_copies(name: str) -> str | None:
    """Drop the decoder's copy of the box heads."""
    return None if name.startswith("decoder.bbox_embed.") else name


def _box(name: str) -> str:
    return name.removeprefix("bbox_embed.")


def _first_box(name: str) -> str | None:
    """Keep the first head: all box heads are equal."""
    is_copy = name.startswith("bbox_embed.") and not name.startswith("bbox_embed.0.")
    return None if is_copy else _box(name)


def _tokenizer(directory: Path, vocabulary: int) -> Tokenizer:
    """Load the tokenizer. Raises ModelBroken unless the tokens that separate phrases have the ids
    of the training.
    """
    tokenizer = tokenizer_for(directory, vocabulary)
    for token, wanted in (
        ("[CLS]", dino.FIRST),
        ("[SEP]", dino.LAST),
        (".", dino.STOP),
        ("?", dino.QUESTION),
    ):
        if tokenizer.token_to_id(token) != wanted:
            raise ModelBroken(
                f"tokenizer.json: the token {token!r} must have the id {wanted}, as in "
                "bert-base-uncased"
            )
    return tokenizer

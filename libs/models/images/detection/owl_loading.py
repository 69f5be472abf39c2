"""Load OWL-ViT and OWLv2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from libs.errors import ModelBroken
from libs.models.images.detection import owl
from libs.models.images.detection.building import (
    load_encoder,
    load_state,
    processor_values,
    tokenizer_for,
)
from libs.models.images.detection.detector import HEAD, Detector
from libs.models.images.detection.padded import PaddedProcessing
from libs.models.images.families.clip import TEXTS
from libs.models.images.patches import PatchEmbedding, PatchRows
from libs.models.images.processing import ImageProcessing
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.spec import Config
from libs.models.runtime.backbone import Backbone
from libs.models.weights import TensorFile

_FRAME = 2  # <|startoftext|> and <|endoftext|>


def load_owl(directory: Path, config: Config, dtype: torch.dtype, device: torch.device) -> Detector:
    """Load the detector. Raises ModelBroken with the file and the key or tensor that is not
    supported.
    """
    family = config.text("model_type")
    spec, patches = owl.image_encoder(config)
    text_spec, embedding = owl.text_encoder(config)
    processing = read_processing(directory, padded=family == "owlv2")
    if (
        not isinstance(processing.size, tuple)
        or patches.patch_grid(*processing.size) != patches.grid
    ):
        wanted = " x ".join(str(count * patches.patch) for count in patches.grid)
        raise ModelBroken(
            f"preprocessor_config.json: images have size {processing.size}; "
            f"config.json needs {wanted} pixels"
        )
    own, rest = TensorFile.open(directory).split(f"{family}.")
    text_tensors, own = own.split("text_model.")
    image_tensors, own = own.split("vision_model.")
    encoder = load_encoder(
        spec, lambda: PatchEmbedding(patches, processing), owl.IMAGES, image_tensors, dtype, device
    )
    texts = load_encoder(
        text_spec, lambda: TokenEmbedding(embedding), TEXTS, text_tensors, dtype, device
    )
    objectness = owl.OBJECTNESS if family == "owlv2" else {}
    state = load_state(own, owl.REST, device) | load_state(rest, owl.HEADS | objectness, device)
    head = owl.OwlHead(state, spec, patches.grid, texts, config.size("projection_dim", 512))
    embed = encoder.embed
    if not isinstance(embed, PatchEmbedding):
        raise TypeError("an image encoder's first layer is of patches")
    tokenizer = tokenizer_for(directory, embedding.vocabulary)

    def read_label(label: str) -> NDArray[np.int32]:
        return np.array(tokenizer.encode(label).ids, np.int32)

    return Detector(
        backbone=Backbone(encoder, {HEAD: head}, PatchRows(embed)),
        processing=processing,
        read_label=read_label,
        count=patches.count_tokens,
        threshold=owl.THRESHOLD,
        most=1 << 20,
        most_each=embedding.positions,
        frame=_FRAME,
        first=1,
        square=family == "owlv2",
    )


def read_processing(directory: Path, *, padded: bool) -> ImageProcessing:
    """Read the image processing; `padded` for OWLv2's. Raises ModelBroken with the unsupported
    key.
    """
    written, file = processor_values(directory)
    values: dict[str, object] = {
        "size": {"height": 960, "width": 960} if padded else {"height": 768, "width": 768}
    }
    values |= {key: value for key, value in written.items() if value is not None}
    kind = "Owlv2" if padded else "OwlViT"
    keys = ("image_processor_type", "feature_extractor_type")
    names = [
        str(values[key]).removesuffix("Fast").removesuffix("Pil") for key in keys if key in values
    ]
    if any(name not in (f"{kind}ImageProcessor", f"{kind}FeatureExtractor") for name in names):
        raise Config(values, file=file).unsupported(keys[0], f"it must be {kind}ImageProcessor")
    size = values["size"]
    if isinstance(size, list) and len(size) == 2:  # early files
        values["size"] = {"height": size[0], "width": size[1]}
    plain = {key: value for key, value in values.items() if key not in keys}
    if padded:
        Config(values, file=file).require("do_pad", True)
        Config(values, file=file).require("do_resize", True)
        plain.pop("do_pad", None)
    # CLIP's processor has the same keys with the same meaning, and the same means.
    processing = ImageProcessing.from_config(
        Config({"do_center_crop": False} | plain, file=file), "CLIPImageProcessor"
    )
    if not padded:
        return processing
    return _padded(processing)


def _padded(processing: ImageProcessing) -> PaddedProcessing:
    if processing.crop is not None:
        raise ModelBroken(
            "preprocessor_config.json: do_center_crop is true, but images padded to a square "
            "cannot be cropped"
        )
    return PaddedProcessing(
        size=processing.size,
        resample=processing.resample,
        crop=None,
        scale=1.0,
        mean=processing.mean,
        std=processing.std,
        rescale=processing.scale,
    )

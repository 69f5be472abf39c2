"""Models of images, and of texts and images in one space: how they are recognised, and their Card.

They are recognised by `model_type` alone, or by open_clip's configuration, which SigLIP is
published with too. The towers, the processing of images and the price of one are read when a model
is loaded (`libs/models/images`), which knows every key; the card has the data that a mesh must know
of a cold model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from libs.catalog.card import Card, Task
from libs.catalog.checkpoint.files import (
    CheckpointConfig,
    digest,
    need_config,
    need_tokenizer,
    read_config,
    read_json,
    tensor_files,
)
from libs.kinds.kind import CheckpointPlace, Kind

TEXTS_AND_IMAGES: Final = ("clip", "siglip", "siglip2")
IMAGES_ALONE: Final = (
    "clip_vision_model", "dinov2", "dinov2_with_registers", "dinov3_vit", "siglip2_vision_model",
    "siglip_vision_model", "vit",
)  # fmt: skip
DETECTORS: Final = ("grounding-dino", "owlv2", "owlvit")

OPEN_CLIP: Final = "open_clip_config.json"
OPEN_CLIP_WEIGHTS: Final = "open_clip_model.safetensors"

_FILES: Final = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
)
_MAX_PLACES: Final = 37_295  # of Grounding DINO's maps of 1,333 x 1,333 pixels
_BOTH: Final[tuple[Task, ...]] = ("encode", "score", "classify")


def images_folder(directory: Path) -> Path | None:
    """Return the folder of config.json, from the checkpoint's root, of an image model; None for
    other checkpoints.

    sentence-transformers has it in the folder of its first module (`clip-ViT-B-32`: `0_CLIPModel`);
    open_clip, in the root.
    """
    if is_open_clip(directory):
        return Path()
    folder = _folder(directory)
    config = read_config(directory, str(folder / "config.json"))
    found = None if config is None else config.values.get("model_type")
    return folder if found in (*TEXTS_AND_IMAGES, *IMAGES_ALONE, *DETECTORS) else None


def is_open_clip(directory: Path) -> bool:
    """Return True if open_clip's layout is the one to read: some repositories hold a model in
    transformers' too.
    """
    return read_config(directory, OPEN_CLIP) is not None and not describes_towers(
        read_config(directory, "config.json")
    )


def describes_towers(config: CheckpointConfig | None) -> bool:
    """Return True if config.json describes the encoders of a model of images and texts. That of
    Marqo's only names its code.
    """
    return config is not None and bool(
        {"vision_config", "vision_config_dict"} & config.values.keys()
    )


def images_card(place: CheckpointPlace) -> Card:
    """Raise ModelBroken naming the file and the key at fault."""
    directory, model, folder = place.directory, place.model, images_folder(place.directory)
    if folder is None or is_open_clip(directory):
        return _open_clip_card(place)
    config = need_config(directory, str(folder / "config.json"))
    family = config.text("model_type")
    reads_texts, detects = family in TEXTS_AND_IMAGES, family in DETECTORS
    if reads_texts or detects:
        need_tokenizer(directory / folder)
    tensors = tensor_files(directory, str(folder) if folder.parts else "")
    files = [*(str(folder / name) for name in _FILES if name != "tokenizer.json"), "modules.json"]
    return Card(
        model=model,
        revision=place.named_revision or digest(directory, files, tensors),
        family=family,
        kind="images",
        tasks=("regions",) if detects else _BOTH if reads_texts else ("encode", "score"),
        representations=() if detects else ("dense",),
        max_tokens=_text_tokens(config, family) if reads_texts else _image_tokens(config, family),
        dimensions=0 if detects else _dimensions(config, family),
        encoder_folder=str(folder) if folder.parts else "",
        inputs=("text", "image") if reads_texts else ("image",),
        scoring="cosine",
    )


def _open_clip_card(place: CheckpointPlace) -> Card:
    """Return the card of an open_clip model. Unsupported ones, such as CLIP with open_clip's
    encoders, are refused when the model is loaded.
    """
    parts = need_config(place.directory, OPEN_CLIP).part("model_cfg")
    need_tokenizer(place.directory)
    files = [OPEN_CLIP, "tokenizer_config.json"]
    return Card(
        model=place.model,
        revision=place.named_revision or digest(place.directory, files, [OPEN_CLIP_WEIGHTS]),
        family="siglip",
        kind="images",
        tasks=_BOTH,
        representations=("dense",),
        max_tokens=parts.part("text_cfg").number("context_length", 64),
        dimensions=parts.number("embed_dim"),
        inputs=("text", "image"),
        scoring="cosine",
    )


def _folder(directory: Path) -> Path:
    if read_config(directory, "config.json") is not None:
        return Path()
    modules = read_json(directory, "modules.json")
    first = modules[0] if isinstance(modules, list) and modules else None
    place = first.get("path") if isinstance(first, dict) else None
    return (
        Path(place)
        if isinstance(place, str) and place and ".." not in Path(place).parts
        else Path()
    )


def _dimensions(config: CheckpointConfig, family: str) -> int:
    """Return the size of a vector. Missing keys have transformers' defaults, here and below."""
    if family == "clip":
        return config.number("projection_dim", 512)
    if family == "clip_vision_model" and any(
        "WithProjection" in name for name in config.texts("architectures")
    ):
        return config.number("projection_dim", 512)
    if family in ("siglip", "siglip2"):
        texts = config.part("text_config")
        return texts.number("projection_size", texts.number("hidden_size", 768))
    return config.number("hidden_size", 384 if family == "dinov3_vit" else 768)


def _text_tokens(config: CheckpointConfig, family: str) -> int:
    key = (
        "text_config_dict"
        if family == "clip" and config.values.get("text_config_dict") is not None
        else "text_config"
    )
    return config.part(key).number("max_position_embeddings", 77 if family == "clip" else 64)


def _image_tokens(config: CheckpointConfig, family: str) -> int:
    if family == "grounding-dino":
        return _MAX_PLACES
    if family in DETECTORS:
        config = config.part("vision_config")
        side = config.number("image_size", 768) // max(
            1, config.number("patch_size", 16 if family == "owlv2" else 32)
        )
        return side * side + 1
    patch = 14 if family.startswith("dinov2") else 32 if family == "clip_vision_model" else 16
    side = config.number("image_size", 224) // max(1, config.number("patch_size", patch))
    return side * side + 1


KIND: Final = Kind(
    "images",
    "images",
    lambda place: images_folder(place.directory) is not None,
    images_card,
    configs=(OPEN_CLIP,),
)

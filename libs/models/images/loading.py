"""Load a checkpoint directory of an image model. Its config.json names the family, which defines
the towers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from libs.catalog.checkpoint.files import need_config, read_config, read_json
from libs.errors import ModelBroken
from libs.kernels.linear.packed import PackedLinear
from libs.kinds.images.card import is_open_clip
from libs.models import weights
from libs.models.images.families import clip, dinov2, dinov3, open_clip, siglip, siglip2, vit
from libs.models.images.families.family import ImageFamily, State, TowerSpec
from libs.models.images.patches import ImageInput, PatchEmbedding, PatchRows, PatchSpec
from libs.models.images.processing import ImageProcessing
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import FeedForward, PackedEncoder
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import Config
from libs.models.runtime.backbone import Backbone
from libs.models.text.registry import prepare
from libs.models.weights import HeadRule, TensorFile

_FAMILIES: Final[tuple[ImageFamily, ...]] = (clip, dinov2, dinov3, siglip, siglip2, vit)
_PROCESSOR_FILE: Final = "preprocessor_config.json"
_WHOLE_PROCESSOR_FILE: Final = "processor_config.json"  # of transformers 5, in `image_processor`


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A loaded image model.

    Attributes:
        backbones: Texts first, if the model reads texts. The head of texts is "dense", that of
            images "image".
        input: Converts an image file to a sequence.
        state: Float32 tensors outside the encoders, such as the scale of logits.
    """

    backbones: tuple[Backbone, ...]
    input: ImageInput
    state: State


def model_types() -> tuple[str, ...]:
    """Return every `model_type` that `load_images` supports."""
    return tuple(model_type for family in _FAMILIES for model_type in family.MODEL_TYPES)


def load_images(directory: Path, *, dtype: torch.dtype, device: torch.device) -> ImageModel:
    """Load the encoders in `dtype`, ready to run. Their heads compute in float32.

    Raises ModelBroken with the file and the key or tensor that is not supported.
    """
    found = _open_clip(directory) if is_open_clip(directory) else _transformers(directory)
    rest, owned = found.tensors, {}
    for name, tower in found.towers.items():
        owned[name], rest = rest.split(tower.part)
    # A checkpoint of one encoder has no other tensors.
    state = _state(
        rest, found.rest if all(tower.part for tower in found.towers.values()) else {}, device
    )
    backbones = [
        _backbone(name, tower, owned[name], state, found.processing, dtype, device)
        for name, tower in found.towers.items()
    ]
    patches = next(
        tower.input for tower in found.towers.values() if isinstance(tower.input, PatchSpec)
    )
    return ImageModel(tuple(backbones), ImageInput(found.processing, patches), state)


@dataclass(frozen=True, slots=True)
class _Found:
    """The contents of a directory.

    Attributes:
        rest: Rules for tensors outside the encoders.
    """

    towers: Mapping[str, TowerSpec]
    rest: Mapping[str, HeadRule]
    processing: ImageProcessing
    tensors: TensorFile


def _transformers(directory: Path) -> _Found:
    folder = _folder(directory)
    config = Config(need_config(directory, str(folder / "config.json")).values)
    family = next((one for one in _FAMILIES if config.text("model_type") in one.MODEL_TYPES), None)
    if family is None:
        raise config.unsupported("model_type", f"supported are {', '.join(model_types())}")
    processing = read_processing(directory, folder, family.PROCESSOR)
    return _Found(
        family.towers(config), family.REST, processing, TensorFile.open(directory, str(folder))
    )


def _open_clip(directory: Path) -> _Found:
    config = Config(need_config(directory, open_clip.CONFIG).values, file=open_clip.CONFIG)
    tensors = TensorFile.open_file(directory, open_clip.WEIGHTS).renamed(open_clip.tensor_name)
    return _Found(
        open_clip.towers(config, tensors), open_clip.REST, open_clip.processing(config), tensors
    )


def _folder(directory: Path) -> Path:
    """Return the folder of config.json; sentence-transformers puts it in the folder of its first
    module (`clip-ViT-B-32`: `0_CLIPModel`).
    """
    if read_config(directory, "config.json") is not None:
        return Path()
    modules = read_json(directory, "modules.json")
    first = modules[0] if isinstance(modules, list) and modules else None
    place = first.get("path") if isinstance(first, dict) else None
    return Path(place) if isinstance(place, str) else Path()


def read_processing(directory: Path, folder: Path, default: str) -> ImageProcessing:
    """Read the image processing from a checkpoint's files. Raises ModelBroken if they lack it, or
    for an unsupported key.
    """
    return ImageProcessing.from_config(read_image_processor(directory, folder), default)


def read_image_processor(directory: Path, folder: Path) -> Config:
    """Read the configuration of the image processor from either file. Raises ModelBroken if both
    lack it.
    """
    whole = read_config(directory, str(folder / _WHOLE_PROCESSOR_FILE))
    part = None if whole is None else whole.values.get("image_processor")
    if isinstance(part, Mapping):
        return Config(part, "image_processor.", _WHOLE_PROCESSOR_FILE)
    file = str(folder / _PROCESSOR_FILE)
    return Config(need_config(directory, file).values, file=file)


def _backbone(
    name: str,
    tower: TowerSpec,
    tensors: TensorFile,
    state: State,
    processing: ImageProcessing,
    dtype: torch.dtype,
    device: torch.device,
) -> Backbone:
    encoder = _empty(tower, processing)
    own = weights.load(
        encoder,
        tensors if tower.stored is None else tower.stored(tensors),
        table=tower.weights,
        prefixes=tower.prefixes,
        head_table=tower.head_table,
        dtype=dtype,
        device=device,
    )
    if tower.layer_scale:
        _fold_scales(encoder, own, tensors.source)
    prepare(encoder)
    encoder = encoder.requires_grad_(False).eval()
    embed = encoder.embed
    return Backbone(
        encoder,
        {name: tower.head({**state, **own})},
        PatchRows(embed) if isinstance(embed, PatchEmbedding) else None,
    )


def _empty(tower: TowerSpec, processing: ImageProcessing) -> PackedEncoder:
    """Build an encoder on the meta device."""

    def build() -> PackedEncoder:
        if isinstance(tower.input, PatchSpec):
            _check_size(tower.input, processing)
            return PackedEncoder(tower.encoder, PatchEmbedding(tower.input, processing))
        return PackedEncoder(tower.encoder, TokenEmbedding(tower.input))

    return on_meta(build, "encoder")


def _check_size(patches: PatchSpec, processing: ImageProcessing) -> None:
    """Check that an encoder with fixed positions gets images of one size."""
    size = processing.crop or processing.size
    if patches.any_size or (isinstance(size, tuple) and patches.patch_grid(*size) == patches.grid):
        return
    wanted = " x ".join(str(count * patches.patch) for count in patches.grid)
    raise ModelBroken(
        f"{_PROCESSOR_FILE}: images have size {size}; config.json needs {wanted} pixels"
    )


def _fold_scales(encoder: PackedEncoder, state: State, source: str) -> None:
    """Fold layer scale, a factor on each block's output, into the weights of the block's last
    linear layer.
    """
    for number, layer in enumerate(encoder.stack):
        blocks: dict[str, PackedLinear] = {"attn": layer.attn.out}
        if isinstance(layer.ffn, FeedForward):
            blocks["ffn"] = layer.ffn.down
        for block, linear in blocks.items():
            scale = state.get(f"layers.{number}.{block}.lambda1")
            if scale is None or scale.shape != (linear.outputs,):
                raise ModelBroken(
                    f"{source}: the scale of layer {number} must have {linear.outputs} numbers"
                )
            linear.weight = _scaled(linear.weight, scale[:, None])
            if linear.bias is not None:
                linear.bias = _scaled(linear.bias, scale)


def _scaled(weight: Tensor, scale: Tensor) -> nn.Parameter:
    return nn.Parameter((weight.float() * scale).to(weight.dtype), requires_grad=False)


def _state(tensors: TensorFile, table: Mapping[str, HeadRule], device: torch.device) -> State:
    """Return the float32 tensors outside the encoders, by the names of the table."""
    left = {name: name for name in tensors.names()}
    state = weights.head_state(tensors, left, table, device)
    for name in left:
        raise ModelBroken(
            f"{tensors.tensor_file(name)}: tensor {name!r} is unknown to this family of models"
        )
    return state

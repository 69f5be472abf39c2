"""Load a checkpoint directory of a vision-language model. Its config.json names the family, which
defines the parts.

A loaded model has the same interface as the `ImageModel` of `images/loading.py`: backbones by the
names of their heads, and the host's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from libs.catalog.checkpoint.adapter import FILE as ADAPTER
from libs.catalog.checkpoint.adapter import read_base_model
from libs.catalog.checkpoint.files import need_config, read_config, read_json
from libs.errors import ModelBroken
from libs.kinds.vision_language.card import sparse_columns
from libs.models import weights
from libs.models.images.loading import read_image_processor
from libs.models.images.patches import PatchEmbedding
from libs.models.images.vlm.blocks import BlockEmbedding, BlockSpec, WindowAttention
from libs.models.images.vlm.connectors import Mergers
from libs.models.images.vlm.families import colpali, glm, idefics, lighton, paddleocr, qwen, vsplade
from libs.models.images.vlm.families.family import (
    VisionLanguageSpec,
    VlmFamily,
    VlmFiles,
    special_around,
)
from libs.models.images.vlm.heads import Use, no_heads
from libs.models.images.vlm.parts import PartsInput, Prompts
from libs.models.images.vlm.tower import BlockTower, ImageTower
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import Attention, PackedEncoder
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import Config, EncoderSpec, LayerSpec
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.loaded.peft import TensorNames, read_updates
from libs.models.text.processing.static import TokenWeights
from libs.models.text.registry import build_encoder, layer_names, prepare
from libs.models.text.tokenising.text import TextProcessor, special_token
from libs.models.text.tokenising.tokenizer import load_tokenizer
from libs.models.weights import TensorFile

_FAMILIES: Final[tuple[VlmFamily, ...]] = (colpali, glm, idefics, lighton, paddleocr, qwen)
_PROCESSORS: Final = ("processor_config.json", "preprocessor_config.json")
_WHOLE: Final = ("vlm.", "model.")  # optional prefixes of names, in this order
_WHOLES: Final = ("", "model.", "vlm.", "vlm.model.")


@dataclass(frozen=True, slots=True)
class VisionLanguageModel:
    """A loaded vision-language model.

    Attributes:
        backbones: One, for texts and images in one sequence. Its heads are "multi_vector", "dense",
            "sparse" or "score".
        input: Converts items to sequences.
        names: Names of the text encoder's layers in LoRA adapters.
        weights: Token weights, if texts need no forward: the backbone then sees only items with
            images.
    """

    backbones: tuple[Backbone, ...]
    input: PartsInput
    names: TensorNames
    weights: TokenWeights | None = None


def model_types() -> tuple[str, ...]:
    """Return every `model_type` that `load_vision_language` supports."""
    return tuple(model_type for family in _FAMILIES for model_type in family.MODEL_TYPES)


def load_vision_language(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    use: Use = "",
    base: Path | None = None,
    prompts: Prompts | None = None,
) -> VisionLanguageModel:
    """Load the tower, the connector and the text encoder in `dtype`, ready to run. Heads compute in
    float32.

    Args:
        use: Use of a language model without a projection to vectors, which its files do not define.
        base: Directory of the model `read_base_model(directory)`, into which the adapter is merged
            in float32.
        prompts: Prompts of a generative model.

    Raises ModelBroken with the file and the key or tensor that is not supported.
    """
    name = read_base_model(directory)
    if name and base is None:
        raise ModelBroken(f"{ADAPTER}: this adapter needs its base model {name!r}")
    home = directory if base is None or not name else base
    config = Config(need_config(home, "config.json").values)
    family = _find_family(home, config)
    files = _files(directory, home, config, use or _used(home))
    spec = family.spec(files)
    if prompts is not None:
        spec = replace(spec, prompts=prompts, heads=no_heads, adds_special_tokens=False)

    def rename(name: str) -> str:
        return _renamed(name, family.NAMES)

    stored = TensorFile.open(home)
    tensors = stored.renamed(rename)
    if len(tensors.names()) < len(stored.names()):
        raise ModelBroken(f"{stored.source}: duplicate tensors under two names")
    if name:
        tensors = tensors.merged(
            {
                rename(f"{module}.weight"): update
                for module, update in read_updates(directory).items()
            }
        )
    texts, rest = tensors.split("text.")
    layers = Config(spec.text).layers("num_hidden_layers") if spec.spare_layers else 0
    for unused in (
        *spec.unused,
        *(f"layers.{layers + number}." for number in range(spec.spare_layers)),
    ):
        texts = texts.split(unused)[1]
    texts, text = _with_tokens_apart(texts, spec.text)
    tower_tensors, rest = rest.split("tower.")
    connecting, rest = rest.split("connector.")
    heads, rest = rest.split("head.")
    for unknown in rest.names():
        raise ModelBroken(
            f"{rest.tensor_file(unknown)}: tensor {unknown!r} is unknown to this family of models"
        )
    encoder, _ = build_encoder(text, texts, dtype=dtype, device=device, head_tables={})
    tower = _tower(spec, family, tower_tensors, connecting, encoder, dtype, device)
    state = _state(heads, family.HEADS, device)
    backbone = Backbone(encoder, spec.heads(state, encoder), tower)
    found = None if spec.weights is None else spec.weights(state)
    return VisionLanguageModel(
        (backbone,), _input(files, spec, encoder), _names(spec, family), found
    )


def _find_family(directory: Path, config: Config) -> VlmFamily:
    """Return the family of the `model_type`. V-SPLADE shares ModernVBERT's and is recognised by its
    tensors.
    """
    if sparse_columns(directory):
        return vsplade
    family = next((one for one in _FAMILIES if config.text("model_type") in one.MODEL_TYPES), None)
    if family is None:
        raise config.unsupported("model_type", f"supported are {', '.join(model_types())}")
    return family


def _with_tokens_apart(
    texts: TensorFile, text: Mapping[str, object]
) -> tuple[TensorFile, Mapping[str, object]]:
    """Join the text encoder's token tables in tensors and configuration.

    colpali-engine's ModernVBERT stores those of images and turns separately (its
    DecoupledEmbedding), after the others.
    """
    whole, apart = (
        f"embeddings.tok_embeddings.{name}weight" for name in ("", "additional_embedding.")
    )
    if apart not in texts.names():
        return texts, text
    texts = texts.joined(whole, apart)
    return texts, {**text, "vocab_size": texts.shape(whole)[0]}


def _names(spec: VisionLanguageSpec, family: VlmFamily) -> TensorNames:
    table, prefixes = layer_names(spec.text)
    begins = [begin for begin, own in family.NAMES.items() if own == "text."]
    return TensorNames(
        table, (*prefixes, *(whole + begin for whole in _WHOLES for begin in begins)), {}
    )


def _files(directory: Path, home: Path, config: Config, use: Use) -> VlmFiles:
    """Find the files. An adapter may have processor and tokenizer files, or leave them to its
    base.
    """
    kept = next(
        (one for one in (directory, home) if any((one / name).is_file() for name in _PROCESSORS)),
        home,
    )
    worded = directory if (directory / "tokenizer.json").is_file() else home
    processor = read_config(kept, "processor_config.json")
    found = {} if processor is None else processor.values
    tokenizer = load_tokenizer(worded, lowercase=False)
    return VlmFiles(
        worded,
        config,
        Config(found, file="processor_config.json"),
        read_image_processor(kept, Path()),
        tokenizer,
        use,
    )


def _used(directory: Path) -> Use:
    """Return the use in sentence-transformers' modules.json: models with one vector per item have a
    pooling.
    """
    modules = read_json(directory, "modules.json")
    kinds = (
        [str(one.get("type")) for one in modules if isinstance(one, dict)]
        if isinstance(modules, list)
        else []
    )
    return "dense" if any(kind.endswith(".Pooling") for kind in kinds) else ""


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for begin in _WHOLE:
        name = name.removeprefix(begin)
    own = next((begin for begin in names if name.startswith(begin)), None)
    return name if own is None else names[own] + name.removeprefix(own)


def _tower(
    spec: VisionLanguageSpec,
    family: VlmFamily,
    tower_tensors: TensorFile,
    connecting: TensorFile,
    texts: PackedEncoder,
    dtype: torch.dtype,
    device: torch.device,
) -> ImageTower:
    def build() -> tuple[PatchEmbedding | BlockEmbedding, PackedEncoder]:
        if isinstance(spec.patches, BlockSpec):
            blocks = BlockEmbedding(spec.patches, spec.processing)
            return blocks, PackedEncoder(spec.encoder, blocks, attention=_attention)
        patches = PatchEmbedding(spec.patches, spec.processing)
        return patches, PackedEncoder(spec.encoder, patches)

    embed, encoder = on_meta(build, "image encoder")
    weights.load(
        encoder,
        tower_tensors,
        table=family.TOWER,
        prefixes=("",),
        head_table={},
        dtype=dtype,
        device=device,
    )
    prepare(encoder)
    connector = spec.connector(_state(connecting, family.CONNECTOR, device), dtype)
    encoder = encoder.requires_grad_(False).eval()
    if (
        isinstance(spec.patches, BlockSpec)
        and isinstance(embed, BlockEmbedding)
        and isinstance(connector, Mergers)
    ):
        return BlockTower(encoder, embed, connector, spec.patches)
    norm = texts.embed.norm if isinstance(texts.embed, TokenEmbedding) else None
    return ImageTower(encoder, embed, connector, None if norm is None else norm.forward)


def _attention(spec: EncoderSpec, layer: LayerSpec) -> Attention:
    """Return an attention layer; only image encoders have windows."""
    return Attention(spec, layer) if layer.window is None else WindowAttention(spec, layer)


def _state(
    tensors: TensorFile, table: Mapping[str, weights.HeadRule], device: torch.device
) -> dict[str, torch.Tensor]:
    left = {name: name for name in tensors.names()}
    state = weights.head_state(tensors, left, table, device)
    for name in left:
        raise ModelBroken(
            f"{tensors.tensor_file(name)}: tensor {name!r} is unknown to this family of models"
        )
    return state


def _input(files: VlmFiles, spec: VisionLanguageSpec, encoder: PackedEncoder) -> PartsInput:
    tokenizer = files.tokenizer
    prompts = (
        spec.prompts.within(*special_around(tokenizer))
        if spec.adds_special_tokens
        else spec.prompts
    )
    text = TextProcessor(
        tokenizer,
        limit=encoder.max_positions,
        segments=False,
        unknown=special_token(files.directory, "unk_token"),
    )
    text.keep_whole([spec.mark])
    mark = text.token_id(spec.mark)
    if mark is None:
        raise ModelBroken(f"tokenizer.json: the image token {spec.mark!r} is missing")
    return PartsInput(text, spec.image_converter, prompts, mark)

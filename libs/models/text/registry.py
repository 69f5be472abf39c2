"""The registry of families by `model_type`, which builds a checkpoint's encoder on its device.

It is called once when a worker loads a model. A new architecture is one file in `families`, one
line here and one row in the parity table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from libs.errors import ModelBroken
from libs.kernels.linear.packed import PackedLinear, has_bfloat16
from libs.models import weights
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import Config
from libs.models.text.families.bert import (
    albert,
    bert,
    deberta,
    deberta_v1,
    distilbert,
    jina,
    jina_code,
    longformer,
    mpnet,
    prenorm,
    xlmr_flash,
)
from libs.models.text.families.decoders import (
    gemma,
    gemma2,
    gemma3,
    glm,
    lfm2,
    llama,
    ministral3,
    phi3,
    qwen,
    qwen3_5,
)
from libs.models.text.families.rotary import (
    eurobert,
    gte,
    modernbert,
    nomic_bert,
    nomic_moe,
    privacy_filter,
)
from libs.models.text.families.seq2seq import bart, t5, t5_classifier
from libs.models.weights import HeadRule, Rule, TensorFile


class TextFamily(Protocol):
    """The interface of a module in `families`."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...

    @property
    def PREFIXES(self) -> tuple[str, ...]: ...

    @property
    def WEIGHTS(self) -> Mapping[str, Rule]: ...

    def build(self, config: Config) -> PackedEncoder: ...


@runtime_checkable
class _Claims(Protocol):
    """A family that shares its model_type with another. `claims` selects its checkpoints and is
    asked first.
    """

    def claims(self, config: Config) -> bool: ...


@runtime_checkable
class _Renames(Protocol):
    """A family with module names that differ between transformers and its checkpoints. Adapters use
    transformers' names.
    """

    @property
    def MODULES(self) -> dict[str, Rule]: ...


@runtime_checkable
class _Prepares(Protocol):
    def prepare(self) -> None: ...


_FAMILIES: tuple[TextFamily, ...] = (
    albert,
    bart,
    bert,
    deberta,
    deberta_v1,
    distilbert,
    eurobert,
    gemma,
    gemma2,
    gemma3,
    glm,
    gte,
    jina,
    jina_code,
    lfm2,
    llama,
    longformer,
    ministral3,
    modernbert,
    mpnet,
    nomic_bert,
    nomic_moe,
    phi3,
    prenorm,
    privacy_filter,
    qwen,
    qwen3_5,
    t5,
    t5_classifier,
    xlmr_flash,
)


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the hardware multiplies it natively, float32 elsewhere."""
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
    return torch.bfloat16 if has_bfloat16() else torch.float32


def model_types() -> tuple[str, ...]:
    """Return every `model_type` that `build_encoder` supports."""
    return tuple(
        dict.fromkeys(model_type for family in _FAMILIES for model_type in family.MODEL_TYPES)
    )


def build_encoder(
    config: Mapping[str, object],
    tensors: TensorFile,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head_tables: Mapping[str, HeadRule],
    int8: bool = False,
) -> tuple[PackedEncoder, dict[str, Tensor]]:
    """Return the encoder in `dtype`, ready to run, and the head's tensors in float32 under the
    names of `head_tables`.

    Raises ModelBroken naming the key of config.json, or the file and tensor, that cannot be served.

    Args:
        int8: Linear layers keep the stored weights, and compute with them in float32 until they are
            quantised (`libs/models/runtime/precision/int8.py`).
    """
    encoder, family = empty_encoder(Config(config))
    state = weights.load(
        encoder,
        tensors,
        table=family.WEIGHTS,
        prefixes=family.PREFIXES,
        head_table=head_tables,
        dtype=dtype,
        device=device,
        as_stored=int8,
    )
    prepare(encoder, linears=not int8)
    return encoder.requires_grad_(False).eval(), state


def layer_names(config: Mapping[str, object]) -> tuple[Mapping[str, Rule], tuple[str, ...]]:
    """Return the names by which adapters refer to layers, in the family of a config.json, and their
    possible prefixes.
    """
    family = _find_family(Config(config))
    return {**family.WEIGHTS, **family.MODULES} if isinstance(
        family, _Renames
    ) else family.WEIGHTS, family.PREFIXES


def empty_encoder(config: Config) -> tuple[PackedEncoder, TextFamily]:
    """Return the encoder that config.json describes, on the meta device, and its family."""
    family = _find_family(config)
    encoder = on_meta(lambda: family.build(config), "encoder")
    if encoder.max_positions < 1:
        raise ModelBroken("config.json: max_position_embeddings leaves no position for a token")
    return encoder, family


def _find_family(config: Config) -> TextFamily:
    named = [family for family in _FAMILIES if config.text("model_type") in family.MODEL_TYPES]
    own: list[TextFamily] = [
        family for family in named if isinstance(family, _Claims) and family.claims(config)
    ]
    own += [family for family in named if not isinstance(family, _Claims)]
    if own:
        return own[0]
    code = (
        " The checkpoint's code, named by auto_map, is never run." if config.has("auto_map") else ""
    )
    raise config.unsupported("model_type", f"supported are {', '.join(model_types())}.{code}")


def prepare(encoder: PackedEncoder, *, linears: bool = True) -> None:
    """Let every module prepare its final weights for the device they are on.

    Without `linears`, linear layers are not prepared."""
    for module in encoder.modules():
        if not linears and isinstance(module, PackedLinear):
            continue
        if isinstance(module, _Prepares):
            module.prepare()

"""From `model_type` to a family, and from a checkpoint to an encoder on its device.

Called once when a worker loads a model. Adding an architecture: one file in `families`, one line here, one row in the parity table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.worker.models import weights
from services.worker.models.encoder import TextEncoder
from services.worker.models.families import bert, distilbert, mpnet, prenorm
from services.worker.models.spec import Config
from services.worker.models.weights import HeadRule, Rule, TensorFile


class Family(Protocol):
    """What a file in `families` holds."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...

    @property
    def PREFIXES(self) -> tuple[str, ...]: ...

    @property
    def WEIGHTS(self) -> Mapping[str, Rule]: ...

    def build(self, config: Config) -> TextEncoder: ...


@runtime_checkable
class _Prepares(Protocol):
    def prepare(self) -> None: ...


_FAMILIES: tuple[Family, ...] = (bert, distilbert, mpnet, prenorm)
_BY_TYPE = {model_type: family for family in _FAMILIES for model_type in family.MODEL_TYPES}


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, float32 elsewhere."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def model_types() -> tuple[str, ...]:
    """Every `model_type` that `build_encoder` takes."""
    return tuple(_BY_TYPE)


def build_encoder(
    config: Mapping[str, object],
    tensors: TensorFile,
    *,
    dtype: torch.dtype,
    device: torch.device,
    head_tables: Mapping[str, HeadRule],
) -> tuple[TextEncoder, dict[str, Tensor]]:
    """The encoder in `dtype`, ready to run, and the head's tensors in float32 under the names of `head_tables`.

    Raises ModelBroken naming the key of config.json, or the file and tensor, that cannot be served.
    """
    encoder, family = empty_encoder(Config(config))
    state = weights.load(
        encoder, tensors, table=family.WEIGHTS, prefixes=family.PREFIXES, head_table=head_tables, dtype=dtype, device=device
    )
    prepare(encoder)
    return encoder.requires_grad_(False).eval(), state


def empty_encoder(config: Config) -> tuple[TextEncoder, Family]:
    """The encoder that config.json describes, on the meta device, and its family."""
    family = _BY_TYPE.get(config.text("model_type"))
    if family is None:
        raise config.unsupported("model_type", f"supported are {', '.join(_BY_TYPE)}")
    with torch.device("meta"):
        return family.build(config), family


def prepare(encoder: TextEncoder) -> None:
    """Let every part lay out its weights, which are final now, for the device they are on."""
    for module in encoder.modules():
        if isinstance(module, _Prepares):
            module.prepare()

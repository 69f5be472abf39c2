"""Build the parts of a detector from its directory: encoders defined by data, other modules, and
image processing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from libs.catalog.checkpoint.files import need_config, read_config
from libs.errors import ModelBroken
from libs.models import weights
from libs.models.layers.embeddings import InputLayer
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.meta import on_meta
from libs.models.layers.spec import EncoderSpec
from libs.models.text.registry import prepare
from libs.models.text.tokenising.tokenizer import FILE, largest_id, load_tokenizer
from libs.models.weights import HeadRule, Rule, TensorFile

PROCESSOR_FILE: Final = "preprocessor_config.json"
_WHOLE_PROCESSOR_FILE: Final = "processor_config.json"  # of transformers 5, in `image_processor`


def processor_values(directory: Path) -> tuple[Mapping[str, object], str]:
    """Return a checkpoint's image processing, and the file that has it. Raises ModelBroken if none
    has.
    """
    whole = read_config(directory, _WHOLE_PROCESSOR_FILE)
    part = None if whole is None else whole.values.get("image_processor")
    if isinstance(part, Mapping):
        return part, _WHOLE_PROCESSOR_FILE
    return need_config(directory, PROCESSOR_FILE).values, PROCESSOR_FILE


def tokenizer_for(directory: Path, vocabulary: int) -> Tokenizer:
    """Load the tokenizer of labels. Raises ModelBroken for ids outside the encoder's `vocabulary`
    vectors.
    """
    tokenizer = load_tokenizer(directory, lowercase=False)
    if largest_id(tokenizer) >= vocabulary:
        raise ModelBroken(f"{FILE}: the encoder has no vector for the id {largest_id(tokenizer)}")
    return tokenizer


def load_encoder(
    spec: EncoderSpec,
    embed: Callable[[], InputLayer],
    table: Mapping[str, Rule],
    tensors: TensorFile,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedEncoder:
    """Load an encoder defined by data, ready to run. Raises ModelBroken for tensors that are
    missing, unknown or misshapen.
    """
    encoder = on_meta(lambda: PackedEncoder(spec, embed()))
    weights.load(
        encoder, tensors, table=table, prefixes=("",), head_table={}, dtype=dtype, device=device
    )
    prepare(encoder)
    return encoder.requires_grad_(False).eval()


def load_state(
    tensors: TensorFile, table: Mapping[str, HeadRule], device: torch.device
) -> dict[str, Tensor]:
    """Return the float32 tensors outside the encoders by the names of the table. Raises as
    `load_encoder`.
    """
    left = {name: name for name in tensors.names()}
    state = weights.head_state(tensors, left, table, device)
    for name in left:
        raise ModelBroken(
            f"{tensors.tensor_file(name)}: tensor {name!r} is unknown to this family of models"
        )
    return state


def fill(
    module: nn.Module,
    tensors: TensorFile,
    dtype: torch.dtype,
    device: torch.device,
    rename: Callable[[str], str | None] = str,
) -> None:
    """Assign parameters to a module on the meta device. Raises as `load_encoder`.

    `rename`: maps a tensor's name in the file to the parameter's; None for a tensor that is not
    used.
    """
    found = {rename(name): name for name in tensors.names()}
    found.pop(None, None)
    state: dict[str, Tensor] = {}
    for name, parameter in module.state_dict().items():
        stored = found.pop(name, None)
        if stored is None:
            raise ModelBroken(f"{tensors.source}: the tensor of {name!r} is missing")
        if tensors.shape(stored) != tuple(parameter.shape):
            have, wanted = list(tensors.shape(stored)), list(parameter.shape)
            raise ModelBroken(
                f"{tensors.tensor_file(stored)}: tensor {stored!r} has shape {have}; config.json "
                f"asks for {wanted}"
            )
        state[name] = tensors.read(stored).to(device=device, dtype=dtype)
    for stored in found.values():
        raise ModelBroken(
            f"{tensors.tensor_file(stored)}: tensor {stored!r} is unknown to this family of models"
        )
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()

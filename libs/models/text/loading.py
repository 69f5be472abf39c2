"""Loads a checkpoint directory of texts: the card says which family's encoder it is and which kind of heads follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import need_config
from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.errors import InvalidInput, ModelBroken
from libs.models.lora import Names
from libs.models.packed_model import PackedModel
from libs.models.processor import Processor
from libs.models.results import Result
from libs.models.text.kinds import kind_of
from libs.models.text.kinds.kind import Parts
from libs.models.text.registry import build_encoder, names_of
from libs.models.text.tokenising.tokenizer import failing
from libs.models.tiers import copying
from libs.models.trunk import Trunk
from libs.models.weights import TensorFile
from libs.models.work import GoOn, Output, Prepared, Work

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    directory: Path, model_id: str, device: torch.device, dtype: torch.dtype, overrides: Overrides | None = None
) -> PackedModel:
    """Loads a checkpoint directory; the encoder computes in `dtype` unless the card has one, the heads in float32.

    `overrides`: the catalog's for the model. Raises ModelBroken with the file and the key or tensor at fault.
    """
    with failing(_broken_tokenizer):
        return _load(directory, model_id, device, dtype, overrides)


def _load(directory: Path, model_id: str, device: torch.device, dtype: torch.dtype, overrides: Overrides | None) -> PackedModel:
    card = read_card(directory, model_id, overrides)
    dtype = _DTYPES.get(card.dtype, dtype)
    kind = kind_of(card)
    own, rest = TensorFile.open(directory, card.encoder_folder).split(card.encoder_prefix)
    config = encoder_config(directory, card)
    with copying(device):
        encoder, state = build_encoder(config, own, dtype=dtype, device=device, head_tables=kind.head_table(card))
        card = replace(card, max_tokens=min(card.max_tokens, encoder.max_positions))
        table, prefixes = names_of(config)
        names = Names(table, (*prefixes, *(card.encoder_prefix + prefix for prefix in prefixes)), kind.head_table(card))
        built = kind.build(Parts(card, directory, encoder, state, rest, device))
        model = PackedModel(card, (Trunk(encoder, built.heads), *built.trunks), _Tokenising(built.processor), names, device)
        if device.type != "cpu":
            model.gather()
    if dtype is not torch.float32:
        wide = None if overrides is None else replace(overrides, dtype="float32")
        model.widen = partial(load_model, directory, model_id, torch.device("cpu"), torch.float32, wide)
    return model


def encoder_config(directory: Path, card: Card) -> Mapping[str, object]:
    """The encoder's own configuration: a file, or an object within it."""
    config = need_config(directory, str(Path(card.encoder_folder) / card.encoder_file))
    for key in card.encoder_keys:
        config = config.part(key)
    return config.values


class _Tokenising:
    """A processor whose tokenizer may fail for a text: InvalidInput in place of what the `tokenizers` library raises."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def prepare(self, work: Work, go_on: GoOn) -> Prepared:
        with failing(_cannot_tokenise):
            return self._processor.prepare(work, go_on)

    def finish(self, prepared: Prepared, outputs: Sequence[Output]) -> Result:
        return self._processor.finish(prepared, outputs)


def _broken_tokenizer(problem: str) -> ModelBroken:
    return ModelBroken(f"tokenizer.json: cannot be used: {problem}")


def _cannot_tokenise(problem: str) -> InvalidInput:
    return InvalidInput(f"the model's tokenizer fails for such a text: {problem}")

"""Load a checkpoint directory of a text model: the card names the encoder's family, and the kind
builds what follows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import CheckpointConfig, need_config
from libs.catalog.checkpoint.tasks import OwnAdapters, read_own_adapters
from libs.errors import InvalidInput, ModelBroken
from libs.kernels.linear import int8 as kernels
from libs.models.interface.processor import Processor, finish_rows, prepare_parts
from libs.models.interface.results import EncodeResult, Result
from libs.models.interface.sequences import Output, Prepared
from libs.models.interface.source import LoadArguments
from libs.models.interface.work import CancelCheck, EncodeWork, ModelWork
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.loaded.peft import TensorNames
from libs.models.runtime.loaded.tasks import without_parametrizations
from libs.models.runtime.loaded.tiers import copying
from libs.models.runtime.packed_model import PackedModel
from libs.models.runtime.precision import int8
from libs.models.text.checks import refuse_parts
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.registry import build_encoder, default_dtype, layer_names
from libs.models.text.tokenising.tokenizer import failing
from libs.models.text.tokens import TokenProcessor
from libs.models.text.windows.processor import WindowedProcessor
from libs.models.weights import HeadRule, TensorFile

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def text_loader(
    build: Callable[[EncoderParts], Built],
    head_table: Callable[[Card], Mapping[str, HeadRule]] = lambda card: {},
) -> Callable[[LoadArguments], PackedModel]:
    """Return the function that loads models of a kind that is an encoder of texts and what follows
    it.

    Args:
        build: Builds heads and processor. Raises ModelBroken for tensors that are missing or have
            another shape.
        head_table: Returns the stems of the head's tensors among the encoder's, by the card.
    """

    def load(source: LoadArguments) -> PackedModel:
        with failing(broken_tokenizer):
            model, is_float32 = _load(source, build, head_table)
        if not is_float32:
            model.fp32_loader = partial(load, source.in_float32())
        return model

    return load


def _load(
    source: LoadArguments,
    build: Callable[[EncoderParts], Built],
    head_table: Callable[[Card], Mapping[str, HeadRule]],
) -> tuple[PackedModel, bool]:
    """Return the model, and whether all its weights are float32."""
    directory, device = source.directory, source.device
    card, dtype, quantised = _number_format(source.card(), device, source.dtype)
    own, factors, rest = _tensors(directory, card)
    config = encoder_config(directory, card)
    adapters = (
        read_own_adapters(CheckpointConfig("config.json", config))
        if card.own_adapters
        else OwnAdapters()
    )
    with copying(device):
        tables = head_table(card)
        encoder, state = build_encoder(
            config, own, dtype=dtype, device=device, head_tables=tables, int8=quantised
        )
        card = replace(card, max_tokens=min(card.max_tokens, encoder.max_positions))
        table, prefixes = layer_names(config)
        names = TensorNames(
            table, (*prefixes, *(card.encoder_prefix + prefix for prefix in prefixes)), tables
        )
        built = build(EncoderParts(card, directory, encoder, state, rest, device, quantised))
        backbones, processor = (
            (Backbone(encoder, built.heads), *built.backbones),
            TokenizerGuard(
                TextOnlyProcessor(WindowedProcessor(card, built.processor, built.tokenizer))
            ),
        )
        model = PackedModel(
            card, backbones, processor, names, device, lambda: _tensors(directory, card)[0]
        )
        model.tokens = TokenProcessor(card, built.tokenizer)
        model.add_own_adapters(adapters, directory, factors)
        if device.type != "cpu":
            model.gather()
    if quantised:
        int8.quantise(model)
    return model, not quantised and dtype is torch.float32


def _tensors(directory: Path, card: Card) -> tuple[TensorFile, TensorFile, TensorFile]:
    """Return the encoder's tensors, its adapters' factors among them, and all other tensors."""
    encoder, rest = TensorFile.open(directory, card.encoder_folder).split(card.encoder_prefix)
    return *without_parametrizations(encoder), rest


def _number_format(
    card: Card, device: torch.device, dtype: torch.dtype
) -> tuple[Card, torch.dtype, bool]:
    """Return the card as loaded, the type of unquantised weights, and whether weights are quantised
    to int8.
    """
    own = default_dtype(device) if dtype is torch.int8 else dtype
    if card.dtype not in ("int8", "auto") or (card.dtype == "auto" and dtype is not torch.int8):
        return card, DTYPES.get(card.dtype, own), False
    own = default_dtype(device) if own is torch.float16 else own
    missing = kernels.missing() if device.type == "cpu" else "int8 is for CPUs"
    if not missing:
        return card, own, True
    log.warning(
        "%s was requested in int8 and is loaded in %s instead: %s",
        card.model,
        str(own).removeprefix("torch."),
        missing,
    )
    return replace(card, dtype="auto"), own, False


def without_int8(card: Card, device: torch.device, dtype: torch.dtype) -> tuple[Card, torch.dtype]:
    """Return the card and the type of the model, both without int8, which only text models support.
    A requested int8 logs a warning."""
    own = default_dtype(device) if dtype is torch.int8 else dtype
    if card.dtype == "int8" or (card.dtype == "auto" and dtype is torch.int8):
        log.warning(
            "%s was requested in int8, which only text encoders support; it is loaded in %s",
            card.model,
            str(own).rpartition(".")[2],
        )
        return replace(card, dtype="auto"), own
    return card, DTYPES.get(card.dtype, own)


def encoder_config(directory: Path, card: Card) -> Mapping[str, object]:
    """Return the encoder's configuration: a file, or an object within a file."""
    config = need_config(directory, str(Path(card.encoder_folder) / card.encoder_file))
    for key in card.encoder_keys:
        config = config.part(key)
    return config.values


class _Guard:
    """A processor that checks what another prepares."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        return finish_rows(self._processor, prepared, outputs, first, most_bytes)

    def finish(
        self, prepared: Prepared, outputs: Sequence[Output], check_cancelled: CancelCheck
    ) -> Result:
        return self._processor.finish(prepared, outputs, check_cancelled)


class TextOnlyProcessor(_Guard):
    """A processor of a text model. It refuses images and items of several parts."""

    def prepare(self, work: ModelWork, check_cancelled: CancelCheck) -> Prepared:
        refuse_parts(work)
        return self._processor.prepare(work, check_cancelled)

    def prepare_parts(self, work: EncodeWork, check_cancelled: CancelCheck) -> Iterator[Prepared]:
        refuse_parts(work)
        yield from prepare_parts(self._processor, work, check_cancelled)


class TokenizerGuard(_Guard):
    """A processor that raises InvalidInput where the `tokenizers` library fails for a text."""

    def prepare(self, work: ModelWork, check_cancelled: CancelCheck) -> Prepared:
        with failing(_cannot_tokenise):
            return self._processor.prepare(work, check_cancelled)

    def prepare_parts(self, work: EncodeWork, check_cancelled: CancelCheck) -> Iterator[Prepared]:
        with failing(_cannot_tokenise):
            yield from prepare_parts(self._processor, work, check_cancelled)


def broken_tokenizer(problem: str) -> ModelBroken:
    return ModelBroken(f"tokenizer.json: cannot be loaded: {problem}")


def _cannot_tokenise(problem: str) -> InvalidInput:
    return InvalidInput(f"the model's tokenizer fails for this text: {problem}")

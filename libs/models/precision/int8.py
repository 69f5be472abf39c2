"""Quantises a loaded model to int8, on a CPU, and refuses one whose answers suffer.

Linear layers of encoders and their tables of tokens are quantised; norms, attention, position
tables, routers of experts, heads and adapters stay in the model's own type, and so does a table of
tokens that a head shares (SPLADE's decoder).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch

from libs.errors import ModelBroken
from libs.kernels.linear.packed import PackedLinear
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.loaded.tiers import tensors_of
from libs.models.packed_model import PackedModel
from libs.models.precision.agreement import MAX_DIFFERENCE, MIN_COSINE, Agreement, agreement
from libs.models.precision.samples import TEXTS, works
from libs.models.work import Output, Prepared

DATA_TYPE: Final = "int8"


@runtime_checkable
class _Remembers(Protocol):
    """A module that keeps results of its encoder."""

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Answered:
    """A job and what the model gave for its sequences. `task`: "encode", "score" and so on."""

    task: str
    prepared: Prepared
    outputs: list[Output]


def answered(model: PackedModel, prepared: Prepared) -> Answered:
    task = type(prepared.work).__name__.removesuffix("Work").lower()
    return Answered(task, prepared, model.forward_all(prepared))


def compared(model: PackedModel, wanted: list[Answered]) -> Iterator[tuple[str, Agreement]]:
    """The tasks of these jobs, and how the model's answers agree with them."""
    for one in wanted:
        outputs = model.forward_all(one.prepared)
        yield one.task, agreement(model, one.prepared, outputs, one.outputs)


@torch.inference_mode()
def quantise(model: PackedModel) -> None:
    """To be called once, with linear layers that have their weights as stored (`build_encoder(...,
    int8=True)`).

    Raises ModelBroken if answers to the built-in texts are too far from those of the model as it
    was (`agreement.py`).
    """
    # A text twice adds nothing here.
    texts = list(dict.fromkeys(TEXTS))
    # Tasks of one head have outputs of the same sort, so one of them will do.
    jobs: dict[str, Prepared] = {}
    for work in works(model.card, texts):
        prepared = model.prepare(work)
        jobs.setdefault(prepared.head.split("+")[0], prepared)
    wanted = [answered(model, prepared) for prepared in jobs.values()]
    _quantise(model)
    for task, found in compared(model, wanted):
        if not found.is_good:
            raise refused(model.card.model, task, found)


def refused(model: str, task: str, found: Agreement) -> ModelBroken:
    bound = f"a cosine of at least {MIN_COSINE:g}, or probabilities within {MAX_DIFFERENCE:g}, are needed"
    advice = "say `dtype: bfloat16` or `float32` in its card (`shoal models check` measures it)"
    return ModelBroken(
        f"{model} loses too much in int8: {task}: {found.figure}; {bound}. Instead {advice}"
    )


def _quantise(model: PackedModel) -> None:
    encoders = {backbone.encoder for backbone in model.backbones}
    shared = [
        id(tensor)
        for backbone in model.backbones
        for tensor in tensors_of(*backbone.heads.values())
    ]
    for root in model.modules():
        for module in root.modules():
            if isinstance(module, PackedEncoder) and isinstance(module.embed, TokenEmbedding):
                table = module.embed.token
                # A further encoder, of labels, is part of a head itself.
                if module not in encoders or id(table.weight) not in shared:
                    table.quantise()
            elif isinstance(module, PackedLinear):
                module.prepare() if module.exact else module.quantise()
            if isinstance(module, _Remembers):
                module.forget()
    model.data_type = DATA_TYPE
    model.count()

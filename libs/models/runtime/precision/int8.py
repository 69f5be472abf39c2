"""Quantise a loaded model to int8 on a CPU, and refuse it if its outputs degrade.

Linear layers of encoders and their token tables are quantised. Norms, attention, position tables,
routers of experts, heads and adapters keep the model's type, and so does a token table that a head
shares (SPLADE's decoder).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch

from libs.errors import ModelBroken
from libs.kernels.linear.packed import PackedLinear
from libs.models.interface.sequences import Output, Prepared
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.runtime.loaded.tiers import find_tensors
from libs.models.runtime.packed_model import PackedModel
from libs.models.runtime.precision.agreement import MAX_DIFFERENCE, MIN_COSINE, Agreement, agreement
from libs.models.runtime.precision.samples import TEXTS, works

DATA_TYPE: Final = "int8"


@runtime_checkable
class _Remembers(Protocol):
    """A module that caches results of its encoder."""

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class JobOutputs:
    """A job and the model's outputs for its sequences.

    Attributes:
        task: "encode", "score" and so on.
    """

    task: str
    prepared: Prepared
    outputs: list[Output]


def answered(model: PackedModel, prepared: Prepared) -> JobOutputs:
    task = type(prepared.work).__name__.removesuffix("Work").lower()
    return JobOutputs(task, prepared, model.forward_all(prepared))


def compared(model: PackedModel, wanted: list[JobOutputs]) -> Iterator[tuple[str, Agreement]]:
    """Yield the task of each job, and the agreement of the model's outputs."""
    for one in wanted:
        outputs = model.forward_all(one.prepared)
        yield one.task, agreement(model, one.prepared, outputs, one.outputs)


@torch.inference_mode()
def quantise(model: PackedModel) -> None:
    """Quantise a model with stored weights in its linear layers (`build_encoder(...,
    int8=True)`). Call it one time.

    Raises ModelBroken if the outputs for the built-in texts are too far from those of the original
    model (`agreement.py`).
    """
    # A duplicate text adds nothing here.
    texts = list(dict.fromkeys(TEXTS))
    # Tasks of one head have outputs of the same kind, so one of them suffices.
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
    bound = (
        f"a cosine of at least {MIN_COSINE:g}, or probabilities within "
        f"{MAX_DIFFERENCE:g}, are needed"
    )
    advice = "set `dtype: bfloat16` or `float32` in its card (`shoal models check` measures it)"
    return ModelBroken(
        f"{model} loses too much in int8: {task}: {found.figure}; {bound}. Instead, {advice}"
    )


def _quantise(model: PackedModel) -> None:
    encoders = {backbone.encoder for backbone in model.backbones}
    shared = [
        id(tensor)
        for backbone in model.backbones
        for tensor in find_tensors(*backbone.heads.values())
    ]
    for root in model.modules():
        for module in root.modules():
            if isinstance(module, PackedEncoder) and isinstance(module.embed, TokenEmbedding):
                table = module.embed.token
                # A second encoder, for labels, is part of a head.
                if module not in encoders or id(table.weight) not in shared:
                    table.quantise()
            elif isinstance(module, PackedLinear):
                module.prepare() if module.exact else module.quantise()
            if isinstance(module, _Remembers):
                module.forget()
    model.data_type = DATA_TYPE
    model.count()

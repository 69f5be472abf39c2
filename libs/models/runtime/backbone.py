"""An encoder and the heads after it. A text model has one backbone; a model that reads texts and
images (CLIP) has one for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.errors import InvalidInput
from libs.models.interface.head import ModelHead
from libs.models.interface.packed import Packed
from libs.models.interface.sequences import InputSequence, YieldPoint, never_yield
from libs.models.layers.encoder import PackedEncoder


class Tower(Protocol):
    """Computes rows of an encoder's input from other data than text: an image encoder and its
    connector. An nn.Module.
    """

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        """Compute the rows of all inputs in turn: [rows, InputLayer.row_size].

        Rows may be a multiple of that width; their further parts are added after the encoder's
        first layers (`GivenRows.deeper`).

        `inputs`: `InputRows.inputs` of a batch's sequences.
        """


@runtime_checkable
class SampledTower(Tower, Protocol):
    """A tower with measurable memory."""

    def sample(self) -> InputSequence:
        """Return a sequence of one small input."""


@runtime_checkable
class PreemptedTower(SampledTower, Protocol):
    """A tower that may be preempted between two of its layers."""

    def forward_preemptible(
        self, inputs: Sequence[NDArray[np.generic]], yield_point: YieldPoint
    ) -> Tensor:
        """Compute `forward`, and call `yield_point` between two layers."""


@runtime_checkable
class LayeredTower(PreemptedTower, Protocol):
    """A tower that splits a batch into several forwards.

    Attributes:
        chunk_tokens: Most tower tokens of one forward, unless one input has more.
    """

    chunk_tokens: int

    def count_tokens(self, image: NDArray[np.generic]) -> int:
        """Return the number of tower tokens of an input."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """An encoder, its heads and its tower.

    Attributes:
        heads: By names as in `Prepared.head`, unique within the model.
        tower: Computes the rows of `InputSequence.rows`; None if these are the rows themselves.
    """

    encoder: PackedEncoder
    heads: Mapping[str, ModelHead]
    tower: Tower | None = None

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules that hold weights."""
        for module in (self.encoder, self.tower, *self.heads.values()):
            if isinstance(module, nn.Module):
                yield module

    def refuse_outside(self, sequences: Sequence[InputSequence]) -> None:
        """Raise InvalidInput for ids without an embedding, since the failed lookup would crash a
        CUDA process.
        """
        if not sequences:
            return
        if self.encoder.recurrent and any(
            item.seen or item.before is not None for item in sequences
        ):
            raise InvalidInput("the model is recurrent, so tokens cannot be hidden from each other")
        if self.encoder.convolves and any(item.before is not None for item in sequences):
            raise InvalidInput("the model has convolutions, so sequences cannot share a prefix")
        embed = self.encoder.embed
        rest = [item.before for item in sequences if item.before is not None]
        if embed.vocabulary:
            _refuse_ids([*(item.ids for item in sequences), *rest], embed.vocabulary, "token")
        _refuse_ids(
            [item.type_ids for item in sequences if item.type_ids is not None],
            max(1, embed.segments),
            "segment",
        )
        longest = max(
            item.tokens + (0 if item.before is None else len(item.before)) for item in sequences
        )
        if longest > self.encoder.max_positions:
            limit = self.encoder.max_positions
            raise InvalidInput(
                f"the model's tokenizer produces {longest} tokens; its encoder takes at most "
                f"{limit}"
            )

    def pack(
        self,
        sequences: Sequence[InputSequence],
        before: Sequence[int | None],
        yield_point: YieldPoint = never_yield,
    ) -> Packed:
        """Pack sequences into a batch on the encoder's device.

        Args:
            before: As for `Packed.from_sequences`.
            yield_point: Called by a tower with layers.
        """
        rows = [item.rows for item in sequences if item.rows is not None]
        values = (
            self._values([values for row in rows for values in row.inputs], yield_point)
            if rows
            else None
        )
        # A tower may also compute rows for the first layers.
        first, *deeper = (
            (None,) if values is None else torch.split(values, self.encoder.embed.row_size, dim=1)
        )
        return Packed.from_sequences(
            [item.ids for item in sequences],
            [item.type_ids for item in sequences],
            self.encoder.device,
            seen=[item.seen for item in sequences],
            before=before,
            places=[None if item.rows is None else item.rows.places for item in sequences],
            values=first,
            deeper=deeper,
            axes=[item.axes for item in sequences],
        )

    def _values(self, inputs: Sequence[NDArray[np.generic]], yield_point: YieldPoint) -> Tensor:
        if isinstance(self.tower, PreemptedTower):
            return self.tower.forward_preemptible(inputs, yield_point)
        if self.tower is not None:
            return self.tower.forward(inputs)
        rows = torch.from_numpy(np.concatenate(inputs))
        return (
            rows.pin_memory().to(self.encoder.device, non_blocking=True)
            if self.encoder.device.type == "cuda"
            else rows
        )


def _refuse_ids(found: Sequence[NDArray[np.int32]], vocabulary: int, kind: str) -> None:
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise InvalidInput(
            f"the model's tokenizer produces {kind} {wrong}, but its encoder has {vocabulary} "
            f"{kind}s"
        )

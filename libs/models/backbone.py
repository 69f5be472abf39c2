"""An encoder and the heads after it. A text model has one backbone; a model of texts and images (CLIP)
one for each.
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
from libs.models.head import ModelHead
from libs.models.layers.encoder import PackedEncoder
from libs.models.packed import Packed
from libs.models.work import InputSequence, YieldPoint, never_yield


class Tower(Protocol):
    """Makes rows of an encoder's input of something that is no text: an image encoder and its
    connector. An nn.Module.
    """

    def forward(self, inputs: Sequence[NDArray[np.generic]]) -> Tensor:
        """`inputs`: `InputRows.inputs` of a batch's sequences. Returns the rows of all, in turn:
        [rows, InputLayer.row_size].

        Or rows so many times as wide, whose further parts are added after the encoder's first
        layers (`GivenRows.deeper`).
        """


@runtime_checkable
class SampledTower(Tower, Protocol):
    """A tower whose memory can be measured."""

    def sample(self) -> InputSequence:
        """A sequence of one small input."""


@runtime_checkable
class PreemptedTower(SampledTower, Protocol):
    """A tower with layers of its own, between which it may be preempted."""

    def forward_preemptible(
        self, inputs: Sequence[NDArray[np.generic]], yield_point: YieldPoint
    ) -> Tensor:
        """As `forward`; `yield_point`, a preemption point, is called between two layers."""


@runtime_checkable
class LayeredTower(PreemptedTower, Protocol):
    """`at_once`: its tokens of one forward, if an input has no more."""

    at_once: int

    def tokens_of(self, picture: NDArray[np.generic]) -> int:
        """How many tokens of its own an input is."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """`heads`: by the names that `Prepared.head` may have, which no other backbone of the model has.

    `tower`: makes the rows of `InputSequence.rows`; None: these are the rows themselves.
    """

    encoder: PackedEncoder
    heads: Mapping[str, ModelHead]
    tower: Tower | None = None

    def modules(self) -> Iterator[nn.Module]:
        """The modules that hold its weights."""
        for module in (self.encoder, self.tower, *self.heads.values()):
            if isinstance(module, nn.Module):
                yield module

    def refuse_outside(self, sequences: Sequence[InputSequence]) -> None:
        """Raises InvalidInput for ids that the encoder has no embedding for, as the failed lookup
        would crash a CUDA process.
        """
        if not sequences:
            return
        if self.encoder.recurrent and any(
            item.seen or item.before is not None for item in sequences
        ):
            raise InvalidInput(
                "the model carries a state from token to token, so that no token can be hidden from the others"
            )
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
                f"the model's tokenizer makes a sequence of {longest} tokens; its encoder takes {limit}"
            )

    def pack(
        self,
        sequences: Sequence[InputSequence],
        before: Sequence[int | None],
        yield_point: YieldPoint = never_yield,
    ) -> Packed:
        """The batch of these sequences on the encoder's device. `before`: as in `Packed.from_sequences`.
        `yield_point`: called by a tower with layers."""
        rows = [item.rows for item in sequences if item.rows is not None]
        values = (
            self._values([one for each in rows for one in each.inputs], yield_point)
            if rows
            else None
        )
        # A tower may make rows for the first layers as well, beside those of the input.
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


def _refuse_ids(found: Sequence[NDArray[np.int32]], most: int, what: str) -> None:
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < most:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise InvalidInput(
            f"the model's tokenizer makes the {what} {wrong} of a text, but its encoder has {most} {what}s"
        )

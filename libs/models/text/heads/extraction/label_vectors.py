"""Label embeddings of a GLiNER bi-encoder, in an LRU cache across forwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from libs.kernels.pooling.pooled import mean
from libs.models.interface.packed import Packed
from libs.models.layers.encoder import PackedEncoder
from libs.models.text.heads.extraction.words import Ids, Label
from libs.models.text.heads.linear import HeadLinear

_KEPT: Final = 4096  # labels in the cache
_TOKENS: Final = 8192  # of one batch of the encoder for labels


class LabelVectors(nn.Module):
    """The mean state of a label's tokens, projected to the head's size. Only the device thread uses
    it."""

    def __init__(self, encoder: PackedEncoder, project: HeadLinear | None) -> None:
        super().__init__()
        self.encoder, self.project = encoder, project
        self._known: OrderedDict[str, Tensor] = OrderedDict()

    def forward(self, labels: Sequence[Label]) -> Tensor:
        """Return the vectors of labels, [labels, hidden] float32."""
        return torch.stack(self.each(labels))

    def each(self, labels: Sequence[Label]) -> list[Tensor]:
        """Return the cached value of each label: its vector [hidden] or, in a subclass, the result
        of its `_encode`.
        """
        wanted = {label.name: label for label in labels}
        found = {name: self._known[name] for name in wanted if name in self._known}
        missing = sorted(
            (label for name, label in wanted.items() if name not in found),
            key=lambda label: len(label.ids),
        )
        for some in _chunks(missing):
            encoded = self._encode([label.ids for label in some])
            found |= {label.name: one for label, one in zip(some, encoded, strict=True)}
        self._keep(found)
        return [found[label.name] for label in labels]

    def forget(self) -> None:
        """Empty the cache, because the encoder's weights have changed."""
        self._known.clear()

    def _encode(self, ids: Sequence[Ids]) -> Sequence[Tensor]:
        batch = Packed.from_sequences(ids, device=self.encoder.device)
        vectors = mean(self.encoder.forward(batch), batch.cu_seqlens)
        return (vectors if self.project is None else self.project.forward(vectors)).unbind()

    def _keep(self, used: dict[str, Tensor]) -> None:
        """Put vectors into the cache, and evict the least recently used ones."""
        for name, vector in used.items():
            self._known[name] = vector
            self._known.move_to_end(name)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)


def _chunks(labels: Sequence[Label]) -> Iterator[list[Label]]:
    chunk: list[Label] = []
    tokens = 0
    for label in labels:
        if chunk and tokens + len(label.ids) > _TOKENS:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(label)
        tokens += len(label.ids)
    if chunk:
        yield chunk

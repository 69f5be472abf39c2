"""Logits of entities, and the states with which the host finds relations between them (GLiNER)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import cast

import numpy as np
from torch import Tensor, nn

from libs.kinds.gliner.word_labels import WordScorer
from libs.models.interface.head import Array
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.text.heads.extraction.label_vectors import LabelVectors
from libs.models.text.heads.extraction.spans import SpanScorer, TwoLayers
from libs.models.text.heads.extraction.words import WordPlaces, WordReader, prefix_sums


class EntityHead(nn.Module):
    """Map hidden states to logits of the scorer's shape for each sequence.

    Args:
        prompt: The two layers for labels.
        vectors: A bi-encoder's encoder for labels.
        relations: Also return the states of words and relations, because the entities are known
            only after the forward.
    """

    def __init__(
        self,
        reader: WordReader,
        scorer: SpanScorer | WordScorer,
        *,
        prompt: TwoLayers | None,
        vectors: LabelVectors | None,
        relations: bool,
    ) -> None:
        super().__init__()
        self.reader, self.scorer, self.prompt, self.vectors = reader, scorer, prompt, vectors
        self._relations = relations

    @property
    def rows(self) -> Rows | None:
        return None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        places = _places(sequences)
        states = self.reader.forward(hidden, batch, places)
        labels = states.labels
        if self.vectors is not None:
            labels = self.vectors.forward([label for place in places for label in place.own_labels])
        if self.prompt is not None:
            labels = self.prompt.forward(labels)
        logits = self.scorer.forward(replace(states, labels=labels), places)
        return (logits, states.words, states.relations) if self._relations else (logits,)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        places = _places(sequences)
        shapes = [self.scorer.shape(place) for place in places]
        logits = [
            part.reshape(shape)
            for part, shape in zip(
                _parts(arrays[0], [prod(shape) for shape in shapes]), shapes, strict=True
            )
        ]
        if not self._relations:
            return list(logits)
        words = _parts(arrays[1], [place.words for place in places])
        relations = _parts(arrays[2], [len(place.relations) for place in places])
        return list(zip(logits, words, relations, strict=True))


def _places(sequences: Sequence[InputSequence]) -> list[WordPlaces]:
    return [cast("WordPlaces", sequence.input) for sequence in sequences]


def _parts(
    array: Array, counts: Sequence[int]
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return [
        array[start:end].astype(np.float32, copy=False)
        for start, end in pairwise(prefix_sums(counts))
    ]

"""Padded batches of token ids for peers that compute such batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.texts import MAX_TOKENS, Mix, minilm_directory, plain_tokenizer


def padded(sequences: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ids and mask of one batch, [texts, tokens of its longest text]; 0 beyond the end of a
    text.
    """
    longest = max(map(len, sequences))
    ids, mask = (
        np.zeros((len(sequences), longest), np.int64),
        np.zeros((len(sequences), longest), np.int64),
    )
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask


def token_ids(mix: Mix) -> list[list[int]]:
    """Return the token ids of each text, special tokens included."""
    tokenizer = plain_tokenizer(minilm_directory())
    tokenizer.enable_truncation(MAX_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(mix.texts)]


def mean_pooled(hidden: NDArray[np.float32], mask: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the normalised means over the tokens of each text: [texts, dimensions].

    Args:
        hidden: [texts, tokens, dimensions].
        mask: [texts, tokens].
    """
    counted = mask.astype(np.float32)[:, :, None]
    means = (hidden * counted).sum(1) / counted.sum(1)
    vectors: NDArray[np.float32] = means / np.linalg.norm(means, axis=1, keepdims=True)
    return vectors

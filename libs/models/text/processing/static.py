"""Sparse vectors of queries without a forward: a fixed weight for each distinct token
(inference-free SPLADE, arXiv 2411.04403).

It needs no device, and reads sentence-transformers' SparseStaticEmbedding and opensearch's
idf.json. V-SPLADE weights each occurrence of a token, and computes the weights from its embeddings
(`libs/models/images/vlm/families/vsplade.py`).
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from libs.catalog.card import StaticQueries
from libs.catalog.checkpoint.files import need_config, read_config
from libs.errors import ModelBroken
from libs.models.interface.sequences import SparseRow
from libs.models.interface.work import CancelCheck, Truncation, never_cancelled
from libs.models.text.tokenising.text import TextProcessor, Where
from libs.models.text.tokenising.tokenizer import largest_id, load_tokenizer
from libs.models.weights import TensorFile

_TENSOR = "weight"
_MAX_TOKENS = 1 << 24


class StaticLookup:
    """Looks up `weights`, float32, one for each id of `text`'s vocabulary."""

    def __init__(self, text: TextProcessor, weights: NDArray[np.float32]) -> None:
        self._text, self._weights = text, weights

    def rows(
        self,
        texts: list[str],
        prompt: str,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck = never_cancelled,
    ) -> tuple[list[SparseRow], int, tuple[str, ...]]:
        """Return one row per text, the number of tokens of all texts, which have no special tokens,
        and the paths of those that were cut.
        """
        sequences = self._text.encode(
            texts, truncation, where, prompt=prompt, check_cancelled=check_cancelled
        )
        rows = [self._row(sequence.ids) for sequence in sequences]
        cut = tuple(sequence.cut for sequence in sequences if sequence.cut)
        return rows, sum(sequence.tokens for sequence in sequences), cut

    def _row(self, ids: NDArray[np.int32]) -> SparseRow:
        distinct = np.unique(ids)
        weights = self._weights[distinct]
        return SparseRow(distinct[weights != 0], weights[weights != 0])


class TokenWeights:
    """A fixed weight for each token, multiplied by its occurrences: Li-LSR, as in V-SPLADE.

    `weights` is float32, by id; tokens with larger ids have none.
    """

    def __init__(self, weights: NDArray[np.float32]) -> None:
        self._weights = weights

    def row(self, ids: NDArray[np.int32]) -> SparseRow:
        """Return the sparse vector of a text's tokens."""
        distinct, counts = np.unique(ids[ids < len(self._weights)], return_counts=True)
        weights = self._weights[distinct] * counts.astype(np.float32)
        return SparseRow(distinct[weights != 0], weights[weights != 0])


def load_lookup(
    directory: Path, queries: StaticQueries, *, columns: int, limit: int, lowercase: bool
) -> StaticLookup:
    """Load the lookup. Raises ModelBroken for weights that do not fit the tokenizer.

    Args:
        limit: The longest query if the tokenizer has no limit.
    """
    folder = directory / queries.folder
    tokenizer = load_tokenizer(folder, lowercase=lowercase)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B", special_tokens=[]
    )
    weights = _stored(directory, queries, tokenizer)
    tokens = largest_id(tokenizer) + 1
    if not tokens <= weights.shape[0] <= columns:
        raise ModelBroken(
            f"{queries.file}: has {weights.shape[0]} weights; the tokenizer in its directory has "
            f"{tokens} tokens, and `vocab_size` of "
            f"config.json is {columns}"
        )
    settings = read_config(folder, "tokenizer_config.json")
    own = 0 if settings is None else settings.number("model_max_length", most=math.inf)
    return StaticLookup(TextProcessor(tokenizer, limit=own or limit, segments=False), weights)


def _stored(directory: Path, queries: StaticQueries, tokenizer: Tokenizer) -> NDArray[np.float32]:
    if queries.file.endswith(".json"):
        return _from_json(directory, queries, tokenizer)
    tensors = TensorFile.open(directory, str(Path(queries.file).parent))
    if tensors.names() != [_TENSOR] or len(tensors.shape(_TENSOR)) != 1:
        raise ModelBroken(
            f"{queries.file}: must contain one list of numbers, `{_TENSOR}`, but contains "
            f"{', '.join(tensors.names())}"
        )
    return tensors.read(_TENSOR).to(torch.float32).numpy()


def _from_json(
    directory: Path, queries: StaticQueries, tokenizer: Tokenizer
) -> NDArray[np.float32]:
    """Read weights by token. Tokens outside the vocabulary are dropped; tokens without a weight
    have 0."""
    vocabulary = tokenizer.get_vocab()
    if largest_id(tokenizer) >= _MAX_TOKENS:
        raise ModelBroken(
            f"tokenizer.json: the id {largest_id(tokenizer)} must be below {_MAX_TOKENS:,}"
        )
    weights = np.zeros(largest_id(tokenizer) + 1, dtype=np.float32)
    for token, weight in need_config(directory, queries.file).values.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ModelBroken(f"{queries.file}: `{token}` must be a number, not {weight!r}")
        if token in vocabulary:
            weights[vocabulary[token]] = weight
    return weights

"""Embedders of Haystack over a Shoal mesh: dense, sparse and multi-vector, each for documents and
for the text of a query.
"""

from __future__ import annotations

from .embedders import (
    ShoalDocumentEmbedder,
    ShoalMultiVectorDocumentEmbedder,
    ShoalMultiVectorTextEmbedder,
    ShoalSparseDocumentEmbedder,
    ShoalSparseTextEmbedder,
    ShoalTextEmbedder,
)

__all__ = [
    "ShoalDocumentEmbedder",
    "ShoalMultiVectorDocumentEmbedder",
    "ShoalMultiVectorTextEmbedder",
    "ShoalSparseDocumentEmbedder",
    "ShoalSparseTextEmbedder",
    "ShoalTextEmbedder",
]

"""Shoal's models in LlamaIndex: dense and sparse embeddings, a node parser, a reranker and an
extractor of metadata.
"""

from __future__ import annotations

from shoal_llama_index.components import ShoalExtractor, ShoalReranker
from shoal_llama_index.embeddings import ShoalEmbedding, ShoalSparseEmbedding
from shoal_llama_index.node_parser import ShoalNodeParser

__all__ = [
    "ShoalEmbedding",
    "ShoalExtractor",
    "ShoalNodeParser",
    "ShoalReranker",
    "ShoalSparseEmbedding",
]

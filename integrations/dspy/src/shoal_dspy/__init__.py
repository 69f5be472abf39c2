"""Shoal's models in DSPy: an embedder with roles, a retriever that uses them, a reranker and an
extractor.
"""

from __future__ import annotations

from shoal_dspy.embeddings import ShoalEmbedder, ShoalRetriever
from shoal_dspy.modules import ShoalExtractor, ShoalReranker

__all__ = ["ShoalEmbedder", "ShoalExtractor", "ShoalReranker", "ShoalRetriever"]

"""Shoal's models beside a Qdrant client: collections, points and searches of dense, sparse and
multi-vectors, and reranking.
"""

from __future__ import annotations

from shoal_qdrant.search import ShoalExtractor, ShoalReranker
from shoal_qdrant.vectorizer import ShoalVectorizer

__all__ = ["ShoalExtractor", "ShoalReranker", "ShoalVectorizer"]

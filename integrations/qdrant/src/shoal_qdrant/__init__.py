"""Shoal's models for Qdrant: collections, points and searches of dense, sparse and multi-vectors,
reranking, and payload fields extracted from texts.
"""

from __future__ import annotations

from shoal_qdrant.search import ShoalExtractor, ShoalReranker
from shoal_qdrant.vectorizer import ShoalVectorizer

__all__ = ["ShoalExtractor", "ShoalReranker", "ShoalVectorizer"]

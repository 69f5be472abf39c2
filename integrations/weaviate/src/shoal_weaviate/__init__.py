"""Shoal's models for Weaviate: self-provided vectors, reranking and extracted properties."""

from __future__ import annotations

from shoal_weaviate.components import ShoalExtractor, ShoalReranker
from shoal_weaviate.vectorizer import ShoalVectorizer

__all__ = ["ShoalExtractor", "ShoalReranker", "ShoalVectorizer"]

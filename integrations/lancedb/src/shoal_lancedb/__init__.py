"""Shoal's models in LanceDB. Importing this registers the embedding functions "shoal" and
"shoal-multivector", so that a stored table finds them again."""

from __future__ import annotations

from shoal_lancedb.functions import ShoalEmbeddings, ShoalMultiVectorEmbeddings
from shoal_lancedb.tables import ShoalExtractor, ShoalReranker

__all__ = ["ShoalEmbeddings", "ShoalExtractor", "ShoalMultiVectorEmbeddings", "ShoalReranker"]

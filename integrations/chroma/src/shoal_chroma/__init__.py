"""Shoal's models as embedding functions of Chroma. Importing this registers them, so that a stored
collection finds them again.
"""

from __future__ import annotations

from shoal_chroma.functions import ShoalEmbeddingFunction, ShoalSparseEmbeddingFunction

__all__ = ["ShoalEmbeddingFunction", "ShoalSparseEmbeddingFunction"]

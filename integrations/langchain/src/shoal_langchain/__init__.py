"""Shoal's models in LangChain: embeddings, a text splitter, a reranker, and extraction as a tool
and as a transformer of documents.

`ShoalSparseEmbeddings` implements an interface of langchain-qdrant: `pip install
'shoal-langchain[qdrant]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal_langchain.components import ShoalEmbeddings, ShoalExtractor, ShoalReranker, ShoalTagger
from shoal_langchain.splitter import ShoalTextSplitter

if TYPE_CHECKING:
    from shoal_langchain.sparse import ShoalSparseEmbeddings

__all__ = [
    "ShoalEmbeddings",
    "ShoalExtractor",
    "ShoalReranker",
    "ShoalSparseEmbeddings",
    "ShoalTagger",
    "ShoalTextSplitter",
]


def __getattr__(name: str) -> Any:
    if name == "ShoalSparseEmbeddings":
        return import_module("shoal_langchain.sparse").ShoalSparseEmbeddings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

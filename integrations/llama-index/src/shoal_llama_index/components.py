"""The reranker and the extractor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.bridge.pydantic import Field
from llama_index.core.extractors import BaseExtractor
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from shoal.handle import Findings

from shoal_llama_index.embeddings import ModelBase

dispatcher = instrument.get_dispatcher(__name__)


class ShoalReranker(ModelBase, BaseNodePostprocessor):
    """The `top_n` best nodes (0: all) with their scores, best first. Any model that scores may
    serve: a cross-encoder, a language model, late interaction (MaxSim) or an embedder (cosine)."""

    top_n: int = Field(default=0, ge=0)
    metadata_mode: MetadataMode = Field(
        default=MetadataMode.EMBED, description="How much of a node's metadata the model reads."
    )

    @classmethod
    def class_name(cls) -> str:
        return "ShoalReranker"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = self._begin(nodes, query_bundle)
        return self._end(nodes, self.handle.rank(query, self._texts(nodes), self.top_n))

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = self._begin(nodes, query_bundle)
        return self._end(nodes, await self.handle.arank(query, self._texts(nodes), self.top_n))

    def _texts(self, nodes: list[NodeWithScore]) -> list[str]:
        return [node.node.get_content(metadata_mode=self.metadata_mode) for node in nodes]

    def _begin(self, nodes: list[NodeWithScore], query: QueryBundle | None) -> str:
        if query is None:
            raise ValueError("a query is needed to rerank")
        dispatcher.event(
            ReRankStartEvent(
                query=query, nodes=nodes, top_n=self.top_n or len(nodes), model_name=self.model_name
            )
        )
        return query.query_str

    def _end(
        self, nodes: list[NodeWithScore], ranking: list[tuple[int, float]]
    ) -> list[NodeWithScore]:
        ranked = [NodeWithScore(node=nodes[index].node, score=score) for index, score in ranking]
        dispatcher.event(ReRankEndEvent(nodes=ranked))
        return ranked


class ShoalExtractor(ModelBase, BaseExtractor):
    """Extract `entities`, `labels` or `relations` into the metadata of nodes: maps with the fields
    of shoal's `Entity`, `LabelScore` or `Relation`.
    """

    find: Findings = "entities"
    labels: list[str] = Field(
        default_factory=list,
        description="What to look for, for zero-shot models; else the model's own.",
    )
    metadata_mode: MetadataMode = Field(
        default=MetadataMode.NONE, description="How much of a node's metadata the model reads."
    )

    @classmethod
    def class_name(cls) -> str:
        return "ShoalExtractor"

    def extract(self, nodes: Sequence[BaseNode]) -> list[dict[str, Any]]:
        return [
            {self.find: found}
            for found in self.handle.extract(self._texts(nodes), self.find, self.labels)
        ]

    async def aextract(self, nodes: Sequence[BaseNode]) -> list[dict[str, Any]]:
        return [
            {self.find: found}
            for found in await self.handle.aextract(self._texts(nodes), self.find, self.labels)
        ]

    def _texts(self, nodes: Sequence[BaseNode]) -> list[str]:
        return [node.get_content(metadata_mode=self.metadata_mode) for node in nodes]

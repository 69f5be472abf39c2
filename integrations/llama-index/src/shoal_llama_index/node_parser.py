"""`ShoalNodeParser`: LlamaIndex's node parser over the chunks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field, field_validator
from llama_index.core.node_parser import NodeParser
from llama_index.core.node_parser.node_utils import build_nodes_from_splits, default_id_func
from llama_index.core.schema import BaseNode, Document, MetadataMode, TextNode
from shoal import Chunking
from shoal.handle import TextChunk

from shoal_llama_index.embeddings import ModelBase


class ShoalNodeParser(ModelBase, NodeParser):
    """Divide documents into nodes that the model's own tokenizer measures.

    The mesh computes a vector for each chunk in any case. With `embed` or `late` it becomes the
    node's `embedding`, and an index does not compute it again. It is the vector of the chunk's
    text, without metadata.
    """

    method: Literal["sentences", "tokens", "markdown"] = Field(
        default="sentences",
        description="Where nodes end: at sentences, after max_tokens, or at Markdown's blocks.",
    )
    max_tokens: int = Field(
        default=0,
        ge=0,
        description="Maximum tokens of a node; 0: 512, or the model's maximum if that is smaller.",
    )
    overlap: int = Field(
        default=0, ge=0, description="Tokens of the previous node that a node repeats."
    )
    embed: bool = Field(default=False, description="Set each node's embedding.")
    late: bool = Field(
        default=False,
        description="Set embeddings that reflect the text around each node (late chunking).",
    )

    @field_validator("id_func", mode="before")
    @classmethod
    def _read_id_func(cls, given: Any) -> Any:
        """Accept the default function as `to_dict` writes it. Others are given to `from_dict`."""
        if isinstance(given, dict) and given.get("id_func_name") == default_id_func.__name__:
            return default_id_func
        return given

    @classmethod
    def class_name(cls) -> str:
        return "ShoalNodeParser"

    def _parse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **_: Any
    ) -> list[BaseNode]:
        return self._built(
            nodes, self.handle.chunks(_texts(nodes), self._chunking, embed=self._embeds)
        )

    async def _aparse_nodes(
        self, nodes: Sequence[BaseNode], show_progress: bool = False, **_: Any
    ) -> list[BaseNode]:
        return self._built(
            nodes, await self.handle.achunks(_texts(nodes), self._chunking, embed=self._embeds)
        )

    def _postprocess_parsed_nodes(
        self, nodes: list[BaseNode], parent_doc_map: dict[str, Document]
    ) -> list[BaseNode]:
        """Add relationships and metadata. Keep the offsets of the mesh: LlamaIndex searches for
        each node's text, and finds an earlier place if the text occurs twice.
        """
        parsed = [node for node in nodes if isinstance(node, TextNode)]
        places = [(node.start_char_idx, node.end_char_idx) for node in parsed]
        processed = super()._postprocess_parsed_nodes(nodes, parent_doc_map)
        for node, place in zip(parsed, places, strict=True):
            node.start_char_idx, node.end_char_idx = place
        return processed

    @property
    def _chunking(self) -> Chunking:
        return Chunking(self.method, self.max_tokens, self.overlap, self.late)

    @property
    def _embeds(self) -> bool:
        return self.embed or self.late

    def _built(self, parents: Sequence[BaseNode], chunks: list[list[TextChunk]]) -> list[BaseNode]:
        built: list[BaseNode] = []
        for parent, own in zip(parents, chunks, strict=True):
            nodes = build_nodes_from_splits(
                [chunk.text for chunk in own], parent, id_func=self.id_func
            )
            for node, chunk in zip(nodes, own, strict=True):
                node.start_char_idx, node.end_char_idx = chunk.start, chunk.end
                node.embedding = chunk.vector
            built += nodes
        return built


def _texts(nodes: Sequence[BaseNode]) -> list[str]:
    return [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]

"""Embedding models with one pooled vector for each text."""

from __future__ import annotations

from dataclasses import replace

import torch

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import need_config
from libs.kinds.dense.asymmetric import QUERY_HEAD, AsymmetricProcessor
from libs.kinds.static.card import STATIC_EMBEDDING
from libs.kinds.static.parts import load_static_parts
from libs.models.interface.head import ModelHead
from libs.models.runtime.backbone import Backbone
from libs.models.text.heads.modules import dense_layers, linear_table
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.embedding import EmbeddingProcessor
from libs.models.text.registry import build_encoder
from libs.models.text.span_head import add_span_head
from libs.models.weights import TensorFile


def build(parts: EncoderParts) -> Built:
    if parts.card.queries is not None:
        if parts.card.queries.family == STATIC_EMBEDDING:
            return _static_queries(parts, parts.card.queries)
        return _asymmetric(parts, parts.card.queries)
    heads: dict[str, ModelHead] = {"dense": _pooled(parts)}
    spans, text = add_span_head(heads, parts), parts.text()
    return Built(heads, EmbeddingProcessor(parts.card, text, spans=spans), text.tokenizer)


def _asymmetric(parts: EncoderParts, queries: Card) -> Built:
    """Build a main encoder for documents and another one for queries, in the same data type."""
    root = parts.directory / queries.encoder_folder
    config = need_config(root, queries.encoder_file).values
    tensors, device = TensorFile.open(parts.directory, queries.encoder_folder), parts.device
    encoder, state = build_encoder(
        config,
        tensors,
        dtype=parts.encoder.dtype,
        device=device,
        head_tables=linear_table(queries),
        int8=parts.int8,
    )
    queries = replace(queries, max_tokens=min(queries.max_tokens, encoder.max_positions))
    own = EncoderParts(queries, parts.directory, encoder, state, parts.rest, device, parts.int8)
    text = parts.text()
    documents = EmbeddingProcessor(parts.card, text)
    processor = AsymmetricProcessor(parts.card, documents, EmbeddingProcessor(queries, own.text()))
    backbone = Backbone(encoder, {QUERY_HEAD: _pooled(own)})
    return Built({"dense": _pooled(parts)}, processor, text.tokenizer, (backbone,))


def _static_queries(parts: EncoderParts, queries: Card) -> Built:
    """Build an encoder for documents, and a table of token vectors, in float32, for queries."""
    static = load_static_parts(parts.directory, queries, parts.device, torch.float32)
    text = parts.text()
    documents = EmbeddingProcessor(parts.card, text)
    processor = AsymmetricProcessor(parts.card, documents, static.processor)
    backbone = Backbone(static.encoder, {QUERY_HEAD: static.head})
    return Built({"dense": _pooled(parts)}, processor, text.tokenizer, (backbone,))


def _pooled(parts: EncoderParts) -> PooledHead:
    return PooledHead(
        parts.card.pooling, dense_layers(parts.card, parts.directory, parts.state, parts.device)
    )


load = text_loader(build, linear_table)

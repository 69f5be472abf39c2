"""Embedding models: one pooled vector per text, or one vector per token (late interaction)."""

from __future__ import annotations

from dataclasses import replace

import torch

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import need_config
from libs.catalog.kinds.embedding.nvembed import MODEL_TYPE, read_latent
from libs.catalog.kinds.embedding.static import STATIC_EMBEDDING
from libs.models.backbone import Backbone
from libs.models.head import ModelHead
from libs.models.text.heads.latent import LatentHead
from libs.models.text.heads.modules import dense_layers
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.kinds.kind import Built, Parts
from libs.models.text.kinds.spans import add_span_head
from libs.models.text.kinds.state import HeadState
from libs.models.text.processing.asymmetric import QUERY_HEAD, AsymmetricProcessor
from libs.models.text.processing.chunking.span_pooling import SpanPooling
from libs.models.text.processing.embedding import EmbeddingProcessor
from libs.models.text.processing.latent import LatentProcessor
from libs.models.text.registry import build_encoder
from libs.models.text.static_parts import load_static_parts
from libs.models.text.tokenising.late import LateFrame
from libs.models.text.tokenising.text import special_token
from libs.models.weights import HeadRule, TensorFile


def head_table(card: Card) -> dict[str, HeadRule]:
    return {"linear": "linear"} if any(not module.folder for module in card.modules) else {}


def build(parts: Parts) -> Built:
    if parts.config.text("model_type") == MODEL_TYPE:
        return _latent(parts)
    if parts.card.queries is not None:
        if parts.card.queries.family == STATIC_EMBEDDING:
            return _static_queries(parts, parts.card.queries)
        return _asymmetric(parts, parts.card.queries)
    card, text = parts.card, parts.text()
    layers = dense_layers(card, parts.directory, parts.state, parts.device)
    heads: dict[str, ModelHead] = {}
    late = None
    if card.kind == "dense":
        heads["dense"] = PooledHead(card.pooling, layers)
        spans = add_span_head(heads, parts)
    else:
        heads["multi_vector"] = TokenHead(layers)
        spans = SpanPooling()
    if card.late is not None:
        fill = special_token(parts.root, "mask_token") or special_token(parts.root, "eos_token")
        late = LateFrame(card.late, text, fill)
    return Built(heads, EmbeddingProcessor(card, text, late, spans=spans), text.tokenizer)


def _asymmetric(parts: Parts, queries: Card) -> Built:
    """Build a main encoder for documents and another one for queries, in the same data type."""
    root = parts.directory / queries.encoder_folder
    config = need_config(root, queries.encoder_file).values
    tensors, device = TensorFile.open(parts.directory, queries.encoder_folder), parts.device
    encoder, state = build_encoder(
        config,
        tensors,
        dtype=parts.encoder.dtype,
        device=device,
        head_tables=head_table(queries),
        int8=parts.int8,
    )
    queries = replace(queries, max_tokens=min(queries.max_tokens, encoder.max_positions))
    own = Parts(queries, parts.directory, encoder, state, parts.rest, device, parts.int8)
    text = parts.text()
    documents = EmbeddingProcessor(parts.card, text)
    processor = AsymmetricProcessor(parts.card, documents, EmbeddingProcessor(queries, own.text()))
    backbone = Backbone(encoder, {QUERY_HEAD: _pooled(own)})
    return Built({"dense": _pooled(parts)}, processor, text.tokenizer, (backbone,))


def _static_queries(parts: Parts, queries: Card) -> Built:
    """Build an encoder for documents, and a table of token vectors, in float32, for queries."""
    static = load_static_parts(parts.directory, queries, parts.device, torch.float32)
    text = parts.text()
    documents = EmbeddingProcessor(parts.card, text)
    processor = AsymmetricProcessor(parts.card, documents, static.processor)
    backbone = Backbone(static.encoder, {QUERY_HEAD: static.head})
    return Built({"dense": _pooled(parts)}, processor, text.tokenizer, (backbone,))


def _pooled(parts: Parts) -> PooledHead:
    return PooledHead(
        parts.card.pooling, dense_layers(parts.card, parts.directory, parts.state, parts.device)
    )


def _latent(parts: Parts) -> Built:
    """Build NV-Embed. Every tensor outside the encoder belongs to the latent attention layer."""
    settings, state = (
        read_latent(parts.directory),
        HeadState(parts.rest, parts.device, "config.json"),
    )
    head = LatentHead(settings, state, parts.encoder.hidden_size, parts.encoder.dtype, parts.file)
    state.check_all_used()
    end = special_token(parts.root, "eos_token") if settings.ends else ""
    text = parts.text()
    return Built({"dense": head}, LatentProcessor(parts.card, text, end), text.tokenizer)

"""SPLADE: the masked language model's head and, for some models (inference-free), fixed token
weights for queries.
"""

from __future__ import annotations

from libs.catalog.card import Card, SparseOutput
from libs.catalog.checkpoint.files import need_config
from libs.errors import ModelBroken
from libs.models.layers.spec import Config
from libs.models.text.heads.mlm import MlmTransform, decoder_bias, decoder_weight, mlm_table
from libs.models.text.heads.sparse import SpladeHead
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.embedding import EmbeddingProcessor
from libs.models.text.processing.static import load_lookup
from libs.models.weights import HeadRule


def head_table(card: Card) -> dict[str, HeadRule]:
    return mlm_table(card.family)


def build(parts: EncoderParts) -> Built:
    card, sparse = parts.card, parts.card.sparse
    if sparse is None:
        raise ModelBroken(f"{card.model}: the card does not describe its sparse vectors")
    static = None
    if sparse.queries is not None:
        limit, lowercase = card.max_tokens, card.lowercase
        static = load_lookup(
            parts.directory,
            sparse.queries,
            columns=sparse.columns,
            limit=limit,
            lowercase=lowercase,
        )
    text = parts.text()
    return Built(
        {"sparse": _head(parts, sparse)},
        EmbeddingProcessor(card, text, static=static),
        text.tokenizer,
    )


def _head(parts: EncoderParts, card: SparseOutput) -> SpladeHead:
    file = parts.file
    config = Config(need_config(parts.root, parts.card.encoder_file).values)
    table = parts.encoder.token_weight
    if table.shape[0] != card.columns:
        raise ModelBroken(
            f"{file}: the token table has {table.shape[0]} rows; config.json: `vocab_size` is "
            f"{card.columns}"
        )
    transform = MlmTransform(
        parts.card.family, config, parts.state, parts.encoder.hidden_size, table.shape[1], file
    )
    weight = decoder_weight(parts.state, config, table, file)
    bias = decoder_bias(parts.card.family, parts.state, config, card.columns, file)
    return SpladeHead(transform, weight, bias, card, shared=weight is table)


load = text_loader(build, head_table)

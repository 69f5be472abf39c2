"""bge-m3: dense, sparse (lexical) and multi-vector outputs from one forward, together or alone."""

from __future__ import annotations

from libs.errors import ModelBroken
from libs.kinds.hybrid.card import SPARSE_FILE, TOKENS_FILE
from libs.models.interface.head import ModelHead
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.text.heads.modules import dense_layers
from libs.models.text.heads.pooled import PooledHead
from libs.models.text.heads.sparse import LexicalHead
from libs.models.text.heads.tokens import TokenHead
from libs.models.text.loading import text_loader
from libs.models.text.parts import Built, EncoderParts
from libs.models.text.processing.embedding import EmbeddingProcessor
from libs.models.text.span_head import add_span_head
from libs.models.text.tokenising.late import LateFrame
from libs.models.text.tokenising.text import TextProcessor, special_token
from libs.models.weights import TensorFile

# FlagEmbedding drops the lexical weights of these special tokens.
_UNUSED = ("cls_token", "eos_token", "pad_token", "unk_token")


def build(parts: EncoderParts) -> Built:
    card, text = parts.card, parts.text()
    heads: dict[str, ModelHead] = {
        "dense": PooledHead(
            card.pooling, dense_layers(card, parts.directory, parts.state, parts.device)
        )
    }
    if card.sparse is not None:
        heads["sparse"] = LexicalHead(
            _layer(parts, SPARSE_FILE, 1, rectified=True), _unused(parts, text)
        )
    late = None
    if card.late is not None:
        heads["multi_vector"] = TokenHead(
            [_layer(parts, TOKENS_FILE, card.multi_vector_dimensions)]
        )
        late = LateFrame(card.late, text, "")
    spans = add_span_head(heads, parts)
    return Built(heads, EmbeddingProcessor(card, text, late, spans=spans), text.tokenizer)


def _layer(parts: EncoderParts, file: str, width: int, *, rectified: bool = False) -> HeadLinear:
    tensors = TensorFile.open_file(parts.directory, file)
    state = {f"linear.{name}": tensors.read(name).to(parts.device) for name in tensors.names()}
    check_shape(state, "linear.weight", (width, parts.encoder.hidden_size), file)
    check_shape(state, "linear.bias", (width,), file)
    if len(state) > 2:
        raise ModelBroken(
            f"{file}: the tensors are {', '.join(tensors.names())}; only `weight` and `bias` are "
            "supported"
        )
    return HeadLinear(state, "linear", "relu" if rectified else "identity")


def _unused(parts: EncoderParts, text: TextProcessor) -> set[int]:
    ids = [text.token_id(special_token(parts.root, role)) for role in _UNUSED]
    return {number for number in ids if number is not None}


load = text_loader(build)

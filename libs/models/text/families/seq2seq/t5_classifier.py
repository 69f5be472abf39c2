"""T5 and mT5 as classifiers: encoder and decoder over the text's tokens shifted right. The last
state is classified.
"""

from __future__ import annotations

from libs.models.layers.decoder import Decoder, EncoderDecoder
from libs.models.layers.embeddings import TokenEmbedding
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config, EmbeddingSpec
from libs.models.text.families.seq2seq import t5
from libs.models.weights import Rule

MODEL_TYPES = t5.MODEL_TYPES
PREFIXES = t5.PREFIXES


def _decoder_rule(rule: Rule) -> Rule:
    """Return the place of a decoder's tensor within the whole model."""
    if isinstance(rule, tuple):
        return f"decoder.{rule[0]}", rule[1]
    return f"decoder.{rule}" if isinstance(rule, str) else rule


WEIGHTS: dict[str, Rule] = t5.WEIGHTS | {
    stem: _decoder_rule(rule) for stem, rule in t5.DECODER.items()
}


def claims(config: Config) -> bool:
    """Return whether a checkpoint is a classifier. Other checkpoints do not compute the decoder."""
    return any(name.endswith("ForSequenceClassification") for name in config.texts("architectures"))


def build(config: Config) -> PackedEncoder:
    """Build the encoder and decoder that config.json describes, without weights."""
    vocabulary = config.size("vocab_size")
    start = config.integer("decoder_start_token_id", config.integer("pad_token_id", 0))
    if not 0 <= start < vocabulary:
        raise config.unsupported("decoder_start_token_id", f"an id below {vocabulary} is needed")
    spec, own = t5.read_encoder_spec(config), t5.read_decoder_spec(config)
    embed = TokenEmbedding(
        EmbeddingSpec(
            vocabulary, spec.hidden, positions=t5.MAX_POSITIONS, norm_eps=None, table=False
        )
    )
    decoder = Decoder(own, start, relative=t5.causal_bias(config, own, reach=t5.MAX_POSITIONS - 1))
    return EncoderDecoder(spec, embed, decoder, relative=t5.bias(config, spec))

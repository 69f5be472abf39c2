"""The parity table: the small random checkpoint of each family. A new family is a row of
RECIPES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import transformers

from tests.parity.tokenizers import Style

Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a small model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    positions: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of a kind.

    Args:
        config: Keys of transformers' configuration for a size.
        segmented: The family distinguishes two segments.
        like: transformers' model_type with the same computation, if the kind has none there.
        encoder: The class of the encoder alone, if AutoModel returns another one.
    """

    tokenizer: Style
    config: Callable[[Size], Values]
    segmented: bool = False
    like: str = ""
    encoder: type[transformers.PreTrainedModel] | None = None


def _common(size: Size) -> dict[str, object]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.hidden * 2,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.positions,
    }


def _roberta(size: Size) -> Values:
    """RoBERTa and its variants keep the first rows of the position table for padding."""
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    return _common(size) | {"max_position_embeddings": size.positions + 2} | special


def _distilbert(size: Size) -> Values:
    return {
        "vocab_size": size.vocabulary,
        "dim": size.hidden,
        "hidden_dim": size.hidden * 2,
        "n_layers": size.layers,
        "n_heads": size.heads,
        "max_position_embeddings": size.positions,
    }


def _mpnet(size: Size) -> Values:
    return {name: value for name, value in _roberta(size).items() if name != "type_vocab_size"}


def _longformer(size: Size) -> Values:
    """The first layer's window is narrower than that of the others."""
    return {**_roberta(size), "attention_window": [8, *(16,) * (size.layers - 1)]}


def _albert(size: Size) -> Values:
    """The first layers have other weights than the last, and embeddings are narrower than
    layers."""
    groups = {"num_hidden_layers": size.layers + 1, "num_hidden_groups": min(2, size.layers)}
    return _common(size) | groups | {"embedding_size": max(1, size.hidden // 2)}


def _electra(size: Size) -> Values:
    return _common(size) | {"embedding_size": max(1, size.hidden // 2)}


def _deberta(size: Size) -> Values:
    """Return v3's settings: fewer buckets than distances, and no absolute positions."""
    relative = {
        "relative_attention": True,
        "position_buckets": 32,
        "max_relative_positions": -1,
        "pos_att_type": ["p2c", "c2p"],
    }
    shared = {
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    }
    return _common(size) | relative | shared


def _deberta_v1(size: Size) -> Values:
    """Return v1's settings: a vector for each distance up to the longest text."""
    own = ("relative_attention", "max_relative_positions", "pos_att_type")
    plain = {"position_biased_input": False, "type_vocab_size": 0}
    settings = _deberta(size)
    return _common(size) | {key: settings[key] for key in own} | plain


def _decoder(size: Size) -> dict[str, object]:
    """Heads have an even size, as rotary positions need; two share keys if there are several, and
    together they are wider than the hidden size.
    """
    shared = size.heads // 2 if size.heads % 2 == 0 else 1
    return _common(size) | {
        "num_key_value_heads": shared,
        "head_dim": _even(size.hidden // size.heads) + 4,
        "rms_norm_eps": 1e-6,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": False,
    }


def _privacy_filter(size: Size) -> Values:
    """A window narrower than the longest sequence, heads of an even size, and enough experts that
    some have few tokens.
    """
    return _decoder(size) | {
        "sliding_window": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    }


def _even(number: int) -> int:
    return number + number % 2


def _qwen(size: Size) -> Values:
    """The window, if one is requested, begins with the second layer."""
    return _decoder(size) | {"max_window_layers": 1, "pad_token_id": 0}


def _llama(size: Size) -> Values:
    return _decoder(size) | {"attention_bias": True}


def _bidirectional_llama(size: Size) -> Values:
    return _decoder(size) | {"is_causal": False}


def _glm(size: Size) -> Values:
    """Texts alone have equal positions in all three dimensions."""
    pairs = (_even(size.hidden // size.heads) + 4) // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    return _decoder(size) | {"hidden_act": "silu", "rope_parameters": rope}


def _qwen3_5(size: Size) -> Values:
    """A gated delta net in every second layer, and half of a head rotated, because these heads are
    small."""
    pattern = ["linear_attention", "full_attention"]
    pairs = (_even(size.hidden // size.heads) + 4) // 4
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    }
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return _decoder(size) | {
        "layer_types": [pattern[number % 2] for number in range(size.layers)],
        "rope_parameters": rope | {"mrope_section": sections},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }


def _lfm2(size: Size) -> Values:
    """A short convolution in every second layer. The feed-forward's width is rounded up."""
    pattern = ["conv", "full_attention"]
    values = {name: value for name, value in _decoder(size).items() if name != "rms_norm_eps"}
    return values | {
        "layer_types": [pattern[number % 2] for number in range(size.layers)],
        "block_multiple_of": 32,
    }


def _mistral(size: Size) -> Values:
    return _decoder(size) | {"sliding_window": 9}


def _ministral3(size: Size) -> Values:
    """Published factors, over a context so short that queries grow several times."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return _decoder(size) | {"rope_parameters": rope}


def _phi3(size: Size) -> Values:
    """The longest sequences exceed the original context, and a part of each head is rotated."""
    head = _even(size.hidden // size.heads)
    pairs = head // 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + pair for pair in range(pairs)],
    }
    values = {name: value for name, value in _decoder(size).items() if name != "head_dim"}
    widths = {"hidden_size": size.heads * head, "original_max_position_embeddings": 40}
    return values | widths | {"pad_token_id": 0, "rope_parameters": rope, "sliding_window": 60}


def _gemma(size: Size) -> Values:
    return _decoder(size) | {"tie_word_embeddings": True}


def _gemma2(size: Size) -> Values:
    """A window in every other layer, and caps that scores of random weights reach."""
    return _decoder(size) | {
        "sliding_window": 12,
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }


def _gemma3(size: Size) -> Values:
    """Settings of embeddinggemma, with a window in every second layer."""
    pattern = ["sliding_attention", "full_attention"]
    return _decoder(size) | {
        "use_bidirectional_attention": True,
        "sliding_window": 12,
        "query_pre_attn_scalar": 30,
        "layer_types": [pattern[number % 2] for number in range(size.layers)],
        "tie_word_embeddings": True,
    }


def _t5(size: Size) -> Values:
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.hidden,
        "d_kv": size.hidden // size.heads + 3,
        "d_ff": size.hidden * 2,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "relative_attention_num_buckets": 16,
        "relative_attention_max_distance": 50,
        "use_cache": False,
        "decoder_start_token_id": 3,
    }


def _bart(size: Size) -> Values:
    """More layers on one side than on the other, and different tokens before a text and at its
    end."""
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.hidden,
        "max_position_embeddings": size.positions,
        "encoder_layers": size.layers,
        "decoder_layers": size.layers + 1,
        "encoder_attention_heads": size.heads,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": size.hidden * 2,
        "decoder_ffn_dim": size.hidden * 3,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
        "use_cache": False,
    }


def _mt5(size: Size) -> Values:
    return {**_t5(size), "feed_forward_proj": "gated-gelu"}


def _rotary(size: Size) -> dict[str, object]:
    """Heads of an even size, as rotary positions need, which make up the hidden size."""
    return _common(size) | {"hidden_size": size.heads * _even(size.hidden // size.heads)}


def _modernbert(size: Size) -> Values:
    """The first layer sees all tokens, the second a window."""
    special = dict.fromkeys(("bos_token_id", "cls_token_id"), 2) | dict.fromkeys(
        ("eos_token_id", "sep_token_id"), 3
    )
    return _rotary(size) | special | {"pad_token_id": 0, "local_attention": 16}


def _gte(size: Size) -> Values:
    return _rotary(size) | {"type_vocab_size": 2, "hidden_dropout_prob": 0.0}


RECIPES: dict[str, Recipe] = {
    "bert": Recipe("bert", _common, segmented=True),
    "roberta": Recipe("roberta", _roberta),
    "roberta-prelayernorm": Recipe("roberta", _roberta),
    "xlm-roberta": Recipe("xlm-roberta", _roberta),
    "camembert": Recipe("xlm-roberta", _roberta),
    "distilbert": Recipe("bert", _distilbert),
    "mpnet": Recipe("mpnet", _mpnet),
    "longformer": Recipe("roberta", _longformer),
    "electra": Recipe("bert", _electra, segmented=True),
    "albert": Recipe("bert", _albert, segmented=True),
    "modernbert": Recipe("bert", _modernbert),
    "nomic_bert": Recipe("bert", _rotary, segmented=True),
    "eurobert": Recipe("qwen", _decoder),
    "gte": Recipe("bert", _gte, segmented=True),
    "new": Recipe("bert", _gte, segmented=True, like="gte"),
    "jina_embeddings_v3": Recipe("xlm-roberta", _rotary),
    "deberta": Recipe("roberta", _deberta_v1),
    "deberta-v2": Recipe("deberta-v2", _deberta),
    "qwen2": Recipe("qwen", _qwen),
    "qwen3": Recipe("qwen", _qwen),
    "jina_embeddings_v5": Recipe("qwen", _qwen, like="qwen3"),
    "qwen3_5_text": Recipe("qwen", _qwen3_5),
    "llama": Recipe("llama", _llama),
    "llama_bidirec": Recipe("llama", _bidirectional_llama, like="llama"),
    "bidir_mistral": Recipe("llama", _bidirectional_llama, like="llama"),
    "lfm2": Recipe("llama", _lfm2),
    "mistral": Recipe("llama", _mistral),
    "ministral3": Recipe("llama", _ministral3),
    "openai_privacy_filter": Recipe("qwen", _privacy_filter),
    "gemma": Recipe("gemma", _gemma),
    "gemma2": Recipe("gemma", _gemma2),
    "phi3": Recipe("llama", _phi3),
    "glm_ocr_text": Recipe("qwen", _glm),
    "gemma3_text": Recipe("gemma", _gemma3),
    "bart": Recipe("roberta", _bart),
    "t5": Recipe("t5", _t5, encoder=transformers.T5EncoderModel),
    "mt5": Recipe("t5", _mt5, encoder=transformers.MT5EncoderModel),
}

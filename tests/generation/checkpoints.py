"""Tiny checkpoints of generative models, with random weights, and the texts of transformers with
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from libs.models.generation.decoding.rules import Ids
from tests.parity.checkpoints import random_model

VOCABULARY = 300
CAUSAL: dict[str, Mapping[str, object]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"sliding_window": 12, "num_key_value_heads": 1},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 12},
    "phi3": {"sliding_window": 24},
    "gemma3_text": {"use_bidirectional_attention": False, "sliding_window": 12},
    "lfm2": {"conv_L_cache": 4},
    "ministral3": {"num_key_value_heads": 2},
    "qwen3_5_text": {},
}
CARRIED = ("lfm2", "qwen3_5_text")
"""Models with layers that carry states from token to token in place of keys and values."""
_SEQ2SEQ = {
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "forced_eos_token_id": None,
}
_BART = _SEQ2SEQ | {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
}  # fmt: skip
_T5 = _SEQ2SEQ | {
    "vocab_size": VOCABULARY, "d_model": 64, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 4, "d_kv": 16, "d_ff": 96,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
SEQ2SEQ: dict[str, tuple[str, Mapping[str, object]]] = {
    "bart": ("bart", _BART),
    "mbart": ("mbart", _BART | {"scale_embedding": True, "activation_function": "relu"}),
    "marian": (
        "marian",
        _BART | {"scale_embedding": True, "activation_function": "swish", "pad_token_id": 2},
    ),
    "t5": ("t5", _T5),
    "t5 1.1": ("t5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 1.1 resaved": (
        "t5",
        _T5
        | {
            "feed_forward_proj": "gated-gelu",
            "scale_decoder_outputs": False,
            "tie_word_embeddings": True,
        },
    ),
    "mt5": ("mt5", _T5),
}


def write(
    name: str, directory: Path, generation: Mapping[str, object] | None = None
) -> transformers.PreTrainedModel:
    """Writes a checkpoint of a kind above, with keys of generation_config.json, and returns
    transformers' model of it.
    """
    if name in CAUSAL:
        model = random_model(
            name, head="causal_lm", config={"vocab_size": VOCABULARY, **CAUSAL[name]}
        )
    else:
        model = _seq2seq(*SEQ2SEQ[name])
    settings = {
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
        "max_length": None,
        **(generation or {}),
    }
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    model.save_pretrained(directory)
    return model


def _seq2seq(kind: str, config: Mapping[str, object]) -> transformers.PreTrainedModel:
    settings = transformers.AutoConfig.for_model(kind, **config)
    model = transformers.AutoModelForSeq2SeqLM.from_config(settings).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # Marian's positions, which are computed and not stored
                continue
            parameter.normal_(0.0, 0.2, generator=generator)
            if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0.0, 0.2, generator=generator)
    return model


def prompts(count: int, seed: int = 0, longest: int = 48) -> list[Ids]:
    """Return prompts of different lengths, from one token up, some across page boundaries."""
    random = np.random.default_rng(seed)
    lengths = [1, 31, 32, 33, *random.integers(2, longest, max(0, count - 4)).tolist()][:count]
    return [random.integers(3, VOCABULARY, length).astype(np.int32) for length in lengths]


@torch.inference_mode()
def written(
    model: transformers.PreTrainedModel, inputs: Sequence[Ids], most: int, **settings: object
) -> list[list[int]]:
    """The new tokens of `generate` for each input; one padded batch, on the left for causal models.

    Each alone where the longest input of a batch changes the others' rotary positions (LongRoPE),
    or where layers would read the padding.
    """
    is_alone = (
        hasattr(model.config, "original_max_position_embeddings")
        or model.config.model_type in CARRIED
    )
    if len(inputs) > 1 and is_alone:
        return [written(model, [own], most, **settings)[0] for own in inputs]
    longest, causal = max(map(len, inputs)), not model.config.is_encoder_decoder
    ids = torch.zeros((len(inputs), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(inputs):
        place = slice(longest - len(own), longest) if causal else slice(0, len(own))
        ids[row, place], mask[row, place] = torch.from_numpy(own).long(), 1
    found = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=most, **settings
    )
    return [row[longest if causal else 1 :].tolist() for row in found]

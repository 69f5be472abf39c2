"""The smallest checkpoints that can be served, made without transformers. Hostile checkpoints are
derived from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save

HIDDEN: Final = 8
WORDS: Final = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{letter}" for letter in "aeinrst"),
    "text",
)

CONFIG: Final[Mapping[str, object]] = {
    "model_type": "bert", "architectures": ["BertModel"], "hidden_size": HIDDEN,
    "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "vocab_size": len(WORDS), "max_position_embeddings": 32,
    "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip
TOKENIZER: Final[Mapping[str, object]] = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [
        {"id": number, "content": WORDS[number], "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False,
        "special": True}
        for number in range(5)
    ],
    "normalizer": {"type": "Sequence",
    "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Replace",
    "pattern": {"String": "``"}, "content": "'"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\s+|\\w+"}, "behavior": "Removed", "invert": True},
        {"type": "BertPreTokenizer"},
    ]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
        ],
        "special_tokens": {name: {"id": name, "ids": [WORDS.index(name)],
        "tokens": [name]} for name in ("[CLS]", "[SEP]")},
    },
    "decoder": None,
    "model": {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word: number for number, word in enumerate(WORDS)},
    },
}  # fmt: skip
TOKENIZER_CONFIG: Final[Mapping[str, object]] = {
    "model_max_length": 32, "unk_token": "[UNK]", "mask_token": "[MASK]",
    "tokenizer_class": "BertTokenizer",
}  # fmt: skip
MODULES: Final = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {
        "idx": 3,
        "name": "3",
        "path": "3_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
ADAPTER: Final[Mapping[str, object]] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query", "value"],
    "base_model_name_or_path": "org/tiny",
    "bias": "none", "use_rslora": False, "rank_pattern": {"layer.0.*query": 2}, "alpha_pattern": {},
    "task_type": "FEATURE_EXTRACTION",
}  # fmt: skip


def files() -> dict[str, object]:
    """Return all JSON files of a sentence-transformers checkpoint by path."""
    return {
        "config.json": dict(CONFIG),
        "tokenizer.json": dict(TOKENIZER),
        "tokenizer_config.json": dict(TOKENIZER_CONFIG),
        "modules.json": [dict(module) for module in MODULES],
        "1_Pooling/config.json": {"word_embedding_dimension": HIDDEN,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_cls_token": False},
        "2_Dense/config.json": {
            "in_features": HIDDEN, "out_features": 4, "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh"
        },
        "config_sentence_transformers.json": {"prompts": {"query": "q: ", "document": ""},
        "default_prompt_name": None},
        "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
    }  # fmt: skip


def weights() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Return the encoder's random weights, which are always the same."""
    chance = np.random.default_rng(0)
    square, wide = (HIDDEN, HIDDEN), (16, HIDDEN)
    layer = "encoder.layer.0."
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), HIDDEN),
        "embeddings.position_embeddings.weight": (32, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
        f"{layer}intermediate.dense.weight": wide,
        f"{layer}intermediate.dense.bias": wide[:1],
        f"{layer}output.dense.weight": wide[::-1],
        f"{layer}output.dense.bias": (HIDDEN,),
    }
    for name in (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
    ):
        shapes |= {f"{layer}{name}.weight": square, f"{layer}{name}.bias": (HIDDEN,)}
    for name in ("attention.output.LayerNorm", "output.LayerNorm"):
        shapes |= {f"{layer}{name}.weight": (HIDDEN,), f"{layer}{name}.bias": (HIDDEN,)}
    return {name: chance.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write(directory: Path) -> Path:
    """Write a complete checkpoint of an embedding model with 4 dimensions; return its directory."""
    for name, value in files().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(value))
    (directory / "model.safetensors").write_bytes(save(weights()))
    chance = np.random.default_rng(1)
    dense = {"linear.weight": chance.normal(0, 1, (4, HIDDEN)), "linear.bias": np.zeros(4)}
    (directory / "2_Dense/model.safetensors").write_bytes(
        save({name: value.astype(np.float32) for name, value in dense.items()})
    )
    return directory

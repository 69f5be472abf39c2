"""A tiny checkpoint of each kind with multiplying work: vectors of three forms with a LoRA adapter,
pairs, hypotheses, labels.

All share the encoder and words of `tiny.py`, so a mesh with all of them starts as fast as with one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save

from tests.fuzz import tiny

FORMS, PAIRS, HYPOTHESES, LABELS = "tiny/forms", "tiny/pairs", "tiny/hypotheses", "tiny/labels"
ADAPTER: Final = "tiny/adapter"
POSITIONS: Final = 2048
"""The positions of the model that reads labels before each text; the others accept 32 tokens."""

Shapes = Mapping[str, tuple[int, ...]]


def write_kinds(root: Path) -> None:
    """Write `<root>/tiny/<kind>` for each kind, and the adapter of FORMS."""
    _write_forms(root / FORMS)
    _write_adapter(root / ADAPTER)
    _write_classifier(root / PAIRS, {"0": "LABEL_0"})
    _write_classifier(root / HYPOTHESES, {"0": "contradiction", "1": "neutral", "2": "entailment"})
    _write_labels(root / LABELS)


def _write_forms(directory: Path) -> None:
    """Write a model with dense, sparse and token vectors, like bge-m3."""
    tiny.write(directory)
    _write_tokenizer(directory, 32)
    for name, width in (("sparse_linear", 1), ("colbert_linear", 4)):
        (directory / f"{name}.safetensors").write_bytes(
            save(_drawn({"weight": (width, tiny.HIDDEN), "bias": (width,)}))
        )


def _write_adapter(directory: Path) -> None:
    directory.mkdir(parents=True)
    _write_json(
        directory / "adapter_config.json",
        dict(tiny.ADAPTER) | {"base_model_name_or_path": FORMS, "rank_pattern": {}},
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for module in ("query", "value"):
        stem = f"base_model.model.encoder.layer.0.attention.self.{module}.lora"
        shapes |= {f"{stem}_A.weight": (2, tiny.HIDDEN), f"{stem}_B.weight": (tiny.HIDDEN, 2)}
    (directory / "adapter_model.safetensors").write_bytes(save(_drawn(shapes)))


def _write_classifier(directory: Path, labels: Mapping[str, str]) -> None:
    directory.mkdir(parents=True)
    names = {
        "id2label": dict(labels),
        "label2id": {label: int(number) for number, label in labels.items()},
    }
    _write_json(
        directory / "config.json",
        dict(tiny.CONFIG) | names | {"architectures": ["BertForSequenceClassification"]},
    )
    _write_tokenizer(directory, 32)
    head = _drawn(
        {
            "bert.pooler.dense.weight": (tiny.HIDDEN, tiny.HIDDEN),
            "bert.pooler.dense.bias": (tiny.HIDDEN,),
            "classifier.weight": (len(labels), tiny.HIDDEN),
            "classifier.bias": (len(labels),),
        }
    )
    tensors = {f"bert.{name}": tensor for name, tensor in tiny.weights().items()} | head
    (directory / "model.safetensors").write_bytes(save(tensors))


def _write_labels(directory: Path) -> None:
    """Write a GLiNER model, which reads labels before each text."""
    directory.mkdir(parents=True)
    words = [*tiny.WORDS, "<<ENT>>", "<<SEP>>"]
    encoder = dict(tiny.CONFIG) | {"vocab_size": len(words), "max_position_embeddings": POSITIONS}
    _write_json(
        directory / "gliner_config.json",
        {
            "encoder_config": encoder, "hidden_size": tiny.HIDDEN, "max_width": 4, "max_len": 60,
            "span_mode": "markerV0",
            "ent_token": "<<ENT>>", "sep_token": "<<SEP>>", "class_token_index": len(words) - 2,
            "subtoken_pooling": "first",
            "num_rnn_layers": 0, "words_splitter_type": "whitespace", "model_name": "tiny",
            "vocab_size": len(words),
        },
    )  # fmt: skip
    _write_tokenizer(directory, POSITIONS, words)
    tensors = tiny.weights() | _drawn(
        {
            "embeddings.word_embeddings.weight": (len(words), tiny.HIDDEN),
            "embeddings.position_embeddings.weight": (POSITIONS, tiny.HIDDEN),
        }
    )
    prefixed = {
        f"token_rep_layer.bert_layer.model.{name}": tensor for name, tensor in tensors.items()
    }
    marker = "span_rep_layer.span_rep_layer"
    layers = {
        "prompt_rep_layer": 1,
        f"{marker}.project_start": 1,
        f"{marker}.project_end": 1,
        f"{marker}.out_project": 2,
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, inputs in layers.items():
        wide = 4 * tiny.HIDDEN
        shapes |= {f"{name}.0.weight": (wide, inputs * tiny.HIDDEN), f"{name}.0.bias": (wide,)}
        shapes |= {f"{name}.3.weight": (tiny.HIDDEN, wide), f"{name}.3.bias": (tiny.HIDDEN,)}
    (directory / "model.safetensors").write_bytes(save(prefixed | _drawn(shapes)))


def _write_tokenizer(directory: Path, length: int, words: list[str] | None = None) -> None:
    """Write the tokenizer of `tiny.py` with the pre-tokenizer of published models of the family.
    Additional words are special tokens.

    With a custom pattern each text would be tokenised as a whole, because the pattern's lookahead
    is unknown.
    """
    made = json.loads(json.dumps(tiny.TOKENIZER)) | {"pre_tokenizer": {"type": "BertPreTokenizer"}}
    made["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}],
    }
    for number, word in list(enumerate(words or ()))[len(tiny.WORDS) :]:
        made["model"]["vocab"][word] = number
        made["added_tokens"].append(dict(made["added_tokens"][0]) | {"id": number, "content": word})
    _write_json(directory / "tokenizer.json", made)
    _write_json(
        directory / "tokenizer_config.json",
        dict(tiny.TOKENIZER_CONFIG) | {"model_max_length": length},
    )


def _drawn(shapes: Shapes) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    chance = np.random.default_rng(2)
    return {name: chance.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))

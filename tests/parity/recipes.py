"""How a small random checkpoint of each family is made: the parity table. A new family is a row of RECIPES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.parity.tokenizers import Style

Values = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Size:
    """Of a small model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    positions: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """`config`: keys of transformers' configuration for a size. `segmented`: the family tells two segments apart."""

    tokenizer: Style
    config: Callable[[Size], Values]
    segmented: bool = False


def _common(size: Size) -> dict[str, object]:
    return {
        "vocab_size": size.vocabulary, "hidden_size": size.hidden, "intermediate_size": size.hidden * 2,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "max_position_embeddings": size.positions,
    }  # fmt: skip


def _roberta(size: Size) -> Values:
    """RoBERTa's kin keep the first rows of the position table for padding."""
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1}
    return _common(size) | {"max_position_embeddings": size.positions + 2} | special


def _distilbert(size: Size) -> Values:
    return {
        "vocab_size": size.vocabulary, "dim": size.hidden, "hidden_dim": size.hidden * 2, "n_layers": size.layers,
        "n_heads": size.heads, "max_position_embeddings": size.positions,
    }  # fmt: skip


def _mpnet(size: Size) -> Values:
    return {name: value for name, value in _roberta(size).items() if name != "type_vocab_size"}


def _electra(size: Size) -> Values:
    return _common(size) | {"embedding_size": max(1, size.hidden // 2)}


RECIPES: dict[str, Recipe] = {
    "bert": Recipe("bert", _common, segmented=True),
    "roberta": Recipe("roberta", _roberta),
    "roberta-prelayernorm": Recipe("roberta", _roberta),
    "xlm-roberta": Recipe("xlm-roberta", _roberta),
    "camembert": Recipe("xlm-roberta", _roberta),
    "distilbert": Recipe("bert", _distilbert),
    "mpnet": Recipe("mpnet", _mpnet),
    "electra": Recipe("bert", _electra, segmented=True),
}

"""openai/privacy-filter against transformers, on random weights: entities, BIOES classes, and both
ways to compute experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from libs.models import EntitiesWork, ExtractResult
from libs.models.layers.experts import GatedExperts
from libs.models.layers.sinks import attend
from libs.models.text.processing.entities import find_entities
from libs.models.text.tokenising.text import Spans
from tests.parity.checkpoints import write_checkpoint
from tests.parity.test_families import load as load_encoder
from tests.parity.test_heads import TEXTS, assert_same_entities, load, run

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

CLASSES = ("O", *(f"{part}-{kind}" for kind in ("person", "email") for part in "BIES"))


def test_token_classes_equal_the_pipeline(tmp_path: Path) -> None:
    write_checkpoint(
        "openai_privacy_filter", tmp_path, head="token_classification", labels=CLASSES, seed=5
    )
    model = load(tmp_path)
    assert (model.card.kind, model.card.labels) == ("token_labels", ("person", "email"))
    pipeline = transformers.pipeline("token-classification", str(tmp_path), device="cpu")
    (result,) = run(model, EntitiesWork(TEXTS, aggregation="none"))
    assert isinstance(result, ExtractResult)
    assert_same_entities(result, cast("Any", pipeline(TEXTS, aggregation_strategy="none")), "none")


def merged(*names: str) -> list[tuple[str, int, int]]:
    """Return the entities of a text of one character per token."""
    logits = np.array(
        [[5.0 if name == label else 0.0 for label in CLASSES] for name in names], dtype=np.float32
    )
    rows = np.arange(len(names), dtype=np.int32)
    spans = Spans(rows, rows, rows + 1, np.zeros(len(names), dtype=bool))
    return [
        (found.label, found.start, found.end)
        for found in find_entities("x" * len(names), logits, spans, CLASSES, "simple")
    ]


def test_tokens_of_one_entity_are_merged_by_bioes() -> None:
    assert merged("B-person", "I-person", "E-person", "O", "S-email") == [
        ("person", 0, 3),
        ("email", 4, 5),
    ]
    assert merged("S-person", "S-person", "B-person", "E-person") == [
        ("person", 0, 1),
        ("person", 1, 2),
        ("person", 2, 4),
    ]
    assert merged("B-person", "E-person", "I-person", "E-email") == [
        ("person", 0, 2),
        ("person", 2, 3),
        ("email", 3, 4),
    ]
    assert merged("O", "O") == []


def test_all_experts_at_once_equal_the_chosen_ones(tmp_path: Path) -> None:
    """The CPU computes the GPU's variant."""
    encoder = load_encoder(write_checkpoint("openai_privacy_filter", tmp_path))
    experts = encoder.stack[0].ffn
    assert isinstance(experts, GatedExperts)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    values, chosen = experts.router.forward(x).topk(2, dim=-1)
    shares = values.softmax(-1)
    one = experts.compute_chosen(x, shares, chosen)
    other = experts.compute_all(x, torch.zeros(40, 6).scatter(-1, chosen, shares))
    assert (one - other).abs().max() <= 1e-5 * one.abs().max()


@pytest.mark.parametrize(
    ("lengths", "window"), [((1, 40, 7, 300), 5), ((1500,), 40), ((31, 33, 1, 1, 64), 64)]
)
def test_blocks_equal_a_full_mask(lengths: Sequence[int], window: int) -> None:
    """More blocks are used than are computed at a time, and sequences begin and end anywhere in
    them."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    q, k, v = (torch.randn(tokens, heads, 8, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.arange(tokens)
    seen = (number[:, None] == number) & ((places[:, None] - places).abs() <= window)
    scores = (
        torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)).masked_fill(~seen, float("-inf"))
        * 0.3
    )
    shares = torch.cat((scores, sinks[:, None, None].expand(-1, tokens, 1)), -1).softmax(-1)[
        ..., :-1
    ]
    wanted = torch.einsum("hqk,khd->qhd", shares, v.repeat_interleave(2, 1))
    got = attend(q, k, v, positions, sinks, scale=0.3, window=window)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()

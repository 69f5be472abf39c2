"""One grid holds every implementation of the attention seam to the definition, written out naively
in float64.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from libs.kernels.attention import dense, varlen
from libs.kernels.layout import SequenceRun, runs
from libs.kernels.native.library import SETS
from tests.kernels.batches import SHAPES, Batch, error
from tests.kernels.largest import Largest
from tests.kernels.ways import use_dense, use_native
from tests.support.device import no_synchronization

# Triton's interpreter takes milliseconds for each block of keys.
FEW_SHAPES = ((1, 1), (5, 5), (40, 40), (3, 35), (9, 2))

# Heads, heads of keys and values, head size.
HEADS = ((1, 1, 5), (4, 4, 32), (4, 2, 16), (7, 1, 8))
SIGHT = ((False, None), (True, None), (False, 0), (False, 5), (True, 5), (False, 300), (True, 20))


@pytest.fixture(params=["fused", "products", "fused in blocks", "products in blocks", *SETS])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which a CPU can compute attention, whatever this machine would choose: each
    instruction set of the native kernel, and both ways of a dense run, also in blocks smaller than
    the texts."""
    path = str(request.param)
    if path in SETS:
        use_native(monkeypatch, request.getfixturevalue("library"), path)
        return path
    use_dense(monkeypatch)
    monkeypatch.setattr(dense, "_prefers_fused", lambda q, run: path.startswith("fused"))
    if path.endswith("blocks"):
        monkeypatch.setattr(dense, "_MAX_SCORES", 2000)
        monkeypatch.setattr(dense, "_KEPT", 32)
        monkeypatch.setattr(dense, "_BAND_ROWS", 16)
    return path


def test_runs_are_of_equal_neighbours() -> None:
    assert runs([3, 3, 5, 3], [3, 3, 5, 4]) == (
        SequenceRun(0, 0, 2, 3, 3),
        SequenceRun(6, 6, 1, 5, 5),
        SequenceRun(11, 11, 1, 3, 4),
    )
    assert runs([], []) == ()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.usefixtures("way")
def test_every_way_equals_the_definition(
    heads: tuple[int, int, int], sight: tuple[bool, int | None]
) -> None:
    for biased, softcap in ((False, None), (True, None), (True, 0.8), (False, 5.0)):
        batch = Batch.create(heads, sight, biased=biased, softcap=softcap)
        assert error(batch.attend(), batch.defined()) < 1e-5


@pytest.mark.parametrize(
    ("heads", "sight", "biased"),
    [
        ((2, 2, 5), (False, None), False),
        ((2, 2, 5), (False, None), True),
        ((2, 1, 16), (True, None), False),
        ((2, 1, 16), (False, 0), True),
        ((2, 1, 16), (False, 5), False),
        ((2, 1, 16), (False, 300), True),
        ((7, 1, 5), (True, 5), True),
    ],
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_triton_equals_the_definition(
    heads: tuple[int, int, int], sight: tuple[bool, int | None], biased: bool
) -> None:
    """Compiled where there is a GPU, else in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for softcap in (None, 0.8):
        batch = Batch.create(
            heads, sight, biased=biased, shapes=FEW_SHAPES, device=device, softcap=softcap
        )
        assert error(batch.by_triton(), batch.defined()) < 1e-5


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.usefixtures("way")
def test_bfloat16_is_as_close_as_plain_torch(heads: tuple[int, int, int]) -> None:
    """Rounding errors stay below 3 times those of the definition computed in bfloat16
    throughout.
    """
    for sight, biased in product(((False, None), (True, 20)), (False, True)):
        batch = Batch.create(heads, sight, biased=biased, dtype=torch.bfloat16)
        got, wanted = batch.attend(), batch.defined()
        assert got.dtype is torch.bfloat16
        assert error(got, wanted) < 3 * error(batch.defined(torch.bfloat16), wanted)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_triton_in_float16_is_as_close_as_plain_torch() -> None:
    """Triton's interpreter multiplies no bfloat16 matrices; bfloat16 is tested on the
    accelerator.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = Batch.create(
        (2, 1, 16), (True, None), biased=True, shapes=FEW_SHAPES, dtype=torch.float16, device=device
    )
    got, wanted = batch.by_triton(), batch.defined()
    assert got.dtype is torch.float16
    assert error(got, wanted) < 3 * error(batch.defined(torch.float16), wanted)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sight", [(False, None), (True, None), (True, 5)])
def test_last_row_of_each_sequence_equals_that_row_of_all(
    heads: tuple[int, int, int], sight: tuple[bool, int | None], way: str
) -> None:
    shapes = tuple((n, n) for n in (1, 7, 7, 30, 200))
    whole = Batch.create(heads, sight, biased=True, shapes=shapes)
    last = torch.tensor([sum(n for n, _ in shapes[: i + 1]) - 1 for i in range(len(shapes))])
    rows = Batch(
        tuple((1, n) for n, _ in shapes),
        whole.q[last],
        whole.k,
        whole.v,
        whole.bias,
        whole.causal,
        whole.window,
    )
    assert error(rows.attend(), whole.attend()[last]) < 1e-5, way


def test_order_and_neighbours_do_not_matter() -> None:
    """The same sequences in another order, so in other runs."""
    straight = Batch.create(
        (4, 4, 32), (False, 5), shapes=tuple((n, n) for n in (1, 1, 7, 7, 7, 30, 64, 200))
    )
    order = [7, 2, 0, 5, 3, 6, 1, 4]
    lengths = [n for n, _ in straight.shapes]
    q, k, v = (
        torch.cat([t.split(lengths)[i] for i in order])
        for t in (straight.q, straight.k, straight.v)
    )
    turned = Batch(
        tuple(straight.shapes[i] for i in order), q, k, v, None, straight.causal, straight.window
    )
    wanted = straight.attend().split(lengths)
    assert error(turned.attend(), torch.cat([wanted[i] for i in order])) < 1e-6


def test_layers_of_one_kind_share_masks_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    use_dense(monkeypatch)
    made: list[int] = []
    make = dense._by_distance

    def counted(table: Tensor, behind: int, rows: int, keys: int) -> Tensor:
        made.append(rows)
        return make(table, behind, rows, keys)

    monkeypatch.setattr(dense, "_by_distance", counted)
    for sight, biased in product(SIGHT[1:], (False, True)):
        batch = Batch.create((4, 2, 16), sight, biased=biased)
        layout = batch.layout
        first = batch.attend(layout)
        # One matrix, but for last rows alone, which are a slice of the table.
        assert sum(rows > 1 for rows in made) <= 1
        made.clear()
        assert torch.equal(batch.attend(layout), first)
        assert not made


@pytest.mark.parametrize("kept", ["fused", "products", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_never_hold_all_scores(
    kept: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One number for each query, key and head would be 2 million."""
    if kept == "native":
        use_native(monkeypatch, request.getfixturevalue("library"), "avx2")
    else:
        use_dense(monkeypatch)
        monkeypatch.setattr(dense, "_prefers_fused", lambda q, run: kept == "fused")
    length = 1024
    for sight, biased in product(((False, None), (True, None), (False, 64)), (False, True)):
        batch = Batch.create(
            (2, 1, 8), sight, biased=biased, shapes=((length, length),), dtype=dtype, reach=length
        )
        with Largest() as largest:
            batch.attend()
        assert 0 < largest.numbers <= dense._MAX_SCORES


def test_nothing_is_read_on_the_host() -> None:
    """Reading a value raises on the meta device: tensors have no values there."""
    for sight, biased in product(SIGHT, (False, True)):
        batch = Batch.create((4, 2, 16), sight, biased=biased, device="meta")
        assert batch.attend().shape == batch.q.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("heads", [*HEADS, (4, 4, 64), (14, 2, 64), (2, 1, 256)])
@pytest.mark.parametrize("sight", SIGHT)
def test_accelerator_equals_the_definition(
    heads: tuple[int, int, int], sight: tuple[bool, int | None]
) -> None:
    """Whichever kernel takes it, in all types, and without waiting for the device.

    Errors of float32 grow with the head size: of 256 plain arithmetic on a CPU has 8.4e-6 here, too
    near to 1e-5 for a sum in another order.
    """
    float32 = 1e-5 if heads[2] < 256 else 2e-5
    aligned = tuple((own, seen) for own, seen in SHAPES if seen >= own)
    for (dtype, bound), biased, shapes in product(
        ((torch.float32, float32), (torch.bfloat16, 0.03), (torch.float16, 0.004)),
        (False, True),
        (SHAPES, aligned),
    ):
        batch = Batch.create(heads, sight, biased=biased, shapes=shapes, dtype=dtype, device="cuda")
        layout = batch.layout
        batch.attend(layout)  # kernels are compiled and loaded
        with no_synchronization():
            got = batch.attend(layout)
        assert error(got, batch.defined()) < bound


def test_torch_has_the_flash_operator() -> None:
    """The operator accepts the arguments of `varlen.py` on the meta device, without computing."""
    q, k = (torch.empty(6, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    for sides in ((-1, -1), (-1, 0), (5, 5), (5, 0)):
        assert varlen._torch_flash(q, k, k, ends, ends, 4, 4, 0.3, sides).shape == q.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@pytest.mark.parametrize("sight", [(False, None), (True, None), (False, 5), (True, 5)])
@pytest.mark.parametrize("heads", [(4, 4, 64), (14, 2, 64), (2, 1, 256)])
def test_flash_operator_equals_torchs_own_call_of_it(
    heads: tuple[int, int, int], sight: tuple[bool, int | None]
) -> None:
    """`varlen_attn` of this torch gives the operator the same arguments. From torch 2.12 on it must
    be asked for shared heads.
    """
    batch = Batch.create(
        heads,
        sight,
        shapes=((1, 1), (7, 7), (40, 90), (200, 200)),
        dtype=torch.bfloat16,
        device="cuda",
    )
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    grouped = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )
    (causal, window), layout = sight, batch.layout
    sides = (-1 if window is None else window, 0 if causal else -1 if window is None else window)
    ends = layout.cu_queries, layout.cu_keys, layout.max_queries, layout.max_keys
    wanted = varlen_attn(
        batch.q, batch.k, batch.v, *ends, scale=batch.scale, window_size=sides, **grouped
    )
    assert torch.equal(
        varlen._torch_flash(batch.q, batch.k, batch.v, *ends, batch.scale, sides), wanted
    )


@pytest.mark.parametrize(
    "files",
    [
        (),
        ("__init__.py", "cute/__init__.py"),
        ("__init__.py", "flash_attn_interface.py"),
        ("cute/__init__.py",),
    ],
)
def test_flash_attn_is_used_only_with_its_interface(
    files: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package flash-attn 4, or its namespace, has the same name."""
    for file in files:
        (tmp_path / "flash_attn" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "flash_attn" / file).write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    try:
        assert varlen._has_flash_attn() is ("flash_attn_interface.py" in files)
    finally:
        sys.modules.pop("flash_attn", None)

"""The native library: that it is used here, all lengths and sizes, threads, and when torch's
operators take over.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from libs.kernels import native
from libs.kernels.attention import dense
from libs.kernels.layout import BatchLayout
from libs.kernels.native import attention, build, trial
from libs.kernels.native import library as loading
from libs.kernels.native.library import SETS, Native
from tests.kernels.batches import Batch, error
from tests.kernels.largest import Largest
from tests.kernels.ways import use_dense, use_native

ROOT = Path(__file__).parents[2]
EVERY = tuple(
    (n, n) for n in (*range(1, 70), 95, 96, 97, 127, 128, 129, 130, 255, 256, 257, 511, 512)
)
SOME = EVERY[::5]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.fixture(params=SETS)
def instructions(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library: Path
) -> str:
    """Each instruction set that this CPU has; nothing falls back."""
    use_native(monkeypatch, library, request.param)
    monkeypatch.setattr(dense, "attend", _no_dense)
    return str(request.param)


def _no_dense(*arguments: object) -> Tensor:
    raise AssertionError("not computed by the native library")


def has_avx2() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and cpuinfo.exists() and " avx2 " in cpuinfo.read_text()


@pytest.mark.skipif(not has_avx2(), reason="this CPU has no kernel")
@pytest.mark.usefixtures("library")
def test_where_there_is_a_compiler_it_is_used() -> None:
    """The library does not fall back unnoticed: a separate process without the variable checks
    it.
    """
    script = "import torch; from libs.kernels import native; print(native.name())"
    variables = {
        name: value for name, value in os.environ.items() if name != "SHOAL_NATIVE_KERNELS"
    }
    reported = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert reported.stdout.strip() in SETS


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("instructions")
def test_every_length(dtype: torch.dtype) -> None:
    for dim, sight in (
        ((2, 2, 32), (False, None)),
        ((2, 1, 64), (True, None)),
        ((2, 2, 16), (False, 20)),
    ):
        batch = Batch.create(dim, sight, shapes=EVERY, dtype=dtype)
        assert error(batch.attend(), batch.defined()) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "dim", [1, 3, 8, 20, 24, 31, 33, 48, 64, 72, 80, 96, 112, 128, 192, 256, 300]
)
@pytest.mark.usefixtures("instructions")
def test_every_size_of_heads(dim: int, dtype: torch.dtype) -> None:
    batch = Batch.create((2, 1, dim), (True, 40), biased=True, shapes=SOME, dtype=dtype, reach=600)
    assert error(batch.attend(), batch.defined()) < 3 * BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("instructions")
def test_other_keys_than_queries(dtype: torch.dtype) -> None:
    """One query, the last few, keys for the first half only, and none at all, which makes zeros."""
    ends = [n for n, _ in EVERY]
    for few in (
        lambda n: (1, n),
        lambda n: (min(7, n), n),
        lambda n: (n, n // 2),
        lambda n: (n, 0 if n % 3 else n),
    ):
        for sight, biased in product(((False, None), (True, None), (False, 8)), (False, True)):
            batch = Batch.create(
                (2, 2, 32),
                sight,
                biased=biased,
                shapes=tuple(few(n) for n in ends),
                dtype=dtype,
                reach=600,
            )
            assert error(batch.attend(), batch.defined()) < BOUNDS[dtype]


@pytest.mark.usefixtures("instructions")
def test_sharp_scores() -> None:
    """Almost all of the weight on one key: up to 300 between scores, where weights underflow."""
    plain = Batch.create((2, 2, 64), shapes=EVERY)
    sharp = Batch(EVERY, plain.q * 8, plain.k * 8, plain.v, None, False, None)
    assert error(sharp.attend(), sharp.defined()) < 2e-4


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.usefixtures("instructions")
def test_nonfinite_numbers_stay_in_their_sequence(bad: float, dtype: torch.dtype) -> None:
    batch = Batch.create((2, 2, 32), shapes=((20, 20), (150, 150), (20, 20)), dtype=dtype)
    wanted = batch.attend()
    batch.q[25, 0, 3] = bad
    batch.k[30] = bad
    got = batch.attend()
    first, second, third = got.split((20, 150, 20))
    assert torch.equal(first, wanted[:20])
    assert torch.equal(third, wanted[170:])
    assert second.isnan().all(), "softmax of scores that are not numbers is none"


def in_a_frame(t: Tensor) -> Tensor:
    """The same as a view of a larger tensor, in which all around it is NaN."""
    frame = torch.full(
        (t.shape[0] + 2, t.shape[1] + 2, t.shape[2] + 3), float("nan"), dtype=t.dtype
    )
    frame[1:-1, 1:-1, 2:-1] = t
    return frame[1:-1, 1:-1, 2:-1]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.usefixtures("instructions")
def test_nothing_around_is_read(dtype: torch.dtype) -> None:
    """Rows before and after and the neighbouring heads are NaN, and rows begin at odd addresses."""
    for dim in (5, 16, 31, 64):
        plain = Batch.create((2, 2, dim), (False, 9), shapes=SOME, dtype=dtype)
        framed = Batch(
            SOME, in_a_frame(plain.q), in_a_frame(plain.k), in_a_frame(plain.v), None, False, 9
        )
        assert torch.equal(framed.attend(), plain.attend())


@pytest.mark.usefixtures("instructions")
def test_threads_compute_the_same() -> None:
    """One long sequence, many short ones, few heads that share their keys: divided in different
    ways.
    """
    before = torch.get_num_threads()
    for heads, shapes in (
        ((2, 1, 64), ((1100, 1100),)),
        ((8, 2, 32), EVERY),
        ((1, 1, 32), ((600, 700), (3, 3))),
    ):
        for sight in ((False, None), (True, 100)):
            batch = Batch.create(heads, sight, shapes=shapes)
            found = []
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                found.append(batch.attend())
            torch.set_num_threads(before)
            assert all(error(other, found[0]) < 1e-6 for other in found[1:])


@pytest.mark.usefixtures("instructions")
def test_batch_with_changed_biases() -> None:
    """The table of a bias is kept for the layers that share it, and only for them."""
    batch = Batch.create((2, 2, 16), biased=True)
    assert batch.bias is not None
    layout = batch.layout
    other = Batch(batch.shapes, batch.q, batch.k, batch.v, batch.bias * 2, False, None)
    for one in (batch, other, batch):
        assert error(one.attend(layout), one.defined()) < 1e-5


def test_unsupported_inputs_are_left_to_torch(library: Path) -> None:
    chosen = loading.load(library, "avx2")

    def takes(q: Tensor, k: Tensor, v: Tensor, layout: BatchLayout) -> bool:
        return attention.attend_with(chosen, q, k, v, layout, 0.3, False, None, None) is not None

    batch = Batch.create((2, 2, 16))
    q, k, v = batch.q, batch.k, batch.v
    assert takes(q, k, v, batch.layout)
    assert not takes(q.half(), k.half(), v.half(), batch.layout)
    assert not takes(q, k.bfloat16(), v, batch.layout)
    assert not takes(q.clone().requires_grad_(), k, v, batch.layout)
    assert not takes(q, k.mT.contiguous().mT, v, batch.layout), (
        "elements of a head that are not adjacent"
    )
    assert not takes(q, k, v[:, :, :8], batch.layout)
    assert not takes(q[1:], k, v, batch.layout), "a row too few"


@pytest.fixture
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is made once a process; here, by a function with a separate cache."""
    monkeypatch.setattr(loading, "choice", loading.choice.__wrapped__)


@pytest.mark.usefixtures("asked_anew")
def test_variable_turns_it_off(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.exists()
    monkeypatch.setenv("SHOAL_NATIVE_KERNELS", "0")
    assert native.name() == "none: SHOAL_NATIVE_KERNELS is 0"
    for value in ("1", ""):
        monkeypatch.setenv("SHOAL_NATIVE_KERNELS", value)
        assert native.name() in SETS or not has_avx2()


@pytest.mark.usefixtures("asked_anew")
def test_without_it_torch_computes(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each reason is the name that a worker logs, and attention is unchanged."""
    batch = Batch.create((4, 2, 16), (True, 20), biased=True)

    def is_left_out(reason: str) -> None:
        assert re.fullmatch(f"none: .*{reason}.*", native.name())
        assert error(batch.attend(), batch.defined()) < 1e-5

    monkeypatch.delenv("SHOAL_NATIVE_KERNELS", raising=False)
    monkeypatch.setattr(attention, "native", loading.native)
    with monkeypatch.context() as patch:
        patch.setattr(build, "library", lambda: tmp_path / "kernels.so")
        is_left_out("not built")
        (tmp_path / "kernels.so").write_text("no library")
        is_left_out("kernels.so")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_OPENMP", "libnobody.so.9")
        is_left_out("libnobody")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "TRIALS", [lambda loaded: "layers"])
        is_left_out("results differ")
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_open", lambda path: FakeOldCpu())
        is_left_out("AVX2")


class FakeOldCpu:
    """The library on a CPU that it has nothing for."""

    @staticmethod
    def shoal_instruction_set() -> int:
        return -1


def test_trial_finds_wrong_results(library: Path) -> None:
    good = loading.load(library, "avx2")
    assert not trial.wrong(good)
    assert (
        trial.wrong(Native("avx2", lambda packed, kind: 1, good.layer, good.rows)) == "softmax"
    ), "out of memory"

    def forgets_the_bias(packed: bytes, kind: int) -> int:
        return good.attention(packed[:48] + bytes(8) + packed[56:], kind)

    def takes_another_type(packed: bytes, kind: int) -> int:
        return good.attention(packed, 1)

    for wrong in (forgets_the_bias, takes_another_type):
        assert trial.wrong(Native("avx2", wrong, good.layer, good.rows)) == "softmax"


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("norm", "norms"),
        ("gate", "gates"),
        ("rotate", "rotations"),
        ("pool", "sums"),
        ("embed", "embeddings"),
        ("layer", "layers"),
    ],
)
def test_trial_finds_a_kernel_that_does_nothing(name: str, reported: str, library: Path) -> None:
    best = loading.instruction_sets(library)[-1]
    loaded = loading.load(library, best)
    if name == "layer" and not loaded.has_layers(torch.float32):
        pytest.skip("this CPU has no AVX512")
    assert loaded.rows is not None
    if name == "layer":
        loaded = Native(
            best, loaded.attention, lambda packed, kind: 0, loaded.rows, paged=loaded.paged
        )
    else:
        setattr(loaded.rows, name, lambda *arguments: 0)
    assert trial.wrong(loaded) == reported


@pytest.mark.usefixtures("asked_anew", "library")
def test_trial_is_not_counted_as_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the first forward that asks, under a mode that counts what lives
    (`libs/models/runtime/loaded/probe.py`).
    """
    monkeypatch.delenv("SHOAL_NATIVE_KERNELS", raising=False)
    with Largest() as largest:
        native.name()
    assert largest.numbers == 0


def test_memory_that_runs_out_leaves_it_to_torch(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_native(monkeypatch, library, "avx2")
    monkeypatch.setattr(attention, "native", lambda: Native("avx2", lambda packed, kind: 1))
    batch = Batch.create((4, 2, 16))
    assert error(batch.attend(), batch.defined()) < 1e-5


def test_dense_and_native_agree_in_a_model_of_both(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both results are as near to each other as to the definition."""
    batch = Batch.create((4, 2, 32), (False, 64), dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        use_dense(patch)
        by_torch = batch.attend()
    use_native(monkeypatch, library, "avx2")
    assert error(batch.attend(), by_torch) < 0.02


class TestBuild:
    def test_existing_library_is_not_built_again(self, library: Path) -> None:
        changed = library.stat().st_mtime_ns
        assert build.build() == library
        assert library.stat().st_mtime_ns == changed

    def test_other_sources_make_another_library(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """And so one that was built of older sources is not loaded."""
        monkeypatch.setattr(build, "SOURCE", shutil.copytree(build.SOURCE, tmp_path / "source"))
        names = {build.library().name}
        files = [file for file in build.SOURCE.rglob("*") if file.is_file()]
        for file in files:
            with file.open("a") as file_of_ours:
                file_of_ours.write("// more\n")
            names.add(build.library().name)
        assert len(files) > 20
        assert len(names) == 1 + len(files), "each of them counts"

    @pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="nothing is built here"
    )
    def test_without_a_compiler_one_line_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["build", str(tmp_path)])
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert build.main() == 0
        assert (
            capsys.readouterr().err
            == "native kernels were not built: no C++ compiler: neither $CXX nor g++ nor c++\n"
        )
        broken = tmp_path / "broken"
        broken.write_text("#!/bin/sh\necho no such option >&2; exit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CXX", str(broken))
        assert build.main() == 0
        assert "broken fails: no such option" in capsys.readouterr().err
        assert not list(tmp_path.glob("*.so"))

    def test_another_machine_gets_none(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
        with pytest.raises(build.CannotBuild, match="aarch64"):
            build.build(tmp_path)

    def test_it_runs_on_old_systems(self, library: Path) -> None:
        """The library runs where torch's wheels run (manylinux_2_28): it needs no symbol of a later
        glibc or libstdc++.
        """
        content = library.read_bytes()
        assert all(int(minor) <= 28 for minor in re.findall(rb"GLIBC_2\.(\d+)", content))
        assert all(int(minor) <= 24 for minor in re.findall(rb"GLIBCXX_3\.4\.(\d+)", content))
        assert b"libgomp.so.1" in content

"""The parts of a forward pass: from handwritten traces, and of real passes, where they must add up
to the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from statistics import median

import pytest
import torch

from libs.errors import TaskNotSupported
from libs.kernels import native
from libs.kernels.native import layer
from libs.kernels.native.library import native as native_library
from libs.models import PackedModel, load_model
from services.local.settings import MINILM, packaged_minilm
from services.worker.profile.forward import (
    ForwardProfile,
    ProfileBatch,
    fill,
    first_work,
    profile_forward,
)
from services.worker.profile.ranges import named_parts
from services.worker.profile.texts import generated
from services.worker.profile.trace import FORWARD, PARTS, PREFIX, Part, TraceSpan, forwards, read
from tests.parity.checkpoints import SentenceFiles, write_checkpoint

HOST, STREAM = ("1", "1"), ("0", "7")


def on_host(name: str, start: float, end: float, kind: str = "cpu_op", link: int = 0) -> TraceSpan:
    return TraceSpan(kind, name, HOST, start, end, link)


def in_range(name: str, start: float, end: float) -> TraceSpan:
    return on_host(name, start, end, "user_annotation")


def on_device(name: str, start: float, end: float, link: int, kind: str = "kernel") -> TraceSpan:
    return TraceSpan(kind, name, STREAM, start, end, link)


def microseconds(parts: Mapping[Part, float] | Mapping[str, float]) -> dict[str, float]:
    return {part: round(seconds * 1e6, 3) for part, seconds in parts.items() if seconds}


def test_operators_own_time_is_counted_once_and_in_the_innermost_range() -> None:
    spans = [
        in_range(FORWARD, 0, 100),
        in_range(f"{PREFIX}attention", 10, 60),
        in_range(f"{PREFIX}GEMM", 12, 30),
        on_host("aten::linear", 13, 29),
        on_host("aten::addmm", 14, 28),
        on_host("aten::bmm", 32, 50),
        on_host("aten::copy_", 40, 45),
        on_host("aten::gelu", 70, 80),
        on_host("aten::linear", 82, 90),
        TraceSpan("cpu_op", "aten::mm", ("1", "2"), 0, 100),  # on another thread
        on_host("aten::mm", 120, 130),  # after the pass
    ]
    (found,) = forwards(reversed(spans))
    assert found.seconds == pytest.approx(100e-6)
    assert microseconds(found.parts) == {
        "GEMM": 16 + 8,
        "attention": 18,
        "other": 10,
        "gaps": 100 - 16 - 18 - 10 - 8,
    }
    assert microseconds(found.inside["attention"]) == {"aten::bmm": 13, "aten::copy_": 5}
    assert microseconds(found.inside["gaps"]) == {"attention": 14, "GEMM": 2, "between them": 32}


def test_gaps_are_measured_independently() -> None:
    """If a trace is not a tree, or kernels run in parallel, the sum shows it."""
    host = [in_range(FORWARD, 0, 100), on_host("aten::mm", 0, 60), on_host("aten::mm", 40, 100)]
    launches = [on_host("cudaLaunchKernel", at, at + 1, "cuda_runtime", at) for at in (1, 2)]
    device = [
        in_range(FORWARD, 0, 100),
        *launches,
        *(on_device("kernel", 10, 90, link) for link in (1, 2)),
    ]
    for spans, counted in ((host, 60), (device, 80 + 80 + 20)):
        (found,) = forwards(spans)
        assert sum(found.parts.values()) * 1e6 == pytest.approx(counted)


def test_device_kernels_belong_to_the_part_that_launched_them() -> None:
    launch = "cudaLaunchKernel"
    spans = [
        in_range(FORWARD, 0, 100),
        on_host("cudaMemcpyAsync", 1, 2, "cuda_runtime", 1),
        in_range(f"{PREFIX}GEMM", 5, 10),
        on_host("aten::addmm", 5, 9),
        on_host(launch, 6, 7, "cuda_runtime", 2),
        in_range(f"{PREFIX}norm", 11, 14),
        on_host("cuLaunchKernelEx", 12, 13, "cuda_driver", 3),
        on_host("aten::mul", 15, 18),
        on_host(launch, 16, 17, "cuda_runtime", 4),
        in_range(f"{PREFIX}pooling", 20, 30),
        on_host("aten::linear", 21, 25),
        on_host(launch, 22, 23, "cuda_runtime", 5),
        on_host("aten::sum", 26, 29),
        on_host(launch, 27, 28, "cuda_runtime", 6),
        on_device("Memcpy HtoD (Pinned -> Device)", 3, 5, 1, "gpu_memcpy"),
        on_device("gemm_kernel", 10, 40, 2),
        on_device("_norm", 40, 45, 3),
        on_device("mul_kernel", 46, 50, 4),
        on_device("gemm_kernel", 60, 70, 5),
        on_device("sum_kernel", 70, 75, 6),
        on_device("of another forward", 76, 99, 77),
    ]
    (found,) = forwards(spans)
    assert microseconds(found.parts) == {
        "copy": 2,
        "GEMM": 40,
        "norm": 5,
        "other": 4,
        "pooling": 5,
        "gaps": 3 + 5 + 1 + 10 + 25,
    }
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def embedder(directory: Path, kind: str = "bert") -> PackedModel:
    files = SentenceFiles(max_seq_length=128, dense=16)
    write_checkpoint(kind, directory, sentence=files)
    return load_model(directory, "org/small", torch.device("cpu"), torch.float32)


def profiled(model: PackedModel, tokens: int = 1024, trace: Path | None = None) -> ForwardProfile:
    batch = fill(model, generated(), tokens, 512)
    return profile_forward(model, batch, runs=5, device="cpu", threads=1, trace=trace)


def assert_adds_up(found: ForwardProfile) -> None:
    """Check that operators' times and the separately measured gaps add up to the whole within 5
    %.
    """
    assert set(found.parts) == set(PARTS)
    assert min(found.parts.values()) >= 0
    assert abs(found.covered - 1) <= 0.05
    for part in PARTS:
        assert sum(found.inside[part].values()) == pytest.approx(
            found.parts[part], rel=0.01, abs=2e-5
        )


@pytest.fixture
def by_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fused layers."""
    monkeypatch.setattr(layer, "LAYER_DTYPES", frozenset())


@pytest.mark.parametrize("kind", ["bert", "modernbert", "deberta-v2", "qwen3"])
@pytest.mark.usefixtures("by_operators")
def test_parts_of_a_small_model_add_up(tmp_path: Path, kind: str) -> None:
    found = profiled(embedder(tmp_path, kind))
    assert_adds_up(found)
    assert not found.parts["layer"], "layers by operators"
    assert {part for part in PARTS if not found.parts[part]} <= {"layer", "copy", "other"}
    assert (found.dtype, found.runs, found.model) == ("float32", 5, "org/small")
    assert 0 < found.tokens <= 1024
    assert min(found.prepare_seconds, found.finish_seconds, found.plain_seconds) > 0


def test_fused_layers_are_a_part(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    library = native_library()
    if library is None or not library.has_layers(torch.float32):
        pytest.skip("this CPU has no AVX512, or the native library is missing")
    found = profiled(model, tokens=32)
    assert_adds_up(found)
    assert found.inside["layer"]["native::layer"] > 0
    assert "native::layer" not in found.inside["other"]
    assert not any(
        "_linear_pointwise" in name for inside in found.inside.values() for name in inside
    )


@pytest.mark.usefixtures("by_operators")
def test_parts_of_minilm_add_up(tmp_path: Path) -> None:
    directory = packaged_minilm()
    assert directory is not None
    model = load_model(directory, MINILM, torch.device("cpu"), torch.float32)
    found = profiled(model, trace=tmp_path / "trace.json")
    assert_adds_up(found)
    assert found.parts["GEMM"] > found.parts["norm"]
    assert ("native::attention" in found.inside["attention"]) == (
        not native.name().startswith("none")
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (
        sum(event.get("name") == FORWARD for event in events) == 6
    )  # the first one is not counted
    assert len(forwards(read(tmp_path / "trace.json"))) == 6


def test_matrix_products_in_a_head_are_gemm(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path, head="sequence_classification")
    found = profiled(load_model(tmp_path, "org/rank", torch.device("cpu"), torch.float32))
    assert_adds_up(found)
    assert found.parts["pooling"] > 0


def test_profiling_leaves_the_model_unchanged(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    modules = [*model.backbones[0].encoder.modules()]
    before = [dict(module.__dict__) for module in modules]
    attend = native.attend
    with named_parts(model):
        assert any("forward" in module.__dict__ for module in modules)
        assert native.attend is not attend
    assert native.attend is attend
    assert [dict(module.__dict__) for module in modules] == before
    with pytest.raises(RuntimeError), named_parts(model):
        raise RuntimeError
    assert [dict(module.__dict__) for module in modules] == before


def test_batch_is_filled_to_the_limit(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    batch = fill(model, generated(), 300, 512)
    more = model.prepare(first_work(model, [*islice(generated(), len(batch.texts) + 1)])).tokens
    assert batch.tokens <= 300 < more
    assert len(fill(model, generated(), 10_000, 3).texts) == 3
    assert len(fill(model, iter(["a text that is longer than the budget", "b"]), 1, 512).texts) == 1


def test_generated_texts_have_the_lengths_of_the_benchmarks() -> None:
    lengths = sorted(len(text.split()) for text in islice(generated(), 2000))
    assert 31 <= median(lengths) <= 38
    assert 120 <= lengths[int(0.95 * len(lengths))] <= 160
    assert [*islice(generated(), 5)] == [*islice(generated(), 5)]


def test_model_without_a_forward_pass_is_refused(tmp_path: Path) -> None:
    model = embedder(tmp_path)
    with pytest.raises(TaskNotSupported, match="no forward pass"):
        profile_forward(
            model, ProfileBatch([], first_work(model, []), 0), runs=1, device="cpu", threads=1
        )

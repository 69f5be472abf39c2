"""Every step of benchmarks/gpu exists, reports a missing GPU, keeps its measurements, and follows
the schema.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import published
from benchmarks.gpu.context import PEAKS, NotHere, StepContext, open_context
from benchmarks.gpu.report import (
    NO_CUDA,
    ROOT,
    Row,
    StepReport,
    StepTarget,
    faults,
    read,
    tree_name,
)
from benchmarks.gpu.steps import BY_NAME, STEPS, Step, kernels
from benchmarks.gpu.steps.latency import query
from benchmarks.models.families import PUBLISHED
from tests.parity.checkpoints import random_model


@pytest.fixture
def context(tmp_path: Path) -> StepContext:
    return open_context("swap", "cpu", is_tiny=True, seconds=60, folder=tmp_path)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_has_its_module(step: Step) -> None:
    module = importlib.import_module(f"benchmarks.gpu.steps.{step.name}")
    assert list(inspect.signature(module.run).parameters) == ["context"]
    assert all((ROOT / name).exists() for name in step.covers)


def test_names_of_steps_differ() -> None:
    assert len(STEPS) == len(BY_NAME)


def test_measurements_are_written_immediately(context: StepContext, tmp_path: Path) -> None:
    def fails() -> Row:
        raise RuntimeError("the driver is gone")

    def is_not_here() -> Row:
        raise NotHere("no flash-attn")

    context.measure("a", lambda: {"seconds": 1.0, "none": float("nan")})
    context.measure("b", dict, needs_cuda=True)
    context.measure("c", fails)
    context.measure("d", is_not_here)
    context.target("a's seconds", 2.0, "s", context.report.number("a", "seconds"), at_most=True)
    reported = json.loads((tmp_path / "swap.json").read_text())
    assert faults(reported) == []
    rows = {row["what"]: row for row in reported["rows"]}
    assert (rows["a"]["seconds"], rows["a"]["none"], rows["b"]["skipped"]) == (1.0, None, NO_CUDA)
    assert (rows["c"]["error"], rows["d"]["skipped"]) == (
        "RuntimeError: the driver is gone",
        "no flash-attn",
    )
    report = read(tmp_path / "swap.json")
    assert report.is_rehearsal
    assert [one.met for one in report.targets] == [None]  # a rehearsal meets none
    assert "4 rows, 1 failed, 2 skipped; 0 of 1 targets met" in report.line()


def test_earlier_measurements_are_kept_and_time_ends(context: StepContext) -> None:
    context.kept = frozenset({"a"})
    context.measure("a", lambda: {"seconds": 1.0})
    assert context.report.rows == []
    context.ends = time.monotonic()
    context.measure("b", lambda: {"seconds": 1.0})
    assert (context.report.rows, context.report.status, context.report.reason) == (
        [],
        "partial",
        "out of time",
    )


def test_targets() -> None:
    assert [StepTarget("t", 3, "x", value).met for value in (3.0, 2.9, None)] == [True, False, None]
    assert [StepTarget("t", 3, "x", value, at_most=True).met for value in (3.0, 3.1)] == [
        True,
        False,
    ]


def test_invalid_reports_are_named(tmp_path: Path) -> None:
    reported = json.loads(StepReport("swap").to_json())
    assert faults(reported) == []
    assert faults([]) == ["no object"]
    assert faults({**reported, "schema": 2}) == ["schema 2, not 1"]
    assert faults({**reported, "status": "fine", "rows": [{}]}) == [
        "status 'fine'",
        "a row has no name `what`",
    ]
    assert faults({**reported, "more": 1}) == ["more is not known"]
    assert faults({name: value for name, value in reported.items() if name != "tree"}) == [
        "tree is missing"
    ]
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="step is missing"):
        read(tmp_path / "a.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_step_is_run_in_a_process_and_not_again(tmp_path: Path) -> None:
    """Without a GPU, when one is asked for."""
    options = runner.Options(
        "cuda", is_tiny=True, again=False, out=tmp_path / "out", state=tmp_path / "state"
    )
    report = runner.run_step(BY_NAME["swap"], options, 120)
    assert (report.status, report.reason) == ("skipped", NO_CUDA)
    assert runner.run_step(BY_NAME["swap"], options, 0).status == "skipped"
    runner.collect(options)
    again = tmp_path / "another-machine"
    runner.seed(tmp_path / "out/reports.json", again)
    assert read(again / "swap.json") == read(tmp_path / "state/swap.json")


def test_report_is_void_when_a_file_that_the_step_covers_changes(tmp_path: Path) -> None:
    options = runner.Options("cpu", is_tiny=True, again=False, out=tmp_path / "out", state=tmp_path)
    step = BY_NAME["swap"]
    StepReport("swap", status="done", tree=tree_name(step.covers)).write(tmp_path)
    assert runner.run_step(step, options, 0).status == "done"
    StepReport("swap", status="done", tree="of other files").write(tmp_path)
    assert runner.run_step(step, options, 0).reason == "not begun: out of time"


def test_step_that_there_is_no_time_for_is_left(tmp_path: Path) -> None:
    options = runner.Options(
        "cpu", is_tiny=True, again=False, out=tmp_path / "out", state=tmp_path / "state"
    )
    assert runner.run_step(BY_NAME["mesh"], options, 1).reason == "not begun: out of time"
    assert read(tmp_path / "state/mesh.json").status == "partial"


def test_process_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.0)
    log = tmp_path / "log"
    assert (
        runner._run(["bash", "-c", "echo begun; sleep 600 & wait"], os.environ, log, 0.5)
        == "killed"
    )
    assert runner._run(["bash", "-c", "echo begun; exit 3"], os.environ, log, 60) == "status 3"
    assert log.read_text() == "begun\n"


def test_steps_that_move_models_have_a_workers_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    found = {
        step.name
        for step in STEPS
        if runner.step_environment(step).get("PYTORCH_ALLOC_CONF") == "expandable_segments:True"
    }
    assert found == {"families", "swap", "memory"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert runner.step_environment(BY_NAME["swap"])["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_tests_that_need_a_gpu_are_named_as_they_are() -> None:
    for one in kernels.TINY:
        path, _, name = one.partition("::")
        assert f"def {name}" in (ROOT / path).read_text()


def test_flops_of_a_forward(context: StepContext) -> None:
    shape = next(one for one in published.shapes(context) if one.name == "BERT-base")
    model = random_model(
        shape.kind,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        vocabulary=400,
        config=shape.config,
    )
    linear = shape.layers * (4 * 32 * 32 + 2 * 32 * 64)
    assert published.flops(model, shape, [10, 3]) == 2 * linear * 13 + 4 * 32 * shape.layers * (
        100 + 9
    )
    assert [
        published._pairs(4, *sight)
        for sight in ((False, None), (True, None), (False, 2), (True, 2))
    ] == [16, 10, 8, 7]


def test_published_shapes_have_a_step_and_gpus_a_peak() -> None:
    from benchmarks.gpu.steps import families, latency, profile, swap

    names = {shape.name for shape in PUBLISHED}
    assert set(families.ORDER) == names
    assert {*latency.NAMES, *profile.NAMES, *swap.NAMES} <= names
    assert next(peak for part, peak in PEAKS.items() if part in "NVIDIA H200") == 989e12


def test_query_has_its_length() -> None:
    assert query(lambda text: len(text.split()) + 2) == "a b c d e f g h i j"

"""`shoal profile`: the whole command with a real model and a real mesh, and its refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from shoal.cli import main, plugins
from shoal.results import Timings
from typer.testing import CliRunner, Result

from services.local.profile.request import summed
from services.local.settings import MINILM
from services.worker.profile.trace import PARTS
from tests.parity.checkpoints import SentenceFiles, write_checkpoint

PROFILE = EntryPoint("profile", "services.local.profile.command:profile", plugins.GROUP)
SHORT = ("--threads", "1", "--runs", "3", "--batch-tokens", "256")
STAGES = ["client and wire", "router", "queue", "prepare", "wait", "forward", "finish"]
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(plugins, "entry_points", lambda group: (PROFILE,))
    monkeypatch.setenv("SHOAL_STORES", "")
    for name in ("SHOAL_MODELS", "SHOAL_CATALOG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str | Path) -> Result:
        done = CliRunner().invoke(main.build(), ["profile", *map(str, arguments)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return invoke


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_checkpoint("bert", tmp_path / "org" / "small", sentence=SentenceFiles())


def test_minilm_as_json_with_its_trace_and_its_image(run: Run, tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.json", tmp_path / "parts.svg"
    done = run(MINILM, *SHORT, "--requests", "4", "--json", "--trace", trace, "--plot", plot)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    forward, request = found["forward"], found["request"]
    assert (forward["model"], forward["device"], forward["threads"]) == (MINILM, "cpu", 1)
    assert set(forward["parts"]) == set(PARTS)
    assert abs(forward["covered"] - 1) <= 0.05
    assert forward["covered"] == pytest.approx(sum(forward["parts"].values()) / forward["seconds"])
    assert request["requests"] == 4
    assert [stage["name"] for stage in request["stages"]] == STAGES
    assert sum(stage["seconds"] for stage in request["stages"]) == pytest.approx(request["seconds"])
    assert {"forward", "prepare", "queue"} <= {
        stage["name"] for stage in request["stages"] if stage["seconds"] > 0
    }
    assert json.loads(trace.read_text())["traceEvents"]
    assert "GEMM" in plot.read_text() or "<svg" in plot.read_text()


def test_tables_of_a_directory_with_texts_of_a_file(run: Run, small: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a first text\n\nand a second one\n")
    done = run(small, *SHORT, "--requests", "0", "--texts", texts)
    assert done.exit_code == 0
    for wanted in (
        "org/small: a forward pass of",
        "float32" if "float32" in done.stdout else "bfloat16",
        "GEMM",
        "attention",
        "gaps",
    ):
        assert wanted in done.stdout
    for wanted in ("sum of the parts", "whole", "without the profiler", "tokenise", "█"):
        assert wanted in done.stdout
    assert "client and wire" not in done.stdout


def test_model_by_its_name(run: Run, small: Path) -> None:
    done = run(
        "my/model",
        "--model",
        f"my/model={small}",
        *SHORT,
        "--requests",
        "0",
        "--dtype",
        "float32",
        "--json",
    )
    assert json.loads(done.stdout)["forward"]["model"] == "my/model"
    assert json.loads(done.stdout)["request"] is None


def test_time_between_known_stages_is_attributed() -> None:
    reported = Timings(0.001, 0.002, 0.003, 0.010, 0.001, 0.020)
    found = summed([(0.025, reported), (0.035, reported)])
    seconds = {stage.name: round(stage.seconds, 6) for stage in found.stages}
    assert list(seconds) == STAGES
    assert (seconds["client and wire"], seconds["router"]) == (0.010, 0.003)
    assert sum(seconds.values()) == pytest.approx(found.seconds) == pytest.approx(0.030)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no/such"], "SHOAL_MODELS"),
        (["nonsense"], "neither a directory nor a model id"),
        ([MINILM, "--model", "a/b=/no/such"], "/no/such is not a directory"),
        ([MINILM, "--texts", "/no/such.txt"], "No such file"),
        ([MINILM, "--texts", "/dev/null"], "/dev/null contains no text"),
        ([MINILM, "--trace", "trace.txt"], "must end in .json"),
        (
            [MINILM, "--trace", "/no/such/trace.json"],
            "the directory /no/such to write to does not exist",
        ),
        ([MINILM, "--plot", "parts.txt"], "must end in .png, .svg, .pdf"),
    ],
)
def test_command_that_cannot_be_profiled_is_explained(
    run: Run, arguments: Sequence[str], problem: str
) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert problem in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_device_is_reported(run: Run) -> None:
    done = run(MINILM, "--device", "cuda")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "torch finds no such device" in done.stderr


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run(MINILM, "--plot", "parts.svg")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "pip install 'shoal-mesh[plot]'" in done.stderr


def test_wrong_options_are_refused(run: Run) -> None:
    for options in (("--runs", "0"), ("--threads", "0"), ("--dtype", "int4"), ("--device", "tpu")):
        assert run(MINILM, *options).exit_code == 2

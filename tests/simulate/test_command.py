"""`shoal simulate` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.errors import InvalidInput
from services.scheduler.simulate.command import app, parse_size

SMALL = ("--zipf", "1.1", "--models", "8", "--requests", "300", "--seeds", "2")


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


def run(*arguments: str | Path) -> Ran:
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "200"}
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, " ".join(result.stderr.split()))


def test_policies_are_compared_in_a_table_that_people_can_read() -> None:
    ran = run(*SMALL)
    assert ran.code == 0
    for words in (
        "zipf 1.1, seed 0 and 1 more, mean",
        "stall",
        "of LRU's",
        "lru",
        "gdsf",
        "cost",
        "clairvoyant",
        "100%",
    ):
        assert words in ran.out


def test_json_has_every_run_of_the_cross_product() -> None:
    ran = run(
        *SMALL,
        "--memory",
        "16GiB",
        "--memory",
        "20GiB",
        "--workers",
        "1",
        "--workers",
        "2",
        "--policy",
        "lru",
        "--json",
    )
    assert ran.code == 0
    runs = ran.json()
    assert len(runs) == 2 * 2 * 2
    assert {(run["fleet"]["memory_bytes"] // 2**30, run["fleet"]["workers"]) for run in runs} == {
        (16, 1),
        (16, 2),
        (20, 1),
        (20, 2),
    }
    assert all(run["requests"] == 300 and run["policy"] == "lru" for run in runs)
    assert run(*SMALL, "--memory", "16GiB", "--json", "--policy", "lru").out != ran.out


def test_saved_trace_is_replayed_with_its_models_file(tmp_path: Path) -> None:
    trace = tmp_path / "made.csv"
    made = run("replay", *SMALL, "--seeds", "1", "--save", trace, "--memory", "16GiB", "--json")
    again = run(trace, "--memory", "16GiB", "--json")
    assert again.code == made.code == 0
    assert [one["cold_loads"] for one in again.json()] == [one["cold_loads"] for one in made.json()]
    (tmp_path / "made.models.csv").rename(tmp_path / "elsewhere.csv")
    assert (
        run(trace, "--models-file", tmp_path / "elsewhere.csv", "--memory", "16GiB", "--json").out
        == again.out
    )
    without = run(trace)
    assert without.code == 2
    assert f"error: {trace}:2: bytes: the costs of model-" in without.err


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_stalls_are_drawn_over_memory_or_as_bars(tmp_path: Path, kind: str) -> None:
    lines, bars = tmp_path / f"lines.{kind}", tmp_path / f"bars.{kind}"
    assert (
        run(*SMALL, "--seeds", "1", "--memory", "16GiB", "--memory", "20GiB", "--plot", lines).code
        == 0
    )
    assert run("--bursty", *SMALL[2:], "--plot", bars).code == 0
    start = b"<?xml" if kind == "svg" else b"\x89PNG"
    assert all(path.read_bytes().startswith(start) for path in (lines, bars))


def test_without_matplotlib_a_plot_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = run(*SMALL, "--plot", tmp_path / "stalls.svg")
    assert ran.code == 2
    assert "pip install 'shoal-mesh[plot]'" in ran.err


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ((), "give either a trace or one of --zipf SKEW, --bursty and --uniform"),
        (("--zipf", "1", "--uniform"), "--zipf and --uniform exclude each other"),
        (
            (*SMALL, "--policy", "mru"),
            "policy must be one of cost, lru, gdsf, clairvoyant, not 'mru'",
        ),
        ((*SMALL, "--memory", "much"), "'much' is not a size"),
        ((*SMALL, "--memory", "0"), "memory_bytes must be at least 1"),
        (
            (*SMALL, "--plot", "stalls.txt"),
            "a plot's file must end in .svg, .png, .pdf, not 'stalls.txt'",
        ),
        (
            ("record", "127.0.0.1:1", "-o", "/nowhere/trace.csv"),
            "the directory /nowhere does not exist",
        ),
    ],
)
def test_wrong_arguments_are_reported_without_traceback(
    arguments: tuple[str, ...], reported: str
) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert reported in ran.err


def test_missing_file_is_reported() -> None:
    ran = run("nowhere.csv")
    assert (ran.code, "nowhere.csv" in ran.err) == (1, True)


def test_help_names_both_commands_and_all_options_of_the_first() -> None:
    assert all(words in run("--help").out for words in ("replay", "record"))
    assert all(
        words in run("replay", "--help").out
        for words in ("--zipf", "--memory", "--plot", "--clients")
    )


def test_sizes_as_people_write_them() -> None:
    sizes = {
        "24GiB": 24 * 2**30,
        "800 MB": 800 * 10**6,
        "1.5g": 1_500_000_000,
        "4096": 4096,
        "2KiB": 2048,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    with pytest.raises(InvalidInput):
        parse_size("GiB")


def test_scaling_to_zero_is_reported_for_each_pool() -> None:
    few = ("scaling", "--visits", "3", "--seeds", "1")
    ran = run(*few, "--start", "60", "--start", "120")
    assert ran.code == 0
    for words in ("scaling to zero", "believed start", "60 s", "120 s", "600 s", "held"):
        assert words in ran.out
    outcomes = run(
        *few,
        "--start",
        "60",
        "--cooldown",
        "100",
        "--cooldown",
        "5000",
        "--configured",
        "30",
        "--json",
    ).json()
    assert [one["cluster"]["cooldown_seconds"] for one in outcomes] == [100.0, 5000.0]
    assert outcomes[0]["held_share"] < outcomes[1]["held_share"]
    assert all(
        one["answered"] == 3 and one["cluster"]["spec"]["cold_start_seconds"] == 30.0
        for one in outcomes
    )

"""The machinery of `make fuzz`, with targets that are known to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fuzz import known, run
from tests.fuzz.run import ROOT, Page, Row, Tries, save
from tests.fuzz.target import Broken, Internal, Target

TARGETS = {target.name: target for target in known.TARGETS}


def tried(name: str, folder: Path, seconds: float = 1.0) -> Row:
    (row,) = run.run([TARGETS[name]], seconds, 1, folder, lambda row, done: None, fork=False)
    return row


def test_exceptions_are_saved_once_per_place(tmp_path: Path) -> None:
    row = tried("fails", tmp_path, 4.0)
    assert row.inputs > 100
    assert (row.count("wrong"), row.count("internal")) == (1, 1)
    for finding in row.findings:
        with pytest.raises((ValueError, Internal)):
            known.fails(Path(finding.path).read_bytes())
        assert "begins with" in Path(finding.path).with_suffix(".txt").read_text()


@pytest.mark.parametrize(("name", "kind"), [("dies", "crash"), ("hangs", "hang")])
def test_crash_or_hang_identifies_its_input(name: str, kind: str, tmp_path: Path) -> None:
    row = tried(name, tmp_path)
    assert row.findings
    assert {finding.kind for finding in row.findings} == {kind}
    assert all(Path(finding.path).read_bytes().endswith(b"h") for finding in row.findings)


def test_memory_of_an_input_is_limited(tmp_path: Path) -> None:
    (finding,) = tried("grows", tmp_path).findings
    assert finding.what.startswith("MemoryError")


def test_finding_may_name_an_input_that_was_tried_earlier(tmp_path: Path) -> None:
    def late(data: bytes) -> None:
        raise Broken("late", b"earlier")

    page = Page(tmp_path / "page")
    Tries(Target("known", known.letters, lambda: nullcontext(late)), late, page, tmp_path).one(
        b"now"
    )
    assert page.input == b"now"
    assert [path.read_bytes() for path in (tmp_path / "known").glob("*.bin")] == [b"earlier"]


def test_command_reports_and_replays_inputs(tmp_path: Path) -> None:
    done = command(
        "--json",
        "--seconds",
        "2",
        "--seed",
        "1",
        "--target",
        "listings",
        "--findings",
        str(tmp_path),
    )
    (row,) = json.loads(done.stdout)["targets"]
    assert row["target"] == "listings"
    assert row["inputs"] > 0
    again = command("--replay", save(tmp_path, "listings", "wrong", "nothing", b"{}", "").path)
    assert "as it should be" in again.stdout


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'libs/api'}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done

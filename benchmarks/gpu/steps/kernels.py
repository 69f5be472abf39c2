"""Every kernel against its definition: tests/kernels, which compile the Triton kernels where there
is a GPU, and all other files that have tests marked gpu.

Run by pytest in several processes, since most of the time goes into compiling; a row for each test,
also of a run that is killed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from benchmarks.gpu import outcomes
from benchmarks.gpu.context import StepContext
from benchmarks.gpu.report import NO_CUDA, ROOT, Row

TESTS: Final = (
    "tests/kernels",
    *sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in file.read_text() and file.parent != ROOT / "tests/kernels"
    ),
)
TINY: Final = (
    "tests/kernels/test_linear.py",
    "tests/kernels/test_fused.py::test_seams_take_the_kernels_on_an_accelerator",
)
CPU_ONLY: Final = ("--ignore-glob=*/test_native*.py", "--ignore-glob=*/test_compiling.py")
"""Tests of the CPU's kernels and of compiling for other GPUs, which a GPU's time is not for."""

PLUGINS: Final = {"pytest_asyncio": "pytest_asyncio.plugin", "xdist": "xdist.plugin"}
"""pytest's plugins that the tests need, by the module that must be there. Others, which a machine
may have, could warn, and warnings are errors."""
PROCESSES: Final = 8


def run(context: StepContext) -> None:
    context.report.rows = []  # pytest runs all of them again
    tests = TINY if context.is_tiny else TESTS
    with tempfile.TemporaryDirectory() as folder:
        reported = Path(folder) / "outcomes.jsonl"
        reported.touch()
        status = _pytest(context, tests, reported)
        rows = [
            _row(json.loads(line), context.has_cuda) for line in reported.read_text().splitlines()
        ]
    context.report.rows = rows
    counts = Counter(
        "failed" if "error" in row else "skipped" if "skipped" in row else "passed" for row in rows
    )
    context.note(
        f"pytest: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}; "
        f"{status}"
    )
    context.target(
        "kernel tests that fail", 0, "tests", counts["failed"] if rows else None, at_most=True
    )
    if status != "status 0":
        context.report.status = "partial" if status == "out of time" else "failed"
        context.report.reason = f"pytest: {status}"
        context.save()


def _pytest(context: StepContext, tests: tuple[str, ...], reported: Path) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        outcomes.__name__,
        "-p",
        "no:cacheprovider",
        *CPU_ONLY,
        *tests,
    ]
    for module, plugin in PLUGINS.items():
        command += ["-p", plugin] if importlib.util.find_spec(module) is not None else []
    if importlib.util.find_spec("xdist") is not None and not context.is_tiny:
        command += ["-n", str(min(PROCESSES, len(os.sched_getaffinity(0))))]
    environment = os.environ | {outcomes.FILE: str(reported), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if not context.has_cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            check=False,
            timeout=max(1.0, context.seconds_left - 3),
        )
    except subprocess.TimeoutExpired:
        return "out of time"
    return f"status {done.returncode}"


def _row(reported: dict[str, str | float], has_cuda: bool) -> Row:
    row: Row = {"what": str(reported["test"]), "took_seconds": reported["seconds"]}
    if reported["outcome"] == "skipped":
        return row | {
            "skipped": str(reported["words"]) if has_cuda else f"{reported['words']}: {NO_CUDA}"
        }
    return row if reported["outcome"] == "passed" else row | {"error": str(reported["words"])}

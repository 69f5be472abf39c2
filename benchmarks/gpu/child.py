"""One step in a separate process, started by `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.context import NotHere, open_context
from benchmarks.gpu.report import StepReport, read, tree_name
from benchmarks.gpu.steps import BY_NAME


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=tuple(BY_NAME))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--state", type=Path, required=True)
    given = parser.parse_args()
    # Where it hangs, should it have to be killed.
    faulthandler.dump_traceback_later(given.seconds, exit=False)
    tree = tree_name(BY_NAME[given.step].covers)
    try:
        context = open_context(
            given.step, given.device, is_tiny=given.tiny, seconds=given.seconds, folder=given.state
        )
    except NotHere as error:
        StepReport(given.step, status="skipped", reason=str(error), tree=tree).write(given.state)
        return 0
    report = context.report
    report.tree, report.began = tree, datetime.now(UTC).isoformat(timespec="seconds")
    earlier = _earlier(given.state / f"{given.step}.json")
    if earlier is not None and (earlier.machine, earlier.tree) == (report.machine, report.tree):
        report.rows = [row for row in earlier.rows if "error" not in row]
        context.kept = frozenset(str(row["what"]) for row in report.rows)
    context.save()
    began = time.monotonic()
    importlib.import_module(f"benchmarks.gpu.steps.{given.step}").run(context)
    report.seconds = round(time.monotonic() - began, 1)
    if report.status == "running":
        failed = [str(row["what"]) for row in report.rows if "error" in row]
        report.status, report.reason = (
            ("failed", f"rows failed: {', '.join(failed)}") if failed else ("done", "")
        )
    context.save()
    return 0


def _earlier(file: Path) -> StepReport | None:
    try:
        return read(file)
    except (OSError, ValueError, TypeError):
        return None


if __name__ == "__main__":
    sys.exit(main())

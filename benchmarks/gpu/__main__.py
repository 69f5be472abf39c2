"""Runs steps one after another, each as a process of its own with a time limit: `python -m benchmarks.gpu [STEP...] [OPTIONS]`.

Each step writes `<step>.json` to --out and to --state after every row. A step that is through is left out when it is asked for
again (--again: it is not); one that was killed or ran out of time goes on where it stopped. The reply ends with a line for each
step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.report import LOG_BYTES, Report, read, tree_name
from benchmarks.gpu.steps import BY_NAME, STEPS, Step

STATE: Final = Path(".gpu/state")
GRACE_SECONDS: Final = 5.0
LEAST_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Options:
    device: str
    is_tiny: bool
    again: bool
    out: Path
    state: Path
    tree: str


def main() -> int:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("steps", nargs="*", help=f"all (the default), or of {', '.join(names)}")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether it runs, not how fast")
    parser.add_argument(
        "--seconds", type=float, default=555, help="for all steps together; what is not begun then is left for the next call"
    )
    parser.add_argument("--step-seconds", type=float, default=0, help="for each step, instead of its own limit")
    parser.add_argument("--again", action="store_true", help="also steps that are through")
    parser.add_argument("--out", type=Path, default=Path(".gpu/out"), help="the folder for results")
    parser.add_argument("--state", type=Path, default=STATE, help="the folder that tells which steps are through")
    given = parser.parse_args()
    asked = names if given.steps in ([], ["all"]) else given.steps
    if unknown := [name for name in asked if name not in BY_NAME]:
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    state = given.state / "-".join([given.device, *(["tiny"] if given.tiny else [])])
    options = Options(given.device, given.tiny, given.again, given.out.resolve(), state.resolve(), tree_name())
    ends = time.monotonic() + given.seconds
    reports = []
    for name in asked:
        step = BY_NAME[name]
        seconds = min(given.step_seconds or step.seconds, ends - time.monotonic())
        reports.append(run_step(step, options, seconds))
        print(reports[-1].line(), flush=True)
    print("\n" + "\n".join(report.line() for report in reports))
    return 0 if all(report.status in ("done", "skipped") for report in reports) else 1


def run_step(step: Step, options: Options, seconds: float) -> Report:
    """Its report, whatever became of it."""
    file = options.state / f"{step.name}.json"
    before = _earlier(file, options)
    if before is not None and before.status in ("done", "skipped"):
        before.write(options.out)
        return before
    if seconds < LEAST_SECONDS:
        left = before or Report(step.name, tree=options.tree)
        left.status, left.reason = "partial", "not begun: out of time"
        left.write(options.out)
        return left
    if before is None:
        file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.child", step.name, "--device", options.device, "--seconds", str(seconds)]
    command += ["--out", str(options.out), "--state", str(options.state), *(["--tiny"] if options.is_tiny else [])]
    with tempfile.NamedTemporaryFile(prefix=f"{step.name}-", suffix=".log") as log:
        began = time.monotonic()
        verdict = _run(command, Path(log.name), seconds)
        report = _earlier(file, options) or Report(step.name, status="failed", tree=options.tree)
        report.log_tail = Path(log.name).read_bytes()[-LOG_BYTES:].decode(errors="replace")
    report.seconds = round(time.monotonic() - began, 1)
    if verdict == "killed":
        report.status, report.reason = "killed", f"after {seconds:.0f} s; call it again to go on"
    elif report.status == "running":
        report.status, report.reason = "failed", f"the process ended with {verdict}"
    for folder in (options.state, options.out):
        report.write(folder)
    if report.status == "failed":
        print(report.log_tail[-3000:], file=sys.stderr)
    return report


def _earlier(file: Path, options: Options) -> Report | None:
    """The report of an earlier or of the present run, unless it is not to be gone on with."""
    if options.again and file.exists() and file.stat().st_mtime < _BEGAN:
        return None
    try:
        report = read(file)
    except (OSError, ValueError, TypeError):
        return None
    return report if report.tree in ("", options.tree) else None


def _run(command: Sequence[str], log: Path, seconds: float) -> str:
    """How the process ended: "status N", or "killed" with all that it has started. Its output is copied as it comes."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        told = 0
        ends = time.monotonic() + seconds + GRACE_SECONDS
        try:
            while process.poll() is None and time.monotonic() < ends:
                time.sleep(0.2)
                told = _copy(log, told)
            status = process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _copy(log, told)
    return "killed" if status is None else f"status {status}"


def _copy(log: Path, begin: int) -> int:
    with log.open("rb") as source:
        source.seek(begin)
        shutil.copyfileobj(source, sys.stdout.buffer)
        sys.stdout.flush()
        return source.tell()


_BEGAN = time.time()

if __name__ == "__main__":
    sys.exit(main())

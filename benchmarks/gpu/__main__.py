"""Run steps one after another, each in a separate process with a time limit: `python -m
benchmarks.gpu [STEP...] [OPTIONS]`.

Each step writes `<step>.json` to --state after every row; all of them together are `reports.json`
in --out, which can be given as --seed to be read as the state. A finished step is skipped when it
is requested again (unless with --again), unless a file that it covers has changed; a step that was
killed or ran out of time continues where it stopped. Steps that measure no time run side by side
before the others. The output ends with a line for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.gpu.report import LOG_BYTES, StepReport, read, tree_name
from benchmarks.gpu.steps import BY_NAME, STEPS, Step
from libs import memory

STATE: Final = Path(".gpu/state")
GRACE_SECONDS: Final = 5.0
MIN_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Options:
    device: str
    is_tiny: bool
    again: bool
    out: Path
    state: Path


def main() -> int:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("steps", nargs="*", help=f"all (the default), or of {', '.join(names)}")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes: whether it runs, not how fast"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=555,
        help="for all steps together; steps that have not begun then are left for the next call",
    )
    parser.add_argument(
        "--step-seconds", type=float, default=0, help="for each step, instead of its default limit"
    )
    parser.add_argument("--again", action="store_true", help="also steps that are through")
    parser.add_argument("--out", type=Path, default=Path(".gpu/out"), help="the folder for results")
    parser.add_argument(
        "--seed",
        type=Path,
        default=Path(".gpu/reports.json"),
        help="results of an earlier run, to go on from",
    )
    parser.add_argument(
        "--state", type=Path, default=STATE, help="the folder that records finished steps"
    )
    given = parser.parse_args()
    asked = names if given.steps in ([], ["all"]) else given.steps
    if unknown := [name for name in asked if name not in BY_NAME]:
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    state = given.state / "-".join([given.device, *(["tiny"] if given.tiny else [])])
    options = Options(given.device, given.tiny, given.again, given.out.resolve(), state.resolve())
    if given.seed.is_file():
        seed(given.seed, options.state)
    ends = time.monotonic() + given.seconds

    def run(step: Step) -> StepReport:
        report = run_step(
            step, options, min(given.step_seconds or step.seconds, ends - time.monotonic())
        )
        print(report.line(), flush=True)
        collect(options)
        return report

    steps = [BY_NAME[name] for name in asked]
    untimed = [step for step in steps if not step.is_timed]
    with ThreadPoolExecutor(max(1, len(untimed))) as pool:
        reports = list(pool.map(run, untimed))
    reports += [run(step) for step in steps if step.is_timed]
    print("\n" + "\n".join(report.line() for report in reports))
    return 0 if all(report.status in ("done", "skipped") for report in reports) else 1


def seed(file: Path, state: Path) -> None:
    """Write the reports of an earlier run, which `collect` made, into `state`, where there are none
    yet.
    """
    state.mkdir(parents=True, exist_ok=True)
    for step, report in json.loads(file.read_text()).items():
        if step in BY_NAME and not (state / f"{step}.json").exists():
            (state / f"{step}.json").write_text(json.dumps(report))


def collect(options: Options) -> None:
    """Write all reports as one file: a device tool may bring only a few files back."""
    files = (options.state / f"{step.name}.json" for step in STEPS)
    reports = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
    options.out.mkdir(parents=True, exist_ok=True)
    partial = options.out / f".reports.{threading.get_ident()}"
    partial.write_text(json.dumps(reports, indent=1))
    partial.replace(options.out / "reports.json")


def run_step(step: Step, options: Options, seconds: float) -> StepReport:
    """Its report, whatever became of it."""
    file = options.state / f"{step.name}.json"
    tree = tree_name(step.covers)
    before = _earlier(file, options, tree)
    if before is not None and before.status in ("done", "skipped"):
        return before
    if seconds < MIN_SECONDS:
        left = before or StepReport(step.name, tree=tree)
        left.status, left.reason = "partial", "not begun: out of time"
        left.write(options.state)
        return left
    if before is None:
        file.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.child",
        step.name,
        "--device",
        options.device,
        "--seconds",
        str(seconds),
    ]
    command += ["--state", str(options.state), *(["--tiny"] if options.is_tiny else [])]
    with tempfile.NamedTemporaryFile(prefix=f"{step.name}-", suffix=".log") as log:
        began = time.monotonic()
        verdict = _run(command, step_environment(step), Path(log.name), seconds)
        report = _earlier(file, options, tree) or StepReport(step.name, status="failed", tree=tree)
        report.log_tail = Path(log.name).read_bytes()[-LOG_BYTES:].decode(errors="replace")
    report.seconds = round(time.monotonic() - began, 1)
    if verdict == "killed":
        report.status, report.reason = "killed", f"after {seconds:.0f} s; call it again to go on"
    elif report.status == "running":
        report.status, report.reason = "failed", f"the process ended with {verdict}"
    report.write(options.state)
    if report.status == "failed":
        print(report.log_tail[-3000:], file=sys.stderr)
    return report


def _earlier(file: Path, options: Options, tree: str) -> StepReport | None:
    """The report of an earlier or of the present run, unless it is not to be gone on with."""
    if options.again and file.exists() and file.stat().st_mtime < _BEGAN:
        return None
    try:
        report = read(file)
    except (OSError, ValueError, TypeError):
        return None
    return report if report.tree in ("", tree) else None


def step_environment(step: Step) -> dict[str, str]:
    """The variables of a step's process: these of this one, and what torch reads once when it is
    imported.
    """
    environment = dict(os.environ)
    if step.is_expandable:
        memory.use_expandable_segments(environment)
    return environment


def _run(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> str:
    """Run the process and return its end: "status N", or "killed" with all that it has started. Its
    output is copied as it is written.
    """
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        reported = 0
        ends = time.monotonic() + seconds + GRACE_SECONDS
        try:
            while process.poll() is None and time.monotonic() < ends:
                time.sleep(0.2)
                reported = _copy(log, reported)
            status = process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _copy(log, reported)
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

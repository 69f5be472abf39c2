"""`make fuzz`: try generated inputs on all code that reads untrusted data, and report failures. See
docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.fuzz.run import FINDINGS, Row, run
from tests.fuzz.target import Target, all_targets

# Set before these modules are imported; processes of a run inherit them.
os.environ.update(OMP_NUM_THREADS="1", RUST_BACKTRACE="0", TOKENIZERS_PARALLELISM="false")


def main() -> int:
    arguments = _arguments().parse_args()
    wanted = arguments.target or ([arguments.replay.parent.name] if arguments.replay else [])
    targets = all_targets(wanted)
    if arguments.list:
        print("\n".join(targets))
        return 0
    unknown = [name for name in wanted if name not in targets]
    if unknown:
        print(f"unknown target {unknown[0]}; the targets are {', '.join(targets)}", file=sys.stderr)
        return 2
    if arguments.replay:
        return _replay(targets[wanted[0]], arguments.replay)
    chosen = [targets[name] for name in wanted or targets]
    seed = (
        arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    )
    folder = (arguments.findings or FINDINGS / time.strftime("%Y%m%d-%H%M%S")).absolute()
    rows = _run(chosen, arguments.seconds, seed, folder, quiet=arguments.json)
    _print_json(rows, seed) if arguments.json else _print_rows(rows, seed)
    return 1 if any(row.findings for row in rows) else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=480.0,
        help="of the whole run; plus the time to open targets",
    )
    parser.add_argument("--seed", type=int, help="the same seed makes the same inputs")
    parser.add_argument(
        "--target", action="append", help="only this one; may be given several times"
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="FILE",
        help="try one input, of the target that its folder is named for",
    )
    parser.add_argument(
        "--findings", type=Path, metavar="FOLDER", help="where inputs that found something go"
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--list", action="store_true", help="the names of all targets")
    return parser


def _replay(target: Target, file: Path) -> int:
    try:
        with target.open() as attempt:
            attempt(file.read_bytes())
    except BaseException:
        traceback.print_exc()
        return 1
    print(f"{target.name}: {file} is taken, or refused as it should be")
    return 0


def _run(
    targets: list[Target], seconds: float, seed: int, folder: Path, *, quiet: bool
) -> list[Row]:
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        TextColumn("{task.fields[reported]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        disable=quiet or not sys.stderr.isatty(),
        auto_refresh=False,
    ) as progress:
        task = progress.add_task("", total=1.0, reported="")
        inputs: dict[tuple[str, str], int] = {}

        def render(row: Row, done: float) -> None:
            inputs[row.target, row.engine] = row.inputs
            progress.update(
                task,
                completed=done,
                description=row.target,
                reported=f"{sum(inputs.values()):,} inputs",
                refresh=True,
            )

        return run(targets, seconds, seed, folder, render)


def _print_rows(rows: list[Row], seed: int) -> None:
    table = Table(title=f"seed {seed}")
    for name in (
        "target",
        "by",
        "inputs",
        "inputs/s",
        "crashes",
        "hangs",
        "INTERNAL",
        "wrong",
        "corpus",
    ):
        table.add_column(name, justify="left" if name in ("target", "by") else "right")
    for row in rows:
        counts = (
            row.count("crash"),
            row.count("hang"),
            row.count("internal"),
            row.count("wrong"),
            row.corpus,
        )
        table.add_row(
            row.target, row.engine, f"{row.inputs:,}", f"{row.rate:,.0f}", *map(str, counts)
        )
    table.add_section()
    findings = {finding.path: finding for row in rows for finding in row.findings}
    table.add_row("all", "", f"{sum(row.inputs for row in rows):,}", "", "", "", "", "", "")
    console = Console(width=120)
    console.print(table)
    for finding in findings.values():
        console.print(
            f"{finding.kind}: {finding.target}: {finding.what}\n  {finding.path}",
            markup=False,
            soft_wrap=True,
        )


def _print_json(rows: list[Row], seed: int) -> None:
    reported = [asdict(row) | {"rate": row.rate} for row in rows]
    print(
        json.dumps(
            {"seed": seed, "inputs": sum(row.inputs for row in rows), "targets": reported}, indent=1
        )
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measure a change of scaling: `python -m benchmarks.scheduler.scaling --before COMMIT`, or `make
bench-scaling`.

Simulates pools at zero with a visit every 25 minutes on average
(`services/scheduler/simulate/scaling.py`), with the scheduler of a commit and with this tree's, on
the same seeded visits. Prints a table in Markdown: means over the seeds. Needs git, and none of a
worker's dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from libs.catalog.pools import PoolSpec
from services.scheduler.simulate.scaling import Cluster, simulate, visits

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "06df497"
"""The commit before cold starts were counted from when a pool is needed."""
SIMULATOR = ("scaling.py", "hpa.py", "keda.py")
COLUMNS = (
    "start",
    "bursts",
    "scheduler",
    "L after each quarter",
    "longest L",
    "held",
    "machines",
    "cold starts",
    "most for short",
    "p50",
    "p99",
)


def outcomes(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every situation and seed, under the scheduler that is imported here."""
    for start, bursts, seed in product(options.start, options.bursts, range(options.seeds)):
        # Configured with the true value: the learnt value should stay there.
        spec = PoolSpec(
            "pool", max_workers=20, cold_start_seconds=60.0, node_seconds=max(0.0, start - 60.0)
        )
        cluster = Cluster(spec, start_seconds=start, cooldown_seconds=options.cooldown)
        outcome = simulate(cluster, visits(options.visits, options.gap, bursts, seed))
        yield {"start": start, "bursts": bursts, "seed": seed, **asdict(outcome)}


def extract_commit(commit: str, directory: Path) -> None:
    """The commit's code with this tree's simulator."""
    archive = directory / "tree.tar"
    subprocess.run(
        ["git", "archive", "-o", archive, commit, "libs", "services"], cwd=ROOT, check=True
    )
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    for name in SIMULATOR:
        shutil.copy(
            ROOT / "services/scheduler/simulate" / name,
            directory / "services/scheduler/simulate" / name,
        )
    (directory / "benchmarks/scheduler").mkdir(parents=True)
    shutil.copy(__file__, directory / "benchmarks/scheduler/scaling.py")


def started(directory: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scheduler.scaling", "--here", *arguments]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(directory), str(directory / "libs/api")))
    }
    return subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
    )


def row(scheduler: str, found: Sequence[dict[str, Any]]) -> list[str]:
    def average(key: str) -> float:
        return float(mean(one[key] for one in found))

    quarters = [
        mean(values) for values in zip(*(one["cold_start_seconds"] for one in found), strict=True)
    ]
    each = [f"{one['held_share']:.0%}" for one in found]
    return [
        f"{found[0]['start']:g} s",
        f"{found[0]['bursts']:.0%}",
        scheduler,
        ", ".join(f"{seconds:,.0f}" for seconds in quarters) + " s",
        f"{max(one['longest_cold_start_seconds'] for one in found):,.0f} s",
        f"{average('held_share'):.1%} ({', '.join(each)})",
        f"{average('machines'):.2f}",
        f"{average('starts'):.0f}",
        f"{max(one['most_for_short'] for one in found)}",
        f"{average('wait_p50'):.1f} s",
        f"{average('wait_p99'):.1f} s",
    ]


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    situations = list(
        dict.fromkeys((one["start"], one["bursts"]) for one in next(iter(found.values())))
    )
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for start, bursts in situations:
        for scheduler, results in found.items():
            lines.append(
                tuple(
                    row(
                        scheduler,
                        [
                            one
                            for one in results
                            if (one["start"], one["bursts"]) == (start, bursts)
                        ],
                    )
                )
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument(
        "--start",
        type=float,
        nargs="*",
        default=[180.0, 360.0],
        help="seconds until a machine serves",
    )
    parser.add_argument(
        "--bursts",
        type=float,
        nargs="*",
        default=[0.0, 0.2],
        help="share of visits with 200 large requests",
    )
    parser.add_argument(
        "--gap", type=float, default=1500.0, help="seconds between visits on average"
    )
    parser.add_argument(
        "--cooldown", type=float, default=600.0, help="KEDA's cooldownPeriod, seconds"
    )
    parser.add_argument("--visits", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--json", action="store_true", help="print every outcome instead of the table"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(list(outcomes(options))))
        return
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    with tempfile.TemporaryDirectory() as directory:
        extract_commit(options.before, Path(directory))
        running = {"before": started(Path(directory), arguments), "now": started(ROOT, arguments)}
        found = {name: json.loads(process.communicate()[0]) for name, process in running.items()}
    print(json.dumps(found) if options.json else table(found))


if __name__ == "__main__":
    main()

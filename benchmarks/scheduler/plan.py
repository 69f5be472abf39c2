"""Measure how long a plan takes: `python -m benchmarks.scheduler.plan`, or `make bench-plan`.

Plans for synthetic meshes of 1,000 workers and 100, 1,000 and 10,000 models, all of which every
worker has on its disk:

- steady: 20 models resident on each worker, every second model has work that its copies do soon;
  nothing is ordered
- burst: as before, and work arrives for models that are resident nowhere, a tenth of all
- cold: nothing is resident anywhere and every model has work

Only the CPU time of `plan` counts, with an input that a scheduler has at hand: not reading it from
Redis, nor sending orders. A plan's time grows with copies and models with work. Needs none of a
worker's dependencies.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from shoal.v1 import models_pb2

from libs.fleet import FleetSnapshot, WorkerModelRecord, WorkerRecord
from libs.queue import LaneGauges, LaneKey
from services.scheduler.planning.placement import PlanInput, plan

TARGET_SECONDS = 0.1
MEMORY = 24 * 10**9
RESIDENT_MODELS = 20
TOKENS = 2000
SITUATIONS = ("steady", "burst", "cold")


@dataclass(frozen=True, slots=True)
class PlanResult:
    """One mesh: copies that workers hold, models with work, orders of a plan, and seconds of each
    round.
    """

    situation: str
    models: int
    workers: int
    copies: int
    working: int
    orders: int
    seconds: list[float]


def mesh(situation: str, models: int, workers: int, seed: int) -> PlanInput:
    chance = random.Random(f"{situation} {models} {workers} {seed}")
    sizes = {
        f"org/model-{number}": int(chance.lognormvariate(19.5, 0.8)) for number in range(models)
    }  # 0.3 GB in the middle
    names = list(sizes)
    unheld = {"steady": 0, "burst": models // 10, "cold": models}[situation]
    held, working = names[unheld:], {*names[:unheld], *names[unheld::2]}
    disk = {
        name: record(name, models_pb2.MODEL_STATE_COLD, size, chance)
        for name, size in sizes.items()
    }
    fleet = {
        name: worker(name, disk, sizes, held, chance)
        for name in (f"worker-{number}" for number in range(workers))
    }
    lanes = [LaneKey("pool", name) for name in sorted(working)]
    gauges = {lane: LaneGauges(lane, 4, TOKENS, TOKENS, 4, 0, 0, 0, 0, TOKENS) for lane in lanes}
    return PlanInput(FleetSnapshot(fleet, {}, {}, 1), gauges, dict.fromkeys(lanes, 500.0))


def worker(
    name: str,
    disk: Mapping[str, WorkerModelRecord],
    sizes: Mapping[str, int],
    held: Sequence[str],
    chance: random.Random,
) -> WorkerRecord:
    models, used = dict(disk), 0
    for model in chance.sample(held, min(RESIDENT_MODELS, len(held))):
        if used + sizes[model] <= MEMORY:
            used += sizes[model]
            models[model] = record(model, models_pb2.MODEL_STATE_RESIDENT, sizes[model], chance)
    return WorkerRecord(
        name, "epoch", "pool", "cpu", MEMORY, used, 8192, False, 1, models, listed=disk
    )


def record(
    model: str, state: models_pb2.ModelState, size: int, chance: random.Random
) -> WorkerModelRecord:
    return WorkerModelRecord(
        model,
        state,
        size,
        load_seconds=2.0,
        tokens_per_second=20_000.0,
        idle_seconds=chance.uniform(0, 1000),
        pinned=False,
        resident_seconds=1000.0,
    )


def measure(situation: str, models: int, workers: int, rounds: int, seed: int) -> PlanResult:
    asked = mesh(situation, models, workers, seed)
    made = plan(asked)
    # A scheduler's memory does not consist of a million records of one moment: the collector must
    # not be timed with the plan.
    gc.collect()
    gc.freeze()
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        plan(asked)
        seconds.append(time.process_time() - started)
    gc.unfreeze()
    copies = sum(len(one.held) for one in asked.fleet.workers.values())
    return PlanResult(
        situation, models, workers, copies, len(asked.gauges), len(made.orders), seconds
    )


HEAD = (
    f"{'situation':10} {'models':>8} {'workers':>8} {'copies':>8} {'working':>8} {'orders':>7} "
    f"{'ms':>8} {'lowest-highest':>17}"
)


def line(one: PlanResult) -> str:
    """Milliseconds: the median of all rounds and their range."""
    low, middle, high = (
        value * 1e3 for value in (min(one.seconds), median(one.seconds), max(one.seconds))
    )
    spread = f"{low:.1f}-{high:.1f}"
    numbers = f"{one.models:8,} {one.workers:8,} {one.copies:8,} {one.working:8,} {one.orders:7,}"
    return f"{one.situation:10} {numbers} {middle:8.1f} {spread:>17}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--models", type=int, action="append", help="default: 100, 1,000 and 10,000"
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    wanted = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, "
        f"{wanted.rounds} rounds"
    )
    print(HEAD, "-" * len(HEAD), sep="\n", flush=True)
    results = []
    for models in wanted.models or (100, 1000, 10_000):
        for situation in SITUATIONS:
            results.append(measure(situation, models, wanted.workers, wanted.rounds, wanted.seed))
            print(line(results[-1]), flush=True)
    due = [one for one in results if one.models <= 1000 and one.workers <= 1000]
    slow = [f"{one.situation} {one.models}" for one in due if median(one.seconds) >= TARGET_SECONDS]
    print(
        f"not below {TARGET_SECONDS * 1e3:.0f} ms at up to 1,000 models x 1,000 workers: "
        f"{', '.join(slow) or 'none'}"
    )
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()

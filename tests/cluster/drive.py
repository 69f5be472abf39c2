"""Scales from no worker to one, to two, and to none again, by the objects that KEDA and an HPA read
and write in a real API server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import shoal

from services.local.settings import MINILM
from services.scheduler.demand import FIND_SECONDS
from tests.cluster.kubelet import FakeKubelet, Scale
from tests.k8s.manifests import Object
from tests.support.clock import FastClock
from tests.support.keda import Change, FakeKeda, Fallback, ScaledObject
from tests.support.texts import texts

CONCURRENT: Final = 6
TEXTS: Final = texts(32, shortest=30, longest=60, seed=15)
MANY: Final = 2
STEP_SECONDS: Final = 180.0
SLACK_SECONDS: Final = 2.0
"""Tolerance for FIND_SECONDS: a worker that starts earlier is one that the scheduler found, and
keeps for five minutes.
"""


@dataclass
class Traffic:
    """Requests through the real client, and what became of them."""

    client: shoal.AsyncClient
    asked: int = 0
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    deserted: list[str] = field(default_factory=list)
    """Changes to zero while requests were unanswered."""

    async def ask(self) -> None:
        self.asked += 1
        try:
            dense = (await self.client.encode(MINILM, TEXTS, timeout=STEP_SECONDS)).dense
        except shoal.ShoalError as error:
            self.errors.append(str(error))
            return
        self.answered += dense is not None and dense.shape == (len(TEXTS), 384)

    def about_to(self, change: Change) -> None:
        waiting = self.asked - self.answered - len(self.errors)
        if change.after == 0 and waiting:
            self.deserted.append(
                f"{change.before} → 0 at {change.at:.0f} s while {waiting} requests were unanswered"
            )

    async def keep_asking(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Keep requests in flight until `is_over` or for `seconds`; return after the last
        answer.
        """
        end = time.monotonic() + seconds

        async def one_after_another() -> None:
            while not is_over() and not self.errors and time.monotonic() < end:
                await self.ask()

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENT):
                group.create_task(one_after_another())


@dataclass(frozen=True, slots=True)
class Story:
    """A record of a run: changes of the scale, seconds from the first request to its answer,
    answered requests.
    """

    changes: tuple[Change, ...]
    first_answer_seconds: float
    answered: int

    def __str__(self) -> str:
        reported = ", ".join(
            f"{change.before} → {change.after} ({change.by}, {change.at:.0f} s)"
            for change in self.changes
        )
        return (
            f"{reported}; the first answer after {self.first_answer_seconds:.1f} s, "
            f"{self.answered} requests answered"
        )


def scaled_object(one: Object, variables: Mapping[str, Any]) -> ScaledObject:
    """Read a ScaledObject as KEDA does: `…FromEnv` of the trigger's metadata is resolved by the
    target's variables and keeps its name. Raises ValueError for features that a FakeKeda lacks.
    """
    spec = one["spec"]
    (trigger,) = spec["triggers"]
    if trigger["type"] != "external-push":
        raise ValueError(f"a trigger of type {trigger['type']}")
    metadata = {
        key: str(variables[value]) if key.endswith("FromEnv") else value
        for key, value in trigger["metadata"].items()
    }
    fallback = spec.get("fallback")
    return ScaledObject(
        one["metadata"]["name"],
        metadata,
        namespace=one["metadata"]["namespace"],
        polling_interval=spec.get("pollingInterval", 30),
        cooldown_period=spec.get("cooldownPeriod", 300),
        initial_cooldown_period=spec.get("initialCooldownPeriod", 0),
        min_replicas=spec.get("minReplicaCount", 0),
        max_replicas=spec.get("maxReplicaCount", 100),
        fallback=Fallback(fallback["failureThreshold"], fallback["replicas"], fallback["behavior"])
        if fallback
        else None,
    )


def wrong(story: Story) -> list[str]:
    """Return the faults of a story."""
    reached = [change.after for change in story.changes]
    if not reached or (story.changes[0].before, reached[0], story.changes[0].by) != (0, 1, "keda"):
        return [f"the first change is not 0 → 1 by KEDA: {story}"]
    said = [] if max(reached) >= MANY else [f"never {MANY} workers: {story}"]
    if (reached[-1], story.changes[-1].by) != (0, "keda"):
        said.append(f"the last change is not to zero by KEDA: {story}")
    return said


async def drive(kubelet: FakeKubelet, scale: Scale, scaled: ScaledObject) -> Story:
    """Raises AssertionError if a step takes longer than STEP_SECONDS, a request fails, or the last
    worker goes while one waits.
    """
    settled = kubelet.started_at + FIND_SECONDS + SLACK_SECONDS
    await _until(
        lambda: time.monotonic() > settled, kubelet, "the scheduler to have found all workers"
    )
    async with shoal.AsyncClient(kubelet.address("router-headless", 50051)) as client:
        traffic = Traffic(client)
        async with FakeKeda(
            kubelet.address("scheduler-headless", 50053),
            scaled,
            scale,
            FastClock(1.0),
            about_to=traffic.about_to,
        ) as keda:
            began = time.monotonic()
            await traffic.ask()
            first = time.monotonic() - began
            await traffic.keep_asking(
                lambda: kubelet.failure is not None or kubelet.most_ready >= MANY, STEP_SECONDS
            )
            assert traffic.errors == [], traffic.errors
            await _until(lambda: scale.replicas == 0 and kubelet.running == 0, kubelet, "no worker")
            assert traffic.deserted == [], traffic.deserted
            return Story(tuple(keda.changes), first, traffic.answered)


async def _until(condition: Callable[[], bool], kubelet: FakeKubelet, what: str) -> None:
    end = time.monotonic() + STEP_SECONDS
    while not condition():
        assert kubelet.failure is None, kubelet.failure
        assert time.monotonic() < end, f"waited {STEP_SECONDS:g} s for {what}"
        await asyncio.sleep(0.1)

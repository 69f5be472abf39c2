"""`Hpa` decides like Kubernetes' HorizontalPodAutoscaler (autoscaling/v2) with one external metric.
Pure.

Replaces kube-controller-manager in simulations and tests. Follows `pkg/controller/podautoscaler` of
Kubernetes 1.33: `GetExternalPerPodMetricReplicas` (target type AverageValue, which KEDA creates),
`stabilizeRecommendationWithBehaviors`, `convertDesiredReplicasWithBehaviorRate` (selectPolicy Max).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

TOLERANCE: Final = 0.1
"""Relative deviation from the target that causes no scaling: Kubernetes' default."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A scaling policy: it allows a change by at most `value` pods, or `value` percent of the pods
    at the beginning of the period, within `period_seconds`.
    """

    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: float


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """The rules for one direction (`behavior.scaleUp` or `scaleDown`). The policy that allows the
    largest change applies.
    """

    stabilization_seconds: float
    policies: tuple[Policy, ...]


UP: Final = ScalingRules(0, (Policy("Pods", 8, 15), Policy("Percent", 200, 15)))
DOWN: Final = ScalingRules(60, (Policy("Percent", 34, 60), Policy("Pods", 1, 60)))
"""The behaviour configured in our ScaledObjects (k8s/components/keda)."""


class Hpa:
    """The autoscaler of one workload. `now` is seconds of any monotonic clock; metric and target
    are in thousandths, as Kubernetes' quantities.
    """

    def __init__(
        self, least: int, most: int, up: ScalingRules = UP, down: ScalingRules = DOWN
    ) -> None:
        self._least, self._most = least, most
        self._up, self._down = up, down
        self._kept_seconds = max(rules.stabilization_seconds for rules in (up, down))
        self._event_seconds = max(
            policy.period_seconds for rules in (up, down) for policy in rules.policies
        )
        # The state: (time, replicas wanted) and (time, change of replicas), oldest first.
        self._recommendations: deque[tuple[float, int]] = deque()
        self._events: deque[tuple[float, int]] = deque()

    def decide(self, now: float, replicas: int, value: int, target: int) -> int:
        """Return the replicas to run now. The caller sets them and reports the change to
        `scaled`.
        """
        if replicas == 0:
            return 0  # an HPA is off while its target has no replicas
        if not self._recommendations:
            self._recommendations.append((now, replicas))
        if replicas > self._most:
            return self._most
        if replicas < self._least:
            return self._least
        wanted = replicas
        if not 1.0 - TOLERANCE <= value / (target * replicas) <= 1.0 + TOLERANCE:
            wanted = math.ceil(value / target)
        return self._limited(now, replicas, self._stabilized(now, replicas, wanted))

    def scaled(self, now: float, before: int, after: int) -> None:
        """Record that the replicas were changed to the number that `decide` returned."""
        while self._events and self._events[0][0] <= now - self._event_seconds:
            self._events.popleft()
        self._events.append((now, after - before))

    def _stabilized(self, now: float, replicas: int, wanted: int) -> int:
        """Limit the change: up to the minimum wanted within the window of scaling up, down to the
        maximum within that of scaling down.
        """
        up = min(
            [
                wanted,
                *(
                    one
                    for at, one in self._recommendations
                    if at > now - self._up.stabilization_seconds
                ),
            ]
        )
        down = max(
            [
                wanted,
                *(
                    one
                    for at, one in self._recommendations
                    if at > now - self._down.stabilization_seconds
                ),
            ]
        )
        while self._recommendations and self._recommendations[0][0] <= now - self._kept_seconds:
            self._recommendations.popleft()
        self._recommendations.append((now, wanted))
        return min(max(replicas, up), down)

    def _limited(self, now: float, replicas: int, wanted: int) -> int:
        if wanted > replicas:
            allowed = max(
                self._raised(policy, self._start(now, replicas, policy))
                for policy in self._up.policies
            )
            return min(wanted, self._most, max(allowed, replicas))
        if wanted < replicas:
            allowed = min(
                self._lowered(policy, self._start(now, replicas, policy))
                for policy in self._down.policies
            )
            return max(wanted, self._least, min(allowed, replicas))
        return replicas

    def _start(self, now: float, replicas: int, policy: Policy) -> int:
        """Return the replicas at the beginning of the policy's period."""
        return replicas - sum(
            change for at, change in self._events if at > now - policy.period_seconds
        )

    @staticmethod
    def _raised(policy: Policy, start: int) -> int:
        return (
            start + policy.value
            if policy.type == "Pods"
            else math.ceil(start * (1 + policy.value / 100))
        )

    @staticmethod
    def _lowered(policy: Policy, start: int) -> int:
        return (
            start - policy.value if policy.type == "Pods" else int(start * (1 - policy.value / 100))
        )

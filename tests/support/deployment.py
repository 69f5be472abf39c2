"""A Kubernetes Deployment of real worker processes, as far as scaling is concerned."""

from __future__ import annotations

import random
import threading
from itertools import count
from types import TracebackType

from tests.support.cluster import Cluster


class Deployment:
    """Keeps as many workers of `cluster` as the last `scale` requested, while its context is open.

    A thread polls for the difference.

    Pods are the cluster's processes `worker-0`, `worker-1` …, each a new one; the cluster's own
    workers must be none. Scaling in ends any pod, by SIGTERM; a pod that ends by itself is
    replaced.
    """

    def __init__(self, cluster: Cluster, *, seed: int = 0) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._numbers = count()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._leaving: list[threading.Thread] = []
        # The state.
        self._replicas = 0
        self.pods: list[str] = []
        """Pods that should run."""
        self.statuses: dict[str, int | None] = {}
        """Exit statuses of the pods that were not killed."""

    @property
    def replicas(self) -> int:
        return self._replicas

    def scale(self, replicas: int) -> None:
        """Request `replicas` pods and return at once; they start and end in the background."""
        with self._lock:
            self._replicas = replicas
            self._reconcile()

    def kill(self, pod: str) -> None:
        """SIGKILL, as when its machine is gone, also for a pod that has ended by itself. A new one
        takes its place.
        """
        with self._lock:
            self._note_ended()
            self._cluster.kill(pod)
            self.pods = [one for one in self.pods if one != pod]
            self._reconcile()

    def __enter__(self) -> Deployment:
        self._keeper.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._keeper.join()
        self.scale(0)
        for thread in self._leaving:
            thread.join()
        if kind is not None:
            print(self._cluster.last_words())

    def _keep(self) -> None:
        while not self._stop.wait(0.05):
            with self._lock:
                self._reconcile()

    def _reconcile(self) -> None:
        self._note_ended()
        while len(self.pods) < self._replicas:
            pod = f"worker-{next(self._numbers)}"
            self._cluster.start(pod)
            self.pods.append(pod)
        while len(self.pods) > self._replicas:
            pod = self.pods.pop(self._random.randrange(len(self.pods)))
            self._leaving.append(threading.Thread(target=self._end, args=(pod,)))
            self._leaving[-1].start()

    def _note_ended(self) -> None:
        for pod in self.pods:
            status = self._cluster.processes[pod].poll()
            if status is not None:
                self.statuses[pod] = status
        self.pods = [pod for pod in self.pods if pod not in self.statuses]

    def _end(self, pod: str) -> None:
        self.statuses[pod] = self._cluster.stop(pod)

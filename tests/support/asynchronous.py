"""An asynchronous device on the CPU: launches are computed at once, but their results reach the
host late.

Batches end in the order of their launches. Until a batch has ended, its copies on the host have
content that no answer may have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

UNWRITTEN = 0x7F
"""Each byte of a copy on the host before its batch has ended: 3.4e38 as a float32."""


class FakeSubmission:
    """A `Submission`. `error`: the device's, which `wait` raises."""

    def __init__(self, tensors: Sequence[Tensor], began: float) -> None:
        self.copies = tuple(_unwritten(tensor) for tensor in tensors)
        self.error: Exception | None = None
        self.seconds = self.idle_seconds = 0.0
        self.is_awaited = False
        self.began = began
        # A copy as of the launch, since whatever is launched later may overwrite them.
        self._results = tuple(tensor.clone() for tensor in tensors)
        self._ended = threading.Event()

    def end(self, before: float) -> float:
        """Ends the batch. `before`: when the batch before ended. Returns the present time."""
        with torch.inference_mode():  # which models compute in
            for copy, result in zip(self.copies, self._results, strict=True):
                copy.copy_(result)
        now = time.monotonic()
        self.idle_seconds = max(0.0, self.began - before) if before else 0.0
        self.seconds = now - max(self.began, before)
        self._ended.set()
        return now

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self.is_awaited = True
        assert self._ended.wait(60), "the fake device did not receive the end of the batch"
        if self.error is not None:
            raise self.error


class FakeQueue:
    """A fake `DeviceQueue`.

    Attributes:
        most_pending: Maximum number of batches that were on the device at a time.
        submissions: All submissions, in order.

    Args:
        is_manual: Batches end when `end_one` is called, otherwise as soon as a caller waits or
            asks.
    """

    def __init__(self, *, is_manual: bool = False) -> None:
        self.submissions: list[FakeSubmission] = []
        self.most_pending = 0
        self._is_manual = is_manual
        self._lock = threading.Lock()
        self._pending: deque[FakeSubmission] = deque()
        self._began = 0.0
        self._ended_at = 0.0

    @property
    def pending(self) -> int:
        """Batches that were launched and have not ended."""
        return len(self._pending)

    @property
    def first_seconds(self) -> float:
        """The time for which the device has computed the first of its batches; 0 without one."""
        with self._lock:
            if not self._pending:
                return 0.0
            return time.monotonic() - max(self._pending[0].began, self._ended_at)

    def begin(self) -> None:
        self._began = time.monotonic()

    def submit(self, tensors: Sequence[Tensor]) -> FakeSubmission:
        submission = (
            FakeSubmission(tensors, self._began)
            if self._is_manual
            else _Eager(self, tensors, self._began)
        )
        with self._lock:
            self.submissions.append(submission)
            self._pending.append(submission)
            self.most_pending = max(self.most_pending, len(self._pending))
        return submission

    def end_one(self, error: Exception | None = None) -> FakeSubmission:
        """Ends the batch that was launched first, with the device's error if there is one."""
        with self._lock:
            submission = self._pending.popleft()
            submission.error = error
            self._ended_at = submission.end(self._ended_at)
        return submission

    def end_until(self, submission: FakeSubmission) -> None:
        """Ends all batches up to this one."""
        while not submission.is_done():
            self.end_one()

    def read(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in function())


class _Eager(FakeSubmission):
    """A batch that ends when a caller waits for it."""

    def __init__(self, queue: FakeQueue, tensors: Sequence[Tensor], began: float) -> None:
        super().__init__(tensors, began)
        self._queue = queue

    def wait(self) -> None:
        self._queue.end_until(self)
        super().wait()


def _unwritten(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.view(-1).view(torch.uint8).fill_(UNWRITTEN)
    return copy

"""Batches that an asynchronous device computes while the host goes on, and the interface of such a
device.

A model launches a batch (`launch`) and gets a `PendingBatch`; whoever launched it collects the
outputs later. `DeviceQueue` is what `PackedModel` needs of the device: `CudaQueue`
(`loaded/cuda_queue.py`), and a fake in tests (`tests/support/asynchronous.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from libs.models.work import Head, InputSequence, Output


class PendingBatch(Protocol):
    """A batch that was launched. Belongs to the device thread, except that `is_done` and `wait` are
    for any thread.
    """

    def is_done(self) -> bool:
        """Return whether the device has computed it, without waiting. True also if the device
        failed.
        """

    def wait(self) -> None:
        """Wait until the device has computed it, without holding the interpreter's lock. Raises the
        device's error.
        """

    def collect(self) -> list[Output]:
        """Wait for the batch, and return one output for each sequence. Once. Raises the device's
        error, or out of memory.
        """

    @property
    def seconds(self) -> float:
        """The device's time for the batch. After `collect` has returned."""

    @property
    def idle_seconds(self) -> float:
        """How long the device had nothing to do between the batch before and this one. After
        `collect` has returned.
        """


@runtime_checkable
class LaunchesBatches(Protocol):
    """A model whose batches can be launched without waiting for the device."""

    def can_launch(self, head: Head) -> bool:
        """Return whether `launch` returns before the device has computed. False: it would wait for
        every batch launched before.
        """

    def launch(self, head: Head, sequences: Sequence[InputSequence]) -> PendingBatch:
        """Launch a batch: its kernels and the copy of its outputs to the host. Batches are computed
        in the order of launches.

        Raises what a forward does, out of memory included. What was launched until then runs in
        vain and does no harm.
        """


class Submission(Protocol):
    """What was launched between `DeviceQueue.begin` and `submit`: a part of a `PendingBatch`."""

    def is_done(self) -> bool:
        """As of `PendingBatch`."""

    def wait(self) -> None:
        """As of `PendingBatch`."""

    @property
    def copies(self) -> tuple[Tensor, ...]:
        """The tensors of `submit` on the host, valid once `wait` has returned."""

    @property
    def seconds(self) -> float:
        """As of `PendingBatch`."""

    @property
    def idle_seconds(self) -> float:
        """As of `PendingBatch`."""


class DeviceQueue(Protocol):
    """The order in which one device computes what the device thread launches. Not thread-safe."""

    def begin(self) -> None:
        """Mark the beginning of a batch: its launches follow."""

    def submit(self, tensors: Sequence[Tensor]) -> Submission:
        """Launch the copy of `tensors` to the host, and mark the end of the batch."""

    def read(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run `function` on results of a batch that is done, ahead of batches that were launched
        since; return its tensors on the host. Waits for `function` alone."""

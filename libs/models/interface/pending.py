"""Batches that an asynchronous device computes while the host continues, and the interface of such
a device.

A model launches a batch (`launch`) and returns a `PendingBatch`; the caller collects the outputs
later. `DeviceQueue` is the interface that `PackedModel` needs of the device. `CudaQueue`
(`loaded/cuda_queue.py`) implements it, and a fake does in tests (`tests/support/asynchronous.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from libs.models.interface.sequences import Head, InputSequence, Output


class PendingBatch(Protocol):
    """A launched batch. It belongs to the device thread, except that any thread may call `is_done`
    and `wait`.
    """

    def is_done(self) -> bool:
        """Return whether the device has computed the batch or failed, without waiting."""

    def wait(self) -> None:
        """Wait until the device has computed the batch, without holding the GIL. Raises the
        device's error.
        """

    def collect(self) -> list[Output]:
        """Wait for the batch and return one output for each sequence. Call it one time only.

        Raises the device's error, or out of memory.
        """

    @property
    def seconds(self) -> float:
        """The device's time for the batch. Available after `collect`."""

    @property
    def idle_seconds(self) -> float:
        """Seconds in which the device was idle between the previous batch and this one. Available
        after `collect`.
        """


@runtime_checkable
class LaunchesBatches(Protocol):
    """A model that can launch batches without waiting for the device."""

    def can_launch(self, head: Head) -> bool:
        """Return whether `launch` returns before the device has computed; if not, it waits for
        every batch launched before.
        """

    def launch(self, head: Head, sequences: Sequence[InputSequence]) -> PendingBatch:
        """Launch a batch: its kernels and the copy of its outputs to the host. The device computes
        batches in the order of launches.

        Raises as a forward, out of memory included. Kernels launched before the error run
        in vain and do no harm.
        """


class Submission(Protocol):
    """The work launched between `DeviceQueue.begin` and `submit`: a part of a `PendingBatch`."""

    def is_done(self) -> bool:
        """Implement `PendingBatch.is_done`."""

    def wait(self) -> None:
        """Implement `PendingBatch.wait`."""

    @property
    def copies(self) -> tuple[Tensor, ...]:
        """The tensors of `submit` on the host, valid once `wait` has returned."""

    @property
    def seconds(self) -> float:
        """See `PendingBatch.seconds`."""

    @property
    def idle_seconds(self) -> float:
        """See `PendingBatch.idle_seconds`."""


class DeviceQueue(Protocol):
    """The order in which one device computes the launches of the device thread. Not thread-safe."""

    def begin(self) -> None:
        """Mark the beginning of a batch, before its launches."""

    def submit(self, tensors: Sequence[Tensor]) -> Submission:
        """Launch the copy of `tensors` to the host, and mark the end of the batch."""

    def read(self, function: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run `function` on results of a finished batch, ahead of batches launched since, and
        return its tensors on the host.

        Waits only for `function`.
        """

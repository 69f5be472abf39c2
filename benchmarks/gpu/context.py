"""The arguments of a step: the device, the time limit, small or full sizes, and the report that it
fills.
"""

from __future__ import annotations

import gc
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.report import NO_CUDA, Row, StepReport, StepTarget

# Dense bfloat16 FLOP/s without sparsity, from NVIDIA's datasheets, by a part of torch's name of the
# device; the first that fits.
PEAKS: Final[Mapping[str, float]] = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12,
    "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip
PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "numpy",
    "grpcio",
    "redis",
)


class NotHere(Exception):
    """A row cannot be measured on this machine; the message says why."""


@dataclass(slots=True)
class StepContext:
    """The device, limits and report of a step."""

    device: torch.device
    is_tiny: bool
    """Whether sizes are for a rehearsal."""
    ends: float
    """The time at which the step must be through, on the monotonic clock."""
    report: StepReport
    folder: Path
    """The folder into which the report is written after each row."""
    kept: frozenset[str] = field(default_factory=frozenset)
    """Rows of an earlier run of the step on this machine, which are not measured again."""

    @property
    def has_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rates(self) -> roofline.Gpu | None:
        """The GPU's rates for predictions; None for unknown ones and in a rehearsal."""
        name = self.report.machine.get("gpu", "")
        return None if self.report.is_rehearsal else roofline.gpu_named(name)

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def measure(
        self, what: str, work: Callable[[], Row], *, needs_cuda: bool = False, seconds: float = 5.0
    ) -> None:
        """Add the row that `work` returns, or say in it why there is none. `seconds`: what must
        be left for it to be begun.
        """
        if what in self.kept:
            return
        if needs_cuda and not self.has_cuda:
            self.add({"what": what, "skipped": NO_CUDA})
            return
        if self.seconds_left < seconds:
            self.report.status, self.report.reason = "partial", "out of time"
            self.note(f"{what}: not begun, {self.seconds_left:.0f} s were left")
            return
        print(f"[{self.report.step}] {what}", flush=True)
        began = time.monotonic()
        try:
            row: Row = {"what": what, **work()}
        except NotHere as error:
            row = {"what": what, "skipped": str(error)}
        except Exception as error:  # the other rows are worth having
            traceback.print_exc()
            row = {"what": what, "error": f"{type(error).__name__}: {error}"[:2000]}
        self.add({**row, "took_seconds": round(time.monotonic() - began, 3)})
        self.forget()

    def forget(self) -> None:
        """Free the memory that the previous row has left on the device."""
        gc.collect()
        if self.has_cuda:
            torch.cuda.empty_cache()

    def add(self, row: Row) -> None:
        self.report.rows = [one for one in self.report.rows if one["what"] != row["what"]] + [row]
        self.save()

    def note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)
        self.save()

    def target(
        self, target: str, bound: float, unit: str, measured: float | None, *, at_most: bool = False
    ) -> None:
        """Say whether a target is met. Rehearsals meet none and miss none."""
        self.report.targets.append(
            StepTarget(target, bound, unit, None if self.report.is_rehearsal else measured, at_most)
        )
        self.save()

    def save(self) -> None:
        self.report.write(self.folder)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.has_cuda:
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, the device's part included."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began


def open_context(
    step: str, device: str, *, is_tiny: bool, seconds: float, folder: Path
) -> StepContext:
    """`device`: auto, cuda or cpu. Raises NotHere if cuda is asked for and not there."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise NotHere(NO_CUDA)
    chosen = torch.device("cuda" if has_cuda and device != "cpu" else "cpu")
    torch.backends.cudnn.allow_tf32 = False  # as in a worker
    report = StepReport(
        step, is_rehearsal=is_tiny or chosen.type != "cuda", machine=machine(chosen)
    )
    return StepContext(chosen, is_tiny, time.monotonic() + seconds, report, folder)


def peak(device: torch.device) -> float | None:
    """Return the bfloat16 FLOP/s of the device by its name; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for part, value in PEAKS.items() if part in name), None)


def machine(device: torch.device) -> dict[str, str]:
    """Describe the machine."""
    reported = {
        "device": device.type,
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
    }
    for name in PACKAGES:
        try:
            reported[name] = version(name)
        except PackageNotFoundError:
            reported[name] = "not installed"
    reported["torch"] = torch.__version__
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = peak(device)
        reported |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "memory_bytes": str(properties.total_memory),
            "cuda": str(torch.version.cuda),
            "bfloat16_peak": "unknown" if found is None else f"{found / 1e12:.0f} TFLOP/s",
        }
    return reported

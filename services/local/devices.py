"""Assigns devices to the workers of a local mesh: an accelerator each, or a share of the cores."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from libs.errors import InvalidInput
from services.local.settings import available_cores

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_DRIVERS: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Without any of these files no accelerator is usable, and torch, which takes seconds to import, is
not asked.
"""
_COUNT_CODE: Final = "import torch; print(torch.cuda.device_count())"
_COUNT_SECONDS: Final = 120.0
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:(?P<numbers>\d+(,\d+)*))?")


def accelerators(device: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the accelerators that `--device` selects, by their names in CUDA_VISIBLE_DEVICES;
    none: the CPU.

    Raises InvalidInput for an invalid or missing device.
    """
    if not _DEVICE.fullmatch(device):
        raise InvalidInput(
            (
                f"device {device!r} is not valid: it must be auto, cpu, cuda, or numbers of "
                "accelerators such as cuda:0 or cuda:0,1"
            ),
            field="device",
        )
    if device == "cpu" or (device == "auto" and not any(map(_exists, _DRIVERS))):
        return ()
    return chosen(device, visible(environ.get(VISIBLE), _count(environ)))


def visible(listed: str | None, count: int) -> tuple[str, ...]:
    """Return the names of the `count` accelerators that torch sees. `listed`: CUDA_VISIBLE_DEVICES,
    None if it is not set.
    """
    names = (
        list(map(str, range(count)))
        if listed is None
        else [name.strip() for name in listed.split(",")]
    )
    return tuple(names[:count])


def chosen(device: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the visible accelerators that `device` selects: all, or those at its positions in the
    list, each once.
    """
    found = _DEVICE.fullmatch(device)
    assert found is not None
    if device.startswith("cuda") and not names:
        raise InvalidInput(
            f"device {device} was requested, but torch finds no such device on this machine",
            field="device",
        )
    if found["numbers"] is None:
        return tuple(names)
    numbers = list(dict.fromkeys(map(int, found["numbers"].split(","))))
    if max(numbers) >= len(names):
        raise InvalidInput(
            (
                f"device {device} was requested, but this machine has only {len(names)}, numbered "
                f"0 to {len(names) - 1}"
            ),
            field="device",
        )
    return tuple(names[number] for number in numbers)


def layout(
    workers: int | None, threads: int | None, accelerators: int = 0, cores: int | None = None
) -> tuple[int, int]:
    """Workers and threads of each. With accelerators one worker each, else one single-threaded
    worker a core unless given otherwise (measured: 427 against 375 sentences/s). Raises
    InvalidInput for more than there are."""
    cores = cores or available_cores()
    if workers is None:
        workers = accelerators or max(1, cores // (threads or 1))
    if accelerators and workers > accelerators:
        raise InvalidInput(
            f"{workers} workers need an accelerator each, because a worker claims all memory of "
            "its own, but there are only "
            f"{accelerators}: set --workers to at most {accelerators}",
            field="workers",
        )
    if threads is None:
        threads = max(1, cores // max(1, workers))  # `Settings` refuses 0 workers.
    if workers * threads > max(cores, workers):
        raise InvalidInput(
            (
                f"{workers} workers with {threads} threads each exceed the {cores} cores here: "
                "reduce --workers or --threads"
            ),
            field="threads",
        )
    return workers, threads


def _exists(path: str) -> bool:
    return Path(path).exists()


def _count(environ: Mapping[str, str]) -> int:
    """Return the number of accelerators that torch sees, in a separate process: this one must not
    import torch or open a device. 0 without torch.
    """
    command = [sys.executable, "-P", "-c", _COUNT_CODE]
    try:
        counted = subprocess.run(  # noqa: S603  # fixed arguments
            command,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_COUNT_SECONDS,
            check=True,
        )
        return int(counted.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return 0

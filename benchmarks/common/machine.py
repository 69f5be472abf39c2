"""Describe the machine, and check that it is quiet."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console

from services.local.settings import available_cores


async def busy_cores(seconds: float = 2.0) -> float:
    """Return how many cores were busy while this process waited: other work on the machine, or an
    engine that spins.
    """

    def busy() -> int:
        user, nice, system, _, _, interrupt, soft_interrupt, steal = (
            int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
        return user + nice + system + interrupt + soft_interrupt + steal

    before = busy()
    await asyncio.sleep(seconds)
    return (busy() - before) / os.sysconf("SC_CLK_TCK") / seconds


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    has = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    packages = {
        name: version(name) for name in ("torch", "sentence-transformers", "transformers", "grpcio")
    }
    here = {
        "cpu": names[0] if names else platform.machine(),
        "cores": str(available_cores()),
        "bfloat16": " ".join(has) or "emulated",
    }
    return here | {"python": platform.python_version()} | packages


BUSY_CORES: Final = 0.1
"""A machine with more busy cores before a measurement is not quiet."""


def wide_console(*, as_json: bool) -> Console:
    """Return the console of a report, on stderr next to JSON: wide if it is not a terminal."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 120
    return console


def print_machine(console: Console) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), style="dim")


def print_end(
    console: Console, busy: float, results: Mapping[str, object], *, as_json: bool
) -> None:
    """Print the end of a report: whether the machine was quiet, and the results as JSON."""
    if busy > BUSY_CORES:
        console.print(f"note: {busy:.2f} cores were busy before: not a quiet machine")
    if as_json:
        print(json.dumps({"machine": machine(), "busy_cores": busy, **results}))

"""Describe the machine, and check that it is quiet."""

from __future__ import annotations

import asyncio
import os
import platform
from importlib.metadata import version
from pathlib import Path

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

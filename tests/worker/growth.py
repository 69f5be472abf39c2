"""`python -m tests.worker.growth FOLDER`: loads and unloads FOLDER's org/real 25 times, and prints
RSS after each and during the four seconds after the last, as JSON.

Runs in a separate process: in pytest's, garbage of other tests would grow it, too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from services.worker.machine.device import open_device
from services.worker.memory.files import ModelFiles
from services.worker.memory.residency import Residency
from services.worker.settings import Settings, Shelf
from tests.worker.fakes import until
from tests.worker.residing import loaded, unloaded

ROUNDS = 25
SETTLING_LOOKS = 8


async def measured(folder: Path) -> list[int]:
    device = replace(
        open_device(Settings("w", device="cpu", dtype="float32")),
        memory_bytes=1 << 30,
        batch_tokens=64,
    )
    process = psutil.Process()
    taken = []
    async with asyncio.TaskGroup() as tasks:
        residency = Residency(
            ModelFiles((Shelf(folder),), item_bytes=device.item_bytes),
            device,
            tasks,
            clock=asyncio.get_running_loop().time,
            changed=lambda: None,
        )
        for _ in range(ROUNDS):
            await loaded(residency, "org/real")
            await unloaded(residency, "org/real")
            await until(lambda: residency.used_bytes == 0)
            taken.append(process.memory_info().rss)
        # On a loaded machine the thread that loaded a model may end, and free it, seconds later.
        for _ in range(SETTLING_LOOKS):
            await asyncio.sleep(0.5)
            taken.append(process.memory_info().rss)
        residency.stop()
    return taken


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(Path(sys.argv[1])))))

"""The number of compiled products that a worker caches. torch's linears go through ideep to oneDNN,
and both have a cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

_LIMITS: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_PROGRAM: Final = """
import sys
from services.worker.__main__ import limit_compiled_products
if sys.argv[1] == "limited":
    limit_compiled_products()
import psutil, torch
from libs.kernels.linear.packed import PackedLinear
torch.set_num_threads(1)
linear = PackedLinear(64, 64)
linear.prepare()
assert linear.packed is not None
for rows in range(1, 2001):
    linear(torch.zeros(rows, 64))
    if rows == 300:
        before = psutil.Process().memory_info().rss
print(psutil.Process().memory_info().rss - before)
"""


def growth(way: str) -> int:
    """Return the growth in bytes of a process that multiplies matrices of 1,700 shapes, each once,
    after 300 others.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _LIMITS}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, way],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return int(run.stdout)


def test_worker_keeps_few_compiled_products() -> None:
    free, limited = growth("free"), growth("limited")
    assert limited < free / 4, f"{free:,} bytes without limits, {limited:,} with"

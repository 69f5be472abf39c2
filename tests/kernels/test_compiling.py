"""The Triton kernels compile: the interpreter takes more than the compiler does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WIDE_ROWS = ("_norm_rotate", "_gate_up", "_attend")
"""Kernels with a last stride of 1 by definition: each thread reads and writes 16 bytes at a
time.
"""


# H100 and H200. With SHOAL_EVERY_GPU (make kernels-check) also A100; L4 and L40S; B200; RTX 50 and
# RTX PRO, and every mask of heads of 80 and 128: a minute each.
@pytest.mark.parametrize(
    "capability", [80, 89, 90, 100, 120] if os.environ.get("SHOAL_EVERY_GPU") else [90]
)
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    """Launched variants fit the GPU's shared memory and do not spill registers."""
    pytest.importorskip("triton")
    from tests.support.triton_launches import launched_kernels

    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compiling", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {one["kernel"] for one in found} == launched_kernels()
    for one in found:
        assert one["stack"] <= _stack(one), one
        assert one["widest"] >= 16 or one["kernel"] not in WIDE_ROWS, one
        assert one["narrowest_store"] >= 16 or one["kernel"] not in WIDE_ROWS, one


def _stack(one: dict[str, Any]) -> int:
    """Return the bytes of local memory that a variant may use, as found with Triton 3.6 and 3.9.

    Attention variants that use all registers of a thread spill up to 40; sines of large angles have
    a table of 28, which some assemblers do not keep in registers. Products in exact float32 are
    unrolled and spill in a decode step, which has few rows: bfloat16 is the fast type.
    """
    if one["kernel"] == "_decode" and "*bf16" not in one["pointers"]:
        return 1 << 16
    return {"_attend": 64, "_angles": 32, "_disentangled": 8}.get(one["kernel"], 0)

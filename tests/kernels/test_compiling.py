"""The Triton kernels compile: the interpreter takes more than the compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


# A100; L4 and L40S; H100 and H200; B200; RTX PRO 6000 Blackwell.
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_every_kernel_compiles(capability: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compiling", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"_attend", "_disentangled", "_norm", "_rotate", "_gate_up", "_reduce"}

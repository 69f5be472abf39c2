"""Compiles every Triton kernel for NVIDIA GPUs, which needs no GPU; run by `test_compiling.py` in a process of its own, since in
the tests' own process Triton interprets.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from libs.kernels.attention import disentangled_triton, varlen_triton
from libs.kernels.rows import fused_triton

FLOATS = ("scale", "softcap", "eps", "shift")
HEAD_SIZES = (128, 256)
# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def compile_kernel(kernel: Any, pointers: str, constants: dict[str, int | bool], capability: int, **options: int) -> None:
    """`pointers`: the type of all pointers but those to offsets. `capability`: of the GPU, as 90 for 9.0. `options`: of the
    launch."""
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    names = list(kernel.arg_names)
    signature = {name: _type(name, pointers, constants) for name in names}
    source = compiler.ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = compiler.compile(source, target=backends.GPUTarget("cuda", capability, 32), options={"num_warps": 4, **options})
    assert "ptx" in compiled.asm
    assert compiled.metadata.shared <= SHARED_BYTES[capability], f"{kernel.__name__} {constants}: {compiled.metadata.shared} bytes"
    print(kernel.__name__)


def _type(name: str, pointers: str, constants: dict[str, int | bool]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return {"cu_": "*i32", "tab": "*i32", "cos": "*fp32", "sin": "*fp32"}.get(name[:3], pointers)
    return "fp32" if name in FLOATS else "i32"


def compile_all(capability: int) -> None:
    """Every kernel, in all variants that differ in more than sizes. Prints the name of each."""

    def of(kernel: Any, constants: dict[str, int | bool]) -> None:
        compile_kernel(kernel, "*bf16", constants, capability)

    sight = {"CAUSAL": True, "WINDOWED": True, "BIASED": True, "CAPPED": True}
    for dtype, pointers in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        for size in HEAD_SIZES:
            tile, padded = varlen_triton.tiles(dtype, size)
            shape = {"ROWS": tile, "KEYS": tile, "SIZE": padded}
            compile_kernel(varlen_triton._attend, pointers, {"GROUP": 7, **sight, **shape}, capability)
        for size, is_by_distance in ((64, True), (80, True), (256, True), (64, False)):
            tile, padded, warps = disentangled_triton.tiles(dtype, size)
            shape = {"DIM": size, "C2P": is_by_distance, "P2C": is_by_distance, "ROWS": tile, "KEYS": tile, "SIZE": padded}
            compile_kernel(disentangled_triton._disentangled, pointers, shape, capability, num_warps=warps, num_stages=1)
    of(fused_triton._norm, {"ADD": True, "RMS": False, "BIASED": True, "COLUMNS": 1024})
    of(fused_triton._norm, {"ADD": False, "RMS": True, "BIASED": False, "COLUMNS": 64})
    of(fused_triton._rotate, {"HEADS": 16, "PAIRS": 32})
    for activation in range(4):
        of(fused_triton._gate_up, {"ACTIVATION": activation, "COLUMNS": 1024})
    for how in range(3):
        of(fused_triton._reduce, {"HOW": how, "ROWS": 32, "COLUMNS": 64})


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))

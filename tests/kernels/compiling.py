"""Compiles every Triton kernel for NVIDIA GPUs, which needs no GPU; run by `test_compiling.py` in a process of its own, since in
the tests' own process Triton interprets.
"""

from __future__ import annotations

import importlib
from typing import Any

from libs.kernels import attention_triton, fused_triton

FLOATS = ("scale", "eps", "shift")
TILES = {"ROWS": 32, "KEYS": 32, "SIZE": 64}


def compile_kernel(kernel: Any, pointers: str, constants: dict[str, int | bool], capability: int = 80) -> None:
    """`pointers`: the type of all pointers but those to offsets."""
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    names = list(kernel.arg_names)
    signature = {name: _type(name, pointers, constants) for name in names}
    source = compiler.ASTSource(kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()})
    compiled = compiler.compile(source, target=backends.GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert "ptx" in compiled.asm
    print(kernel.__name__)


def _type(name: str, pointers: str, constants: dict[str, int | bool]) -> str:
    if name in constants:
        return "constexpr"
    if name.endswith("_ptr"):
        return {"cu_": "*i32", "cos": "*fp32", "sin": "*fp32"}.get(name[:3], pointers)
    return "fp32" if name in FLOATS else "i32"


if __name__ == "__main__":
    sight = {"CAUSAL": True, "WINDOWED": True, "BIASED": True}
    compile_kernel(attention_triton._attend, "*bf16", {"GROUP": 7, **sight, **TILES})
    compile_kernel(fused_triton._norm, "*bf16", {"ADD": True, "RMS": False, "BIASED": True, "COLUMNS": 1024})
    compile_kernel(fused_triton._norm, "*bf16", {"ADD": False, "RMS": True, "BIASED": False, "COLUMNS": 64})
    compile_kernel(fused_triton._rotate, "*bf16", {"HEADS": 16, "PAIRS": 32})
    for activation in range(4):
        compile_kernel(fused_triton._gate_up, "*bf16", {"ACTIVATION": activation, "COLUMNS": 1024})
    for how in range(3):
        compile_kernel(fused_triton._reduce, "*bf16", {"HOW": how, "ROWS": 32, "COLUMNS": 64})

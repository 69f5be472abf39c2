"""Compile every Triton kernel for NVIDIA GPUs in all launched variants, which needs no GPU.

`test_compiling.py` runs it in a separate process, since Triton interprets in the tests' process.
Launching functions are called with tensors of the meta device, in the shapes of published models.
Prints a line of JSON for each variant.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from libs.kernels.attention import disentangled_triton, paged_triton, varlen_triton
from libs.kernels.attention.paged import PAGE
from libs.kernels.layout import BatchLayout
from libs.kernels.rows import fused_triton, rope_triton
from libs.kernels.rows.rope import HeadNorms
from tests.support.triton_launches import Launch, recorded_launches

# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide,
# technical specifications).
SHARED_BYTES: Final = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
TOKENS: Final = 100


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without values."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def attention() -> None:
    """T5, MPNet and ALiBi (a bias alone), Gemma 2 (soft-capped, causal, windowed), float32, all
    masks together, and the widest heads. Heads of 80 and 128 have all masks, which take the most
    registers, and each mask alone with SHOAL_EVERY_GPU."""
    layout = BatchLayout.from_lengths((TOKENS,), (TOKENS,), "meta")
    sights = (
        (False, None, True, None),
        (True, None, False, 50.0),
        (True, 5, False, 50.0),
        (False, 5, False, None),
        (True, 5, True, 50.0),
    )
    for dtype, size, (causal, window, biased, softcap) in product(
        (torch.bfloat16, torch.float32), (64, 80, 128, 256), sights
    ):
        if size in (80, 128) and not (window and biased) and "SHOAL_EVERY_GPU" not in os.environ:
            continue
        q, k, v = meta(TOKENS, 18, size, dtype=dtype).split_with_sizes((14, 2, 2), dim=1)
        bias = meta(14, 2 * TOKENS + 1, dtype=dtype) if biased else None
        varlen_triton.attend(q, k, v, layout, 0.1, causal, window, bias, softcap)


def rows() -> None:
    """Norms of BERT, ModernBERT, Qwen3 and Gemma 3, also of narrow rows; gated activations;
    reductions.
    """
    for dtype, size, rms, is_biased in (
        (torch.bfloat16, 1024, False, True),
        (torch.bfloat16, 768, False, False),
        (torch.bfloat16, 1024, True, False),
        (torch.float32, 384, False, True),
        (torch.bfloat16, 64, True, False),
        (torch.bfloat16, 5120, True, False),
    ):
        x, weight = meta(TOKENS, size, dtype=dtype), meta(size, dtype=dtype)
        bias = meta(size, dtype=dtype) if is_biased else None
        fused_triton.norm(x, weight, bias, 1e-5, rms=rms)
        for fused in (fused_triton.add_norm, fused_triton.norm_of_sum, fused_triton.norm_plus):
            fused(x, x, weight, bias, 1e-5, rms=rms)
    for activation, gate_last in product(("gelu", "gelu_tanh", "relu", "silu"), (False, True)):
        fused_triton.gate_up(meta(TOKENS, 2 * 1152), activation, gate_last=gate_last)
    for how, dtype in product(("mean", "sum", "max"), (torch.bfloat16, torch.float32)):
        fused_triton.reduce(meta(TOKENS, 768, dtype=dtype), meta(2, dtype=torch.int32), how)


# Query heads, key heads, head size, pairs, whether heads are normalised.
ROTATIONS: Final = (
    (12, 12, 64, 32, False),  # ModernBERT-base, nomic-embed
    (14, 2, 64, 32, False),  # Qwen2.5-0.5B
    (16, 8, 128, 64, True),  # Qwen3-0.6B
    (32, 8, 128, 64, True),  # Qwen3-4B
    (3, 1, 256, 128, True),  # EmbeddingGemma-300M
    (32, 8, 96, 48, False),  # Phi-3
    (32, 4, 128, 32, True),  # a part of each head
)


def rotations() -> None:
    for dtype, (queries, keys, size, pairs, is_normed) in product(
        (torch.bfloat16, torch.float32), ROTATIONS
    ):
        both = meta(TOKENS, queries + 2 * keys, size, dtype=dtype)[:, : queries + keys]
        norms = (
            HeadNorms(meta(size, dtype=dtype), meta(size, dtype=dtype), queries, 1e-6, 0.0)
            if is_normed
            else None
        )
        cos, sin = rope_triton.angles(
            meta(TOKENS, dtype=torch.int32), meta(pairs, dtype=torch.float32), 1.0
        )
        rope_triton.norm_rotate_(both, (cos, sin), norms)
    rope_triton.norm_rotate_(meta(TOKENS, 6, 64), None, HeadNorms(meta(64), meta(64), 4, 1e-6, 0.0))
    for dtype in (torch.int32, torch.float32):
        rope_triton.angles(meta(TOKENS, 32, dtype=dtype), meta(32, dtype=torch.float32), 1.0)
    rope_triton.angles(meta(TOKENS, dtype=torch.int32), meta(TOKENS, 32, dtype=torch.float32), 1.0)


def decode_steps() -> None:
    """Qwen3, and heads of 256 with everything; multi-query heads of 80 that only read."""
    cu_keys, numbers = meta(9, dtype=torch.int32), meta(8, 64, dtype=torch.int32)
    for dtype, (heads, kv_heads, size, stores, is_all) in product(
        (torch.bfloat16, torch.float32),
        ((16, 8, 128, True, False), (16, 8, 256, True, True), (20, 1, 80, False, False)),
    ):
        pages = (
            meta(9, kv_heads, size, PAGE, dtype=dtype),
            meta(9, kv_heads, PAGE, size, dtype=dtype),
        )
        q, k, v = meta(8, heads + 2 * kv_heads, size, dtype=dtype).split_with_sizes(
            (heads, kv_heads, kv_heads), dim=1
        )
        window, softcap = (5, 50.0) if is_all else (None, None)
        bias = meta(heads, 2 * TOKENS + 1, dtype=dtype) if is_all else None
        paged_triton.attend(
            q,
            k if stores else None,
            v if stores else None,
            pages,
            cu_keys,
            numbers,
            0.1,
            window,
            bias,
            softcap,
        )


def distances() -> None:
    """Compile DeBERTa's kernel with scores by distance for buckets of 256."""
    layout = BatchLayout.from_lengths((TOKENS,), (TOKENS,), "meta")
    for dtype, size in product((torch.bfloat16, torch.float32), (64, 80, 256)):
        q, k, v = meta(TOKENS, 36, size, dtype=dtype).split(12, 1)
        scores, table = meta(12, TOKENS, 512, dtype=dtype), meta(1023, dtype=torch.int32)
        disentangled_triton.attend(
            q, k, v, scores, scores, table, 0, layout, 0.1, meta(TOKENS, 12, size, dtype=dtype)
        )


VARIANTS: Final = (attention, rows, rotations, decode_steps, distances)


def compile_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """The variant's name, its shared memory, registers a thread and bytes of spilled registers.
    `capability`: as 90 for 9.0.
    """
    compiler = importlib.import_module("triton.compiler")
    backends = importlib.import_module("triton.backends.compiler")
    places = {name: (place,) for place, name in enumerate(launch.kernel.arg_names)}
    source = compiler.ASTSource(
        launch.kernel,
        dict(launch.signature),
        constexprs={places[name]: value for name, value in launch.constants},
        attrs={places[name]: [["tt.divisibility", 16]] for name in launch.aligned},
    )
    compiled = compiler.compile(
        source, target=backends.GPUTarget("cuda", capability, 32), options=dict(launch.options)
    )
    assert compiled.metadata.shared <= SHARED_BYTES[capability], (
        f"{launch}: {compiled.metadata.shared} bytes"
    )
    return {
        "kernel": launch.name,
        "constants": dict(launch.constants),
        "pointers": sorted({kind for _, kind in launch.signature if kind.startswith("*")}),
        "warps": dict(launch.options).get("num_warps"),
        "shared": compiled.metadata.shared,
        "widest": max(_widths("ld", compiled.asm["ptx"])),
        "narrowest_store": min(_widths("st", compiled.asm["ptx"])),
        **_resources(compiled.asm["cubin"], capability),
    }


def _widths(operation: str, ptx: str) -> list[int]:
    """Bytes of each load ("ld") or store ("st") of the device's memory."""
    found = re.findall(rf"{operation}\.global[a-zA-Z0-9_:.]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


def _resources(cubin: bytes, capability: int) -> dict[str, int]:
    """Registers, and bytes of stack, which hold spilled registers and the tables of large sines."""
    folder = Path(str(importlib.import_module("triton").__file__)).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [folder / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found is not None, f"{done.stdout}{done.stderr}"
    return {"registers": int(found[1]), "stack": int(found[2])}


def compile_all(capability: int) -> None:
    with recorded_launches() as launches:
        for variants in VARIANTS:
            variants()
    for launch in dict.fromkeys(launches):
        print(json.dumps(compile_launch(launch, capability)), flush=True)


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))

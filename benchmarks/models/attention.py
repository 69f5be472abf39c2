"""Compare the native library with torch's operators: `python -m benchmarks.models.attention`, or
`make bench-attention`.

Attention alone, for shapes of real models, in every instruction set that this CPU has; the row
functions; and the whole forward of all-MiniLM-L6-v2 over texts in the length mix of
`benchmarks/common/texts.py`, and of one short query. Implementations take turns within a round, and
ratios are of neighbours in time, so that the machine's drift cancels: trust them more than the
times.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.texts import MINILM_ID, minilm_directory, real_texts
from libs.kernels import native
from libs.kernels.attention import dense
from libs.kernels.layout import BatchLayout, cumulated
from libs.kernels.linear.packed import has_bfloat16
from libs.kernels.native import build, library
from libs.kernels.native.attention import attend_with
from libs.kernels.rows import gated, norms, rope, segments
from libs.models import EncodeWork, Prepared, load_model

BATCH = 32
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# A measurement repeats its function for about this many seconds, so that the clock's overhead does
# not count.
SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of one model's shape. `lengths`: of the sequences, all queries of all keys; empty:
    of a batch of the mix.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...] = ()
    causal: bool = False
    window: int | None = None
    has_bias: bool = False


CASES = (
    Case("MiniLM, mix", 12, 12, 32),
    Case("MiniLM, one query of 12 tokens", 12, 12, 32, (12,)),
    Case("MiniLM, 4 x 256 tokens", 12, 12, 32, (256,) * 4),
    Case("BERT-base, mix", 12, 12, 64),
    Case("BERT-base, 4 x 512 tokens", 12, 12, 64, (512,) * 4),
    Case("MPNet, mix (bias)", 12, 12, 64, has_bias=True),
    Case("Qwen3-0.6B, mix (causal, grouped)", 16, 8, 128, causal=True),
    Case("ModernBERT, 2,048 tokens (window)", 12, 12, 64, (2048,), window=64),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        action="append",
        help="default: all that this CPU multiplies",
    )
    parser.add_argument("--threads", type=int, action="append", help="default: 1, and all cores")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--cases",
        type=int,
        default=len(CASES),
        help="only this number of cases of the kernel alone",
    )
    arguments = parser.parse_args()
    try:
        path = build.build()
        sets = library.instruction_sets(path)
    except Exception as error:
        sys.exit(f"no native kernel: {error}")
    print(
        f"in use: {native.name()}; torch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )
    loaded = {name: library.load(path, name) for name in sets}
    cores = torch.get_num_threads()
    for dtype in arguments.dtype or [
        name for name in DTYPES if name == "float32" or has_bfloat16()
    ]:
        for threads in arguments.threads or sorted({1, cores}):
            torch.set_num_threads(threads)
            print(
                f"\n{dtype}, {threads} thread{'s' * (threads > 1)}: median ms of torch's "
                "operators, and how many times as fast"
            )
            for case in CASES[: arguments.cases]:
                report(
                    case.name, take_turns(kernels(case, DTYPES[dtype], loaded), arguments.rounds)
                )
            for name, ways in (*row_functions(DTYPES[dtype]), *forwards(DTYPES[dtype])):
                report(name, take_turns(ways, arguments.rounds))


def kernels(
    case: Case, dtype: torch.dtype, loaded: Mapping[str, library.Native]
) -> dict[str, Callable[[], object]]:
    """Yield functions of the kernel alone; each has a layout with masks and biases made before the
    clock starts.
    """
    lengths = case.lengths or tuple(sorted(real_texts(BATCH).lengths))
    parts = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (
        torch.randn(sum(lengths), sum(parts), case.dim).to(dtype).split_with_sizes(parts, dim=1)
    )
    bias = torch.randn(case.heads, 2 * max(lengths) + 1) if case.has_bias else None

    def prepared(attend: Callable[..., Tensor | None]) -> Callable[[], object]:
        return partial(
            attend,
            q,
            k,
            v,
            BatchLayout.from_lengths(lengths, lengths),
            case.dim**-0.5,
            case.causal,
            case.window,
            bias,
        )

    # For float32 this instruction set is AVX512.
    reported = [name for name in loaded if dtype is torch.bfloat16 or name != "avx512_bf16"]
    return {"torch": prepared(dense.attend)} | {
        name: prepared(partial(attend_with, loaded[name])) for name in reported
    }


def row_functions(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield functions of a hidden size of 768, for a batch of the mix and for one query."""
    for rows, batch in ((sum(real_texts(BATCH).lengths), BATCH), (12, 1)):
        x, weight, heads = (
            torch.randn(rows, 768).to(dtype),
            torch.randn(768).to(dtype),
            torch.randn(rows, 24, 64).to(dtype),
        )
        cos, inner, ends = (
            torch.randn(rows, 32),
            torch.randn(rows, 4608).to(dtype),
            cumulated([rows // batch] * batch, "cpu"),
        )
        found: dict[str, Callable[[], object]] = {
            "LayerNorm": partial(norms.layer_norm, x, weight, None, 1e-5),
            "RMSNorm": partial(norms.rms_norm, x, weight, 1e-5),
            "GeGLU": partial(gated.gate_up, inner, "gelu"),
            "SwiGLU": partial(gated.gate_up, inner, "silu"),
            "rotation": partial(rope.rotate, heads, cos, cos),
            "mean pooling": partial(segments.reduce, x, "mean", ends),
        }
        for name, function in found.items():

            def by_torch(function: Callable[[], object] = function) -> None:
                with without_native():
                    function()

            yield f"{name}, {rows:,} tokens", {"torch": by_torch, native.name(): function}


def forwards(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield forwards of the whole model, with the kernels that this machine uses and without."""
    model = load_model(minilm_directory(), MINILM_ID, torch.device("cpu"), dtype)
    texts = real_texts(8 * BATCH).texts
    mix = [model.prepare(EncodeWork(texts[i : i + BATCH])) for i in range(0, len(texts), BATCH)]
    query = [model.prepare(EncodeWork(["what is the best way to store a packed sequence"]))]
    for name, prepared in (("MiniLM's forward, mix", mix), ("MiniLM's forward, one query", query)):

        def forward(prepared: list[Prepared] = prepared) -> None:
            for one in prepared:
                model.forward(one.head, one.sequences)

        def by_torch(forward: Callable[[], None] = forward) -> None:
            with without_native():
                forward()

        yield name, {"torch": by_torch, native.name(): forward}


@contextmanager
def without_native() -> Iterator[None]:
    with patch.object(library, "choice", lambda: "none: for comparison"):
        yield


def take_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, a number a round."""
    repeats = {}
    for name, way in ways.items():
        way()
        began = time.perf_counter()
        way()
        repeats[name] = max(1, int(SECONDS / (time.perf_counter() - began)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for _ in range(repeats[name]):
                way()
            seconds[name].append((time.perf_counter() - began) / repeats[name])
    return seconds


def report(name: str, seconds: Mapping[str, list[float]]) -> None:
    ratios = {
        way: median(one / other for one, other in zip(seconds["torch"], own, strict=True))
        for way, own in seconds.items()
        if way != "torch"
    }
    reported = ", ".join(f"{way} {ratio:.2f}" for way, ratio in ratios.items())
    print(f"  {name:<36} {median(seconds['torch']) * 1e3:9.3f} ms   {reported}", flush=True)


if __name__ == "__main__":
    main()

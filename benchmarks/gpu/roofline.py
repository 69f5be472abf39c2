"""Times that the steps should measure, predicted from the sizes of a model and the rates of a GPU:
`python -m benchmarks.gpu.roofline`.

Each kernel takes as long as its arithmetic, its bytes or its launch from a CUDA graph, whichever is
longest, and kernels run one after another. A measured time that differs from its prediction by more
than TOLERANCE has a cause to look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.gpu.report import Row
from benchmarks.models.families import PUBLISHED, FamilyShape

TOLERANCE: Final = 0.2
_BYTES: Final = 2
"""Bytes of a bfloat16 number."""

_TILE: Final = 128
"""Queries and keys that flash attention computes at a time."""

_WHOLE_FORWARD_KERNELS: Final = 6
"""Embeddings, angles, the final norm and the head."""

_NORM_ROWS: Final = {
    # Rows of the hidden size that a layer's norms read and write, by kernel.
    "bert": (3, 3),
    "modernbert": (2, 4),
    "qwen3": (2, 4),
    "gemma3_text": (2, 3, 2, 3),
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates of a GPU, of one bfloat16 product and of one kernel that only moves data.

    Attributes:
        matrix: FLOP/s of a large matrix multiplication.
        attention: FLOP/s of flash attention over tiles of short sequences, padding included.
        memory: Bytes/s of a kernel.
        host_copy: Bytes/s from page-locked host memory.
        kernel_seconds: The shortest kernel, with its launch from a graph.
        host_seconds: Filling a graph's inputs, its launch, and reading the answer.
    """

    name: str
    matrix: float
    attention: float
    memory: float
    host_copy: float
    kernel_seconds: float = 3e-6
    host_seconds: float = 150e-6


# The H200's rates are those of docs/gpu.md. Others are scaled by the datasheets.
GPUS: Final = (
    Gpu("H200", 758e12, 136e12, 3.5e12, 52e9),
    Gpu("H100", 758e12, 136e12, 2.5e12, 52e9),
    Gpu("A100", 239e12, 43e12, 1.4e12, 24e9),
    Gpu("L4", 93e12, 17e12, 0.22e12, 24e9),
)


@dataclass(frozen=True, slots=True)
class _Kernel:
    flops: float = 0.0
    bytes: float = 0.0
    is_attention: bool = False

    def seconds(self, gpu: Gpu) -> float:
        rate = gpu.attention if self.is_attention else gpu.matrix
        return max(gpu.kernel_seconds, self.flops / rate, self.bytes / gpu.memory)


@dataclass(frozen=True, slots=True)
class _Sizes:
    hidden: int
    queries: int
    keys: int
    head: int
    ffn: int
    is_gated: bool

    @staticmethod
    def of_shape(shape: FamilyShape) -> _Sizes:
        config = shape.config
        head = _number(config.get("head_dim"), shape.hidden // shape.heads)
        kv_heads = _number(config.get("num_key_value_heads"), shape.heads)
        ffn = _number(config.get("intermediate_size"), 4 * shape.hidden)
        return _Sizes(
            shape.hidden, shape.heads * head, kv_heads * head, head, ffn, shape.kind != "bert"
        )

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Return inputs and outputs of a layer's linear layers."""
        return (
            (self.hidden, self.queries + 2 * self.keys),
            (self.queries, self.hidden),
            (self.hidden, self.ffn * (2 if self.is_gated else 1)),
            (self.ffn, self.hidden),
        )

    @property
    def weights(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.products)


def gpu_named(name: str) -> Gpu | None:
    """Return the rates of a GPU by torch's name of it; None if they are unknown."""
    return next((gpu for gpu in GPUS if gpu.name in name), None)


def compared(row: Row, predicted: Mapping[str, float]) -> Row:
    """Return the row with the predicted value of each of these measurements, and the names of those
    that differ from it by more than TOLERANCE.
    """
    unexpected: list[str] = []
    for name, value in predicted.items():
        measured = row.get(name)
        if isinstance(measured, int | float) and abs(measured / value - 1) > TOLERANCE:
            unexpected.append(name)
    return {
        **row,
        **{f"predicted_{name}": value for name, value in predicted.items()},
        "unexpected": [*unexpected],
    }


def batch_seconds(gpu: Gpu, shape: FamilyShape, lengths: Sequence[int]) -> float:
    """Return the device's time for a forward pass over these sequences."""
    sizes = _Sizes.of_shape(shape)
    tokens = sum(lengths)
    pairs = sum(_padded(length) ** 2 for length in lengths)
    attention = _Kernel(
        4.0 * sizes.queries * pairs,
        _BYTES * tokens * 2 * (sizes.queries + sizes.keys),
        is_attention=True,
    )
    layer = [*_rows(shape.kind, sizes, tokens), attention]
    return _seconds(gpu, shape, layer)


def query_seconds(gpu: Gpu, shape: FamilyShape, tokens: int, queries: int = 1) -> float:
    """Return the time of a forward pass of short queries from a CUDA graph, until the answer is on
    the host.
    """
    return gpu.host_seconds + batch_seconds(gpu, shape, [tokens] * queries)


def step_seconds(gpu: Gpu, shape: FamilyShape, sequences: int, keys: int) -> float:
    """Return the time of a decode step from a CUDA graph, for sequences of `keys` tokens each."""
    sizes = _Sizes.of_shape(shape)
    read = _BYTES * sequences * keys * 2 * sizes.keys
    layer = [
        *_rows(shape.kind, sizes, sequences),
        _Kernel(4.0 * sequences * keys * sizes.queries, read, is_attention=True),
        _Kernel(),  # the sum of the splits
    ]
    head = _Kernel(bytes=_BYTES * shape.vocabulary * shape.hidden)
    return gpu.host_seconds + _seconds(gpu, shape, layer) + head.seconds(gpu)


def swap_seconds(gpu: Gpu, weights_bytes: int) -> float:
    """Return the time of a warm model's copy to the device."""
    return weights_bytes / gpu.host_copy


def mfu(gpu: Gpu, shape: FamilyShape, lengths: Sequence[int], peak: float) -> float:
    """Return the share of the datasheet's FLOP/s that linear layers and attention use."""
    sizes = _Sizes.of_shape(shape)
    useful = 2.0 * sizes.weights * sum(lengths) + 4.0 * sizes.queries * sum(n * n for n in lengths)
    return shape.layers * useful / batch_seconds(gpu, shape, lengths) / peak


def weights_bytes(shape: FamilyShape) -> int:
    """Return the bytes of a model's layers and token table."""
    layers = shape.layers * _Sizes.of_shape(shape).weights
    return _BYTES * (layers + shape.vocabulary * shape.hidden)


def _seconds(gpu: Gpu, shape: FamilyShape, layer: Sequence[_Kernel]) -> float:
    return (
        shape.layers * sum(kernel.seconds(gpu) for kernel in layer)
        + _WHOLE_FORWARD_KERNELS * gpu.kernel_seconds
    )


def _rows(kind: str, sizes: _Sizes, tokens: int) -> list[_Kernel]:
    """Return the kernels of a layer without attention."""
    products = [
        _Kernel(
            2.0 * tokens * inputs * outputs,
            _BYTES * (inputs * outputs + tokens * (inputs + outputs)),
        )
        for inputs, outputs in sizes.products
    ]
    norms = [_Kernel(bytes=_BYTES * tokens * rows * sizes.hidden) for rows in _NORM_ROWS[kind]]
    activation = _Kernel(bytes=_BYTES * tokens * (3 if sizes.is_gated else 2) * sizes.ffn)
    rotation = _Kernel(bytes=_BYTES * tokens * 2 * (sizes.queries + sizes.keys))
    return [*products, *norms, activation, *([rotation] if kind != "bert" else [])]


def _padded(length: int) -> int:
    return -(-length // _TILE) * _TILE


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


BATCH_TOKENS: Final = 16_384
QUERY_TOKENS: Final = 12
MEAN_LENGTH: Final = 51


def main() -> None:
    """Print a table of predictions for each GPU."""
    lengths = [MEAN_LENGTH] * (BATCH_TOKENS // MEAN_LENGTH)
    for gpu in GPUS:
        print(f"| {gpu.name} | a batch | one query | 32 | decode 1, 8, 64 of 128 tokens | swap |")
        print("| --- | --- | --- | --- | --- | --- |")
        for shape in PUBLISHED:
            one, many = (query_seconds(gpu, shape, QUERY_TOKENS, count) for count in (1, 32))
            steps = [step_seconds(gpu, shape, count, 128) for count in (1, 8, 64)]
            decode = ", ".join(f"{step * 1e3:.2f}" for step in steps)
            print(
                f"| {shape.name} | {batch_seconds(gpu, shape, lengths) * 1e3:.1f} ms "
                f"| {one * 1e3:.2f} ms | {many * 1e3:.2f} ms "
                f"| {f'{decode} ms' if shape.kind == 'qwen3' else ''} "
                f"| {swap_seconds(gpu, weights_bytes(shape)) * 1e3:.1f} ms |"
            )


if __name__ == "__main__":
    main()

"""Converts the initializers of an ONNX graph to safetensors, where their names are those of the
model's parameters.

torch's exporter keeps the names of parameters, except of weights that it transposes for MatMul:
those are named after the scope of their node (`/layer.0/attention/q_lin/MatMul`). Weights that
onnxruntime quantised (QDQ and dynamic) have a scale and a zero point next to them by name, and
become float32. The graph itself is not run or kept: the directory's config.json says the
architecture.

The file is read here, by protobuf's wire format and in place, because weights must not be held in
memory twice.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO, Final

import numpy as np

from libs.conversion.archive import MAX_TENSORS, CheckpointRefused
from libs.conversion.writing import ConversionReport, Output, Progress, write

MAX_NODES: Final = 200_000
MAX_AXES: Final = 8
MAX_NAME_BYTES: Final = 512
BLOCK_NUMBERS: Final = 1 << 20
"""Numbers of a tensor that are converted at a time."""

_FLOATS: Final = {
    1: ("F32", np.dtype("<f4")),
    10: ("F16", np.dtype("<f2")),
    16: ("BF16", np.dtype("<u2")),
}
_INTEGERS: Final = {2: np.dtype("u1"), 3: np.dtype("i1")}
_PARAMETER: Final = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_MATRIX_PRODUCTS: Final = (
    "MatMul",
    "MatMulInteger",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
)
_QUANTISED_GEMM: Final = "Gemm_MatMul"
"""A part of the name of a product that onnxruntime made of a Gemm. Its weight keeps the parameter's
name, and is transposed.
"""
_PASSED: Final = ("DequantizeLinear", "Identity", "Cast")
_FIXED64: Final = 1

Span = tuple[int, int]


@dataclass(slots=True)
class _Node:
    """An operation of the graph."""

    kind: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    axis: int | None = None


@dataclass(slots=True)
class _Initializer:
    """A constant of the graph: where its numbers are, or the numbers themselves where the file
    lists them one by one.
    """

    name: str = ""
    kind: int = 0
    shape: list[int] = field(default_factory=list)
    raw: Span = (0, 0)
    listed: Span = (0, 0)
    integers: list[int] = field(default_factory=list)
    is_external: bool = False


@dataclass(slots=True)
class _Graph:
    nodes: list[_Node] = field(default_factory=list)
    initializers: dict[str, _Initializer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter to write.

    Attributes:
        scale, zero: Of a quantised one, along `axis` where they are not single numbers.
    """

    stored: _Initializer
    is_transposed: bool
    scale: Any = None
    zero: Any = None
    axis: int = 0


def convert(
    source: BinaryIO, mapping: mmap.mmap, output: BinaryIO, progress: Progress
) -> ConversionReport:
    """Write the parameters of an ONNX file to an empty file. Raises CheckpointRefused, naming the
    fault.
    """
    graph = _read(mapping)
    external = next((one.name for one in graph.initializers.values() if one.is_external), None)
    if external is not None:
        raise CheckpointRefused(
            f"has the numbers of {external[:100]!r} in another file; only whole ONNX files are "
            "converted"
        )
    found, left_out = _parameters(graph, mapping)
    if not found:
        raise CheckpointRefused(
            "has no initializers with the names of parameters: export it again from torch, or "
            "use the safetensors"
        )
    made = [_output(name, weight, mapping) for name, weight in found.items()]
    return ConversionReport(
        len(made), write(made, output, progress), "onnx initializers", tuple(left_out[:20]), {}
    )


def _parameters(graph: _Graph, mapping: mmap.mmap) -> tuple[dict[str, _Weight], list[str]]:
    """Return the parameters by name, and the names of weights that have none."""
    found: dict[str, _Weight] = {}
    left_out: list[str] = []
    uses = _uses(graph)
    for name, stored in graph.initializers.items():
        is_quantised = name.endswith("_quantized") and stored.kind in _INTEGERS
        if stored.kind not in _FLOATS and not is_quantised:
            continue
        base = name.removesuffix("_quantized")
        if base.endswith(("_scale", "_zero_point")):
            continue
        product = next((node for node in uses.get(name, ()) if node.kind in _MATRIX_PRODUCTS), None)
        parameter = base
        is_transposed = (
            is_quantised
            and product is not None
            and _QUANTISED_GEMM in product.name
            and len(stored.shape) == 2
        )
        if not _PARAMETER.fullmatch(base):
            parameter, is_transposed = _scope(product), True
            if not parameter or len(stored.shape) != 2:
                if len(stored.shape) > 1:
                    left_out.append(base[:100])
                continue
        if parameter in found:
            raise CheckpointRefused(f"has two weights for the parameter {parameter[:100]!r}")
        found[parameter] = (
            _quantised(graph, stored, base, is_transposed, uses, mapping)
            if is_quantised
            else _Weight(stored, is_transposed)
        )
    return found, left_out


def _uses(graph: _Graph) -> dict[str, list[_Node]]:
    """Return the nodes that use each initializer, directly or through nodes that only dequantise or
    rename it.
    """
    readers: dict[str, list[_Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    uses: dict[str, list[_Node]] = {}
    for name in graph.initializers:
        found = list(readers.get(name, ()))
        for node in found[:64]:
            if node.kind in _PASSED and node.inputs[:1] == [name]:
                found += [reader for output in node.outputs for reader in readers.get(output, ())]
        uses[name] = found
    return uses


def _scope(node: _Node | None) -> str:
    """Return the name of the weight that a product is with, by the scope in the node's name; empty
    if it has none.
    """
    parts = node.name.strip("/").split("/")[:-1] if node is not None else []
    name = ".".join([*parts, "weight"])
    return name if parts and _PARAMETER.fullmatch(name) else ""


def _quantised(
    graph: _Graph,
    stored: _Initializer,
    base: str,
    is_transposed: bool,
    uses: Mapping[str, list[_Node]],
    mapping: mmap.mmap,
) -> _Weight:
    scale, zero = (
        graph.initializers.get(f"{base}{ending}") for ending in ("_scale", "_zero_point")
    )
    if scale is None or scale.kind != 1:
        raise CheckpointRefused(f"has no scale in float32 for the quantised weight {base[:100]!r}")
    scales = _small(scale, mapping)
    zeros = np.zeros(1, np.float32) if zero is None else _small(zero, mapping).astype(np.float32)
    axis = next(
        (
            node.axis
            for node in uses[stored.name]
            if node.kind == "DequantizeLinear" and node.axis is not None
        ),
        -1,
    )
    axis %= max(1, len(stored.shape))
    for numbers in (scales, zeros):
        if numbers.size != 1 and (not stored.shape or numbers.size != stored.shape[axis]):
            raise CheckpointRefused(
                f"has {numbers.size:,} scales or zero points for {base[:100]!r} of shape "
                f"{stored.shape}"
            )
    return _Weight(stored, is_transposed, scales, zeros, axis)


def _small(stored: _Initializer, mapping: mmap.mmap) -> Any:
    """Return the numbers of a scale or a zero point, as one row."""
    if stored.integers:
        return np.asarray(stored.integers, np.int64)
    if stored.kind not in (1, *_INTEGERS):
        raise CheckpointRefused(
            f"has the scale or zero point {stored.name[:100]!r} of the type {stored.kind}"
        )
    dtype = _INTEGERS[stored.kind] if stored.kind in _INTEGERS else np.dtype("<f4")
    return _numbers(stored, dtype, mapping).reshape(-1)


def _numbers(stored: _Initializer, dtype: Any, mapping: mmap.mmap) -> Any:
    """Return the numbers of an initializer in place, in its shape. Raises CheckpointRefused where
    their count is another one.
    """
    begin, end = stored.raw if stored.raw[1] else stored.listed
    count = prod(stored.shape)
    if end - begin != count * dtype.itemsize:
        raise CheckpointRefused(
            f"has {end - begin:,} bytes for {stored.name[:100]!r} of shape {stored.shape}"
        )
    return np.frombuffer(mapping, dtype, count, begin).reshape(stored.shape)


def _output(name: str, weight: _Weight, mapping: mmap.mmap) -> Output:
    stored = weight.stored
    if weight.scale is None:
        kind, dtype = _FLOATS[stored.kind]
    else:
        kind, dtype = "F32", _INTEGERS[stored.kind]
    numbers = _numbers(stored, dtype, mapping)
    spread = [-1 if axis == weight.axis else 1 for axis in range(len(stored.shape))]
    scale, zero = (
        one if one is None or one.size == 1 else one.reshape(spread)
        for one in (weight.scale, weight.zero)
    )
    if weight.is_transposed:
        numbers = numbers.T
        scale, zero = (one if one is None or one.ndim < 2 else one.T for one in (scale, zero))

    def blocks() -> Iterator[bytes]:
        if not numbers.ndim or not numbers.size:
            yield numbers.tobytes() if scale is None else _dequantised(numbers, scale, zero)
            return
        step = max(1, BLOCK_NUMBERS // max(1, numbers.size // numbers.shape[0]))
        for begin in range(0, numbers.shape[0], step):
            part = numbers[begin : begin + step]
            if scale is None:
                yield part.tobytes()
                continue
            own = [
                one[begin : begin + step] if one.ndim == numbers.ndim and one.shape[0] > 1 else one
                for one in (scale, zero)
            ]
            yield _dequantised(part, own[0], own[1])

    return Output(name, kind, tuple(numbers.shape), blocks)


def _dequantised(numbers: Any, scale: Any, zero: Any) -> bytes:
    with np.errstate(all="ignore"):  # a scale that is not finite makes numbers that are not
        return bytes(((numbers.astype(np.float32) - zero) * scale).astype("<f4").tobytes())


def _read(mapping: mmap.mmap) -> _Graph:
    """Return the graph of ModelProto (onnx/onnx.proto): field 7; of it nodes are field 1 and
    initializers field 5.
    """
    graph = _Graph()
    for number, value in _fields(mapping, (0, len(mapping))):
        if number == 7 and isinstance(value, tuple):
            for inner, span in _fields(mapping, value):
                if inner == 1 and isinstance(span, tuple):
                    graph.nodes.append(_node(mapping, span))
                elif inner == 5 and isinstance(span, tuple):
                    stored = _initializer(mapping, span)
                    if stored.name in graph.initializers:
                        raise CheckpointRefused(f"has the initializer {stored.name[:100]!r} twice")
                    graph.initializers[stored.name] = stored
                if len(graph.nodes) > MAX_NODES or len(graph.initializers) > MAX_TENSORS:
                    raise CheckpointRefused(
                        f"has more than {MAX_NODES:,} nodes or {MAX_TENSORS:,} initializers"
                    )
    if not graph.initializers:
        raise CheckpointRefused("is not an ONNX file with initializers")
    return graph


def _node(mapping: mmap.mmap, span: Span) -> _Node:
    node = _Node()
    for number, value in _fields(mapping, span):
        if not isinstance(value, tuple):
            continue
        if number == 1:
            node.inputs.append(_text(mapping, value))
        elif number == 2:
            node.outputs.append(_text(mapping, value))
        elif number == 3:
            node.name = _text(mapping, value)
        elif number == 4:
            node.kind = _text(mapping, value)
        elif number == 5:
            attribute = dict(_fields(mapping, value))
            name, axis = attribute.get(1), attribute.get(3)
            if isinstance(name, tuple) and isinstance(axis, int) and _text(mapping, name) == "axis":
                node.axis = axis - (1 << 64) if axis >= 1 << 63 else axis
    return node


def _initializer(mapping: mmap.mmap, span: Span) -> _Initializer:
    """TensorProto: dims 1, data_type 2, float_data 4, int32_data 5, name 8, raw_data 9, external
    data 13 and 14.
    """
    stored = _Initializer()
    for number, value in _fields(mapping, span):
        match number, value:
            case 1, int(size):
                stored.shape.append(size)
            case 1, (int(), int()):
                stored.shape += _varints(mapping, value, MAX_AXES)
            case 2, int(kind):
                stored.kind = kind
            case 4, (int(), int()):
                stored.listed = value
            case 5, (int(), int()):
                stored.integers += _varints(mapping, value, 1 << 16)
            case 5, int(one):
                stored.integers.append(one)
            case 8, (int(), int()):
                stored.name = _text(mapping, value)
            case 9, (int(), int()):
                stored.raw = value
            case 14, 1:
                stored.is_external = True
        if len(stored.shape) > MAX_AXES or len(stored.integers) > 1 << 16:
            raise CheckpointRefused(
                f"has an initializer of more than {MAX_AXES} axes or 65,536 listed integers"
            )
    return stored


def _text(mapping: mmap.mmap, span: Span) -> str:
    if span[1] - span[0] > MAX_NAME_BYTES:
        raise CheckpointRefused(
            f"has a name of {span[1] - span[0]:,} bytes; at most {MAX_NAME_BYTES} are read"
        )
    return mapping[span[0] : span[1]].decode("utf-8", "replace")


def _fields(mapping: mmap.mmap, span: Span) -> Iterator[tuple[int, int | Span]]:
    """Yield the fields of a message: numbers, and the spans of fields with a length. Raises
    CheckpointRefused for malformed messages.
    """
    place, end = span
    while place < end:
        key, place = _varint(mapping, place, end)
        match key & 7:
            case 0:
                value, place = _varint(mapping, place, end)
                yield key >> 3, value
            case 2:
                size, place = _varint(mapping, place, end)
                if size > end - place:
                    raise CheckpointRefused("is truncated, or is not an ONNX file")
                yield key >> 3, (place, place + size)
                place += size
            case 1 | 5:
                size = 8 if key & 7 == _FIXED64 else 4
                if size > end - place:
                    raise CheckpointRefused("is truncated, or is not an ONNX file")
                yield key >> 3, (place, place + size)
                place += size
            case _:
                raise CheckpointRefused("is not an ONNX file: it is not a protobuf message")


def _varints(mapping: mmap.mmap, span: Span, most: int) -> list[int]:
    found: list[int] = []
    place = span[0]
    while place < span[1] and len(found) <= most:
        value, place = _varint(mapping, place, span[1])
        found.append(value)
    return found


def _varint(mapping: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            raise CheckpointRefused("is truncated, or is not an ONNX file")
        byte = mapping[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value & ((1 << 64) - 1), place
    raise CheckpointRefused("is not an ONNX file: a number has more than 64 bits")

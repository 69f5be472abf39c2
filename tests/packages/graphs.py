"""ONNX graphs of packages: run with float activations as a reference, and stripped of what `shoal
models convert` cannot name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnxruntime


def float_session(path: Path, output: str = "") -> Any:
    """Return a session of onnxruntime on a graph that does not quantise activations.

    `output` is a value to return instead of the graph's output.
    """
    model = onnx.load(path)
    float_products(model)
    _skip_quantisation(model)
    if output:
        del model.graph.output[:]
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None)
        )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def float_products(model: Any) -> None:
    """Replace each product of dynamically quantised activations by one in float32, with its weight
    in float32.

    The graph quantises an activation, multiplies integers, casts the result and multiplies it by
    both scales. Where a graph also has the weight in float32 (`NAME` in addition to
    `NAME_quantized`), that one is used.
    """
    nodes, made = model.graph.node, []
    stored = {one.name: one for one in model.graph.initializer}
    made_by = {node.output[0]: node for node in nodes if node.output}
    used_by = {name: node for node in nodes for name in node.input}
    dropped: set[str] = set()
    for node in nodes:
        if node.op_type != "MatMulInteger":
            continue
        quantising, cast = made_by[node.input[0]], used_by[node.output[0]]
        scaled = used_by[cast.output[0]]
        name = node.input[1].removesuffix("_quantized")
        if name not in stored:
            numbers = _dequantised(stored, name)
            stored[name] = onnx.numpy_helper.from_array(numbers, name)
            model.graph.initializer.append(stored[name])
        made.append(
            (
                scaled.name,
                onnx.helper.make_node(
                    "MatMul", [quantising.input[0], name], [scaled.output[0]], node.name
                ),
            )
        )
        dropped |= {node.name, cast.name, scaled.name}
    instead = dict(made)
    kept = [
        instead.get(node.name, node)
        for node in nodes
        if node.name in instead or node.name not in dropped
    ]
    del nodes[:]
    nodes.extend(kept)


def _dequantised(stored: dict[str, Any], name: str) -> Any:
    weight, scale, zero = (
        onnx.numpy_helper.to_array(stored[f"{name}_{ending}"])
        for ending in ("quantized", "scale", "zero_point")
    )
    return ((weight.astype(np.float32) - zero.astype(np.float32)) * scale).astype(np.float32)


def _skip_quantisation(model: Any) -> None:
    """Remove the pairs of nodes that quantise activations and dequantise them again."""
    nodes = model.graph.node
    quantised = {
        node.output[0]: node.input[0] for node in nodes if node.op_type == "QuantizeLinear"
    }
    instead = {
        node.output[0]: quantised[node.input[0]]
        for node in nodes
        if node.input and node.input[0] in quantised
    }
    kept = [node for node in nodes if not node.output or node.output[0] not in instead]
    for node in kept:
        node.input[:] = _followed(node.input, instead)
    outputs = [out.name for out in model.graph.output if out.name in instead]
    kept += [
        onnx.helper.make_node("Identity", _followed([name], instead), [name]) for name in outputs
    ]
    del nodes[:]
    nodes.extend(kept)


def _followed(names: Sequence[str], instead: dict[str, str]) -> list[str]:
    found = list(names)
    while any(name in instead for name in found):
        found = [instead.get(name, name) for name in found]
    return found


def write_stripped(
    source: Path, target: Path, prefix: str, joined: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Write the weights below `prefix` (`m.`), in float32, under the names that they have in the
    model itself.

    The exported graph wraps the model in another module. Products name their weights by their
    scope, as `shoal models convert` reads them; nothing else of the graph is kept, and a Gemm that
    was quantised as a product is written as torch stores it. `joined`: parameters of which the
    graph has parts, along the second axis, under other names.
    """
    model = onnx.load(source)
    float_products(model)
    made = onnx.ModelProto(ir_version=model.ir_version)
    stored = {one.name: one for one in model.graph.initializer}
    for name, tensor in _weights(model, stored, prefix):
        made.graph.initializer.append(
            onnx.numpy_helper.from_array(np.ascontiguousarray(tensor), name)
        )
    for name, parts in (joined or {}).items():
        numbers = np.concatenate(
            [onnx.numpy_helper.to_array(stored[part]) for part in parts], axis=1
        )
        made.graph.initializer.append(onnx.numpy_helper.from_array(numbers, name))
    onnx.save(made, target)


def _weights(model: Any, stored: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    products = set()
    for node in model.graph.node:
        scope = node.name.strip("/").replace("/", ".")
        if node.op_type != "MatMul" or not scope.startswith(prefix) or node.input[1] not in stored:
            continue
        # torch stores [out, in], a product's second operand is [in, out].
        name = f"{scope.removeprefix(prefix).rpartition('.')[0]}.weight"
        products.add(node.input[1])
        yield name, onnx.numpy_helper.to_array(stored[node.input[1]]).T
    for name, tensor in stored.items():
        if name in products or not name.startswith(prefix):
            continue
        if name.endswith("_quantized") and name.removesuffix("_quantized") not in products:
            base = name.removesuffix("_quantized")
            yield base.removeprefix(prefix), _dequantised(stored, base)
        elif tensor.data_type == onnx.TensorProto.FLOAT and not name.endswith("_scale"):
            yield name.removeprefix(prefix), onnx.numpy_helper.to_array(tensor)

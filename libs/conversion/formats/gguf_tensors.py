"""Converts the tensors of a GGUF file to safetensors under the names of transformers, dequantised.
Runs in the child.

Quantised tensors become float32, which holds their values exactly; F32, F16 and BF16 keep their
type. Names and the two changes that llama.cpp makes to weights when it writes GGUF are undone:
query and key rows of llama are interleaved for its rotary embedding, and gemma3's norms have 1
added.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Any, BinaryIO, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from libs.conversion.archive import CheckpointRefused
from libs.conversion.formats.gguf_file import GgufLayout, GgufTensor, read_layout
from libs.conversion.writing import ConversionReport, Output, Progress, write

BLOCK_NUMBERS: Final = 1 << 20
"""Numbers of a tensor that are dequantised at a time; some types take several arrays of as many
float32.
"""

_KINDS: Final = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K",
)  # fmt: skip
_PLAIN: Final = ("F32", "F16", "BF16")
_COMMON: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYERS: Final = {
    "llama": {**_COMMON, "ffn_norm": "post_attention_layernorm"},
    "qwen2": {**_COMMON, "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        **_COMMON,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_OUTSIDE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Final = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")


def convert(
    source: BinaryIO, mapping: mmap.mmap, output: BinaryIO, progress: Progress
) -> ConversionReport:
    """Write the tensors of a GGUF file to an empty file. Raises CheckpointRefused, naming the
    fault.
    """
    layout = read_layout(mapping)
    check_architecture(layout)
    spans = sorted(
        (tensor.begin, tensor.begin + _stored_bytes(tensor), tensor.name)
        for tensor in layout.tensors
    )
    if not spans:
        raise CheckpointRefused("has no tensors")
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise CheckpointRefused(f"has the tensors {name!r} and {other!r} on the same bytes")
    if spans[-1][1] > len(mapping):
        raise CheckpointRefused(
            f"is truncated: the tensor {spans[-1][2]!r} ends at byte {spans[-1][1]:,} of "
            f"{len(mapping):,}"
        )
    made = [_output(tensor, layout, mapping) for tensor in layout.tensors]
    digest = write(made, output, progress)
    return ConversionReport(len(made), digest, f"gguf {version('gguf')}", (), {})


def check_architecture(layout: GgufLayout) -> None:
    """Raise CheckpointRefused for an architecture with unknown names and changes."""
    if layout.architecture not in _LAYERS:
        known = ", ".join(sorted(_LAYERS))
        raise CheckpointRefused(
            f"has the architecture {layout.architecture[:80]!r}; {known} are converted"
        )
    if any(tensor.name == "rope_freqs.weight" for tensor in layout.tensors):
        raise CheckpointRefused(
            "has rope_freqs.weight, scaled rotary frequencies, and GGUF does not store their "
            "settings hold: use the safetensors"
        )


def _stored_bytes(tensor: GgufTensor) -> int:
    """Return the bytes of a tensor in the file. Raises CheckpointRefused for types that are not
    converted.
    """
    try:
        kind = GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise CheckpointRefused(
            f"has the tensor {tensor.name!r} of the unknown type {tensor.kind}"
        ) from None
    if kind.name not in _KINDS:
        raise CheckpointRefused(
            f"has the tensor {tensor.name!r} of type {kind.name}; {', '.join(_KINDS)} are converted"
        )
    numbers, size = GGML_QUANT_SIZES[kind]
    if not tensor.numbers or tensor.shape[-1] % numbers:
        raise CheckpointRefused(
            f"has the tensor {tensor.name!r} of shape {list(tensor.shape)}, which {kind.name} "
            "cannot have"
        )
    return tensor.numbers // numbers * size


def _output(tensor: GgufTensor, layout: GgufLayout, mapping: mmap.mmap) -> Output:
    kind = GGMLQuantizationType(tensor.kind)
    name = _renamed(tensor.name, layout.architecture)
    columns = tensor.shape[-1]
    rows = tensor.numbers // columns
    data: Any = np.frombuffer(mapping, np.uint8, _stored_bytes(tensor), tensor.begin).reshape(
        rows, -1
    )
    order = _row_order(tensor, layout, rows)
    is_offset = layout.architecture == "gemma3" and name.endswith("norm.weight")

    def blocks() -> Iterator[bytes]:
        step = max(1, BLOCK_NUMBERS // columns)
        for begin in range(0, rows, step):
            part = (
                data[begin : begin + step] if order is None else data[order[begin : begin + step]]
            )
            if kind.name in _PLAIN and not is_offset:
                yield part.tobytes()
                continue
            with np.errstate(
                all="ignore"
            ):  # a scale that is not finite gives such numbers, as in the package
                numbers = dequantize(np.ascontiguousarray(part), kind)
                made = numbers - np.float32(1) if is_offset else numbers
            yield made.astype("<f4").tobytes()

    is_plain = kind.name in _PLAIN and not is_offset
    shape = tensor.shape if order is None or len(tensor.shape) > 1 else (rows * columns,)
    return Output(name, kind.name if is_plain else "F32", shape, blocks)


def _renamed(name: str, architecture: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYERS[architecture]:
        raise CheckpointRefused(
            f"has the tensor {name!r}, which {architecture} models of transformers do not have"
        )
    return f"model.layers.{match[1]}.{_LAYERS[architecture][match[2]]}.{match[3]}"


def _row_order(tensor: GgufTensor, layout: GgufLayout, rows: int) -> Any:
    """Return the order in which transformers has the rows of the file; None if it is the same."""
    match = _LAYER.fullmatch(tensor.name)
    if layout.architecture != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    if match[3] == "bias":
        raise CheckpointRefused(
            f"has the tensor {tensor.name!r}: biases of llama's queries and keys are not converted"
        )
    heads = layout.number("attention.head_count")
    if match[2] == "attn_k":
        heads = layout.number("attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise CheckpointRefused(
            f"has the tensor {tensor.name!r} of {rows:,} rows for {heads} heads"
        )
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

"""MiniLM in ONNX Runtime, a peer of the forward pass. `python -m
benchmarks.peers.onnxruntime_model FOLDER` converts it.

torch exports the model with pooling and dynamic shapes. For int8, ONNX Runtime's dynamic
quantisation converts the weights of matrix products, per channel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.peers.install import model_folder


def convert(folder: Path) -> None:
    """Write float32.onnx and int8.onnx. Inputs: ids and mask, both int64 [texts, tokens]."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from benchmarks.peers.pooled import PooledPeer, example

    axes = {0: "texts", 1: "tokens"}
    torch.onnx.export(
        PooledPeer("eager"),
        example(),
        str(folder / "float32.onnx"),
        input_names=["ids", "mask"],
        output_names=["vectors"],
        dynamic_axes={"ids": axes, "mask": axes, "vectors": {0: "texts"}},
        dynamo=False,
    )
    quantize_dynamic(
        folder / "float32.onnx",
        folder / "int8.onnx",
        per_channel=True,
        weight_type=QuantType.QInt8,
    )


class OnnxRuntimeModel:
    """The exported model on the CPU in one data type, with `threads` threads."""

    def __init__(self, dtype: str, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session: Any = onnxruntime.InferenceSession(
            model_folder("onnxruntime") / f"{dtype}.onnx",
            options,
            providers=["CPUExecutionProvider"],
        )

    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """[texts, dimensions]."""
        vectors: NDArray[np.float32] = self._session.run(None, {"ids": ids, "mask": mask})[0]
        return vectors


if __name__ == "__main__":
    typer.run(convert)

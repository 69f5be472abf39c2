"""MiniLM in OpenVINO, a peer of the forward pass. `python -m benchmarks.peers.openvino_model
FOLDER` converts it.

transformers' model with mean pooling and normalisation is converted by OpenVINO's torch front-end,
with dynamic shapes, and stored in float32; it is computed in float32 or bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.peers.install import model_folder

FILE: Final = "minilm.xml"
PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16"}


def convert(folder: Path) -> None:
    """Write the model's graph and its weights. Inputs: ids and mask, both int64 [texts, tokens]."""
    import openvino

    from benchmarks.peers.pooled import PooledPeer, example

    converted = openvino.convert_model(PooledPeer(), example_input=example())
    converted.reshape({0: [-1, -1], 1: [-1, -1]})
    openvino.save_model(converted, folder / FILE, compress_to_fp16=False)


class OpenVinoModel:
    """The converted model on the CPU in one data type, with one stream of `threads` threads. They
    are not pinned to cores, since the threads of two processes would be pinned to the same one."""

    def __init__(self, dtype: str, threads: int) -> None:
        import openvino

        reported = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }
        self._request: Any = (
            openvino.Core()
            .compile_model(model_folder("openvino") / FILE, "CPU", reported)
            .create_infer_request()
        )

    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """[texts, dimensions]; valid until the next call."""
        vectors: NDArray[np.float32] = self._request.infer(
            [ids, mask], share_inputs=True, share_outputs=True
        )[0]
        return vectors


if __name__ == "__main__":
    typer.run(convert)

"""MiniLM in CTranslate2, a peer of the forward pass. `python -m benchmarks.peers.ctranslate2_model
FOLDER` converts it.

CTranslate2's own converter reads the published files. It computes the encoder; pooling is done
here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.common.texts import minilm_directory
from benchmarks.peers.install import model_folder
from benchmarks.peers.padding import mean_pooled

FOLDER: Final = "minilm"


def convert(folder: Path) -> None:
    """Write the model in float32; other data types are made when it is loaded."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(minilm_directory())).convert(str(folder / FOLDER))


class CTranslate2Model:
    """The converted model on the CPU in one data type, with `threads` threads."""

    def __init__(self, dtype: str, threads: int) -> None:
        import ctranslate2

        self._storage = ctranslate2.StorageView
        self._encoder: Any = ctranslate2.Encoder(
            str(model_folder("ctranslate2") / FOLDER),
            device="cpu",
            compute_type=dtype,
            inter_threads=1,
            intra_threads=threads,
        )

    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """[texts, dimensions]."""
        lengths = self._storage.from_array(mask.sum(1).astype(np.int32))
        found = self._encoder.forward_batch(
            self._storage.from_array(ids.astype(np.int32)), lengths=lengths
        )
        return mean_pooled(np.array(found.last_hidden_state), mask)


if __name__ == "__main__":
    typer.run(convert)

"""MiniLM in candle by the package candding, a peer of the forward pass. `python -m
benchmarks.peers.candle_model FOLDER` writes a hub cache of the published files, because the package
reads models only from one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.common.texts import MINILM_ID, minilm_directory
from benchmarks.peers.install import model_folder

_REVISION: Final = "0" * 40


def convert(folder: Path) -> None:
    """Write the cache: hub/models--org--name/{refs, snapshots}."""
    model = folder / "hub" / f"models--{MINILM_ID.replace('/', '--')}"
    shutil.copytree(minilm_directory(), model / "snapshots" / _REVISION)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(_REVISION)


class CandleModel:
    """The model on the CPU in float32. It tokenises texts itself; rayon has `threads` threads."""

    def __init__(self, threads: int) -> None:
        os.environ |= {
            "HF_HOME": str(model_folder("candle")),
            "HF_HUB_OFFLINE": "1",
            "RAYON_NUM_THREADS": str(threads),
        }
        import candding

        self._model: Any = candding.TextEmbedding(MINILM_ID, device="cpu", dtype="f32")

    def __call__(self, texts: Sequence[str], batch: int) -> NDArray[np.float32]:
        """[texts, dimensions]."""
        vectors: NDArray[np.float32] = np.asarray(
            self._model.embed(list(texts), batch_size=batch), np.float32
        )
        return vectors


if __name__ == "__main__":
    typer.run(convert)

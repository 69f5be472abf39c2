"""Whole encoders on the Triton kernels: interpreted here, where no GPU is, so that it is known how
they are wired together.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from libs.kernels import triton_here
from libs.models.interface.packed import Packed
from libs.models.text.registry import build_encoder
from libs.models.weights import TensorFile
from tests.parity.checkpoints import Kind, write_checkpoint

# Post-norm; relative bias; pre-norm with windows and GeGLU; grouped queries with norms of their
# own; sandwich norms; distances; short convolutions.
KINDS: tuple[Kind, ...] = (
    "bert", "mpnet", "modernbert", "qwen3", "gemma3_text", "deberta-v2", "lfm2",
)  # fmt: skip


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, for the accelerator alone"
)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_path(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    write_checkpoint(kind, tmp_path, hidden=32, heads=2, layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    encoder, *_ = build_encoder(
        config,
        TensorFile.open(tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        head_tables={},
    )
    rng = np.random.default_rng(0)
    batch = Packed.from_sequences(
        [rng.integers(5, 300, length, dtype=np.int32) for length in (1, 4, 9)]
    )

    def forward() -> tuple[Tensor, Tensor]:
        return encoder(batch), encoder(batch, rows="last")

    plain = forward()
    monkeypatch.setattr(triton_here, "_DEVICES", ("cpu",))
    for got, wanted in zip(forward(), plain, strict=True):
        assert not torch.equal(got, wanted)
        assert ((got - wanted).abs().max() / wanted.abs().max()) < 1e-5

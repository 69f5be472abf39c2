"""MiniLM in OpenVINO, a peer of the forward pass. `python -m benchmarks.peers.openvino_model FILE`
converts it.

transformers' model with mean pooling and normalisation is converted by OpenVINO's torch front-end,
with dynamic shapes, and stored in float32; it is computed in float32 or bfloat16.
benchmarks/peers/setup_openvino.sh installs OpenVINO and converts the model; all this runs in
.cache/openvino-venv, which also sees the project's packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.common.texts import MAX_TOKENS, Mix, minilm_directory, plain_tokenizer

CONVERTED: Final = Path(__file__).resolve().parents[2] / ".cache/openvino-venv/minilm.xml"
PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16"}


def convert(file: Path) -> None:
    """Write the model's graph to `file` and its weights next to it. Inputs: ids and mask, both
    int64 [texts, tokens].
    """
    import openvino
    import torch
    from transformers import AutoModel

    class Pooled(torch.nn.Module):
        """[texts, dimensions] float32, of length 1: the means over each text's tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(
                str(minilm_directory()), dtype=torch.float32, local_files_only=True
            ).eval()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            counted = mask.unsqueeze(-1).to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1)

    ids, mask = torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    converted = openvino.convert_model(Pooled(), example_input=(ids, mask))
    converted.reshape({0: [-1, -1], 1: [-1, -1]})
    openvino.save_model(converted, file, compress_to_fp16=False)


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
            openvino.Core().compile_model(CONVERTED, "CPU", reported).create_infer_request()
        )

    def __call__(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        """[texts, dimensions]; valid until the next call."""
        vectors: NDArray[np.float32] = self._request.infer(
            [ids, mask], share_inputs=True, share_outputs=True
        )[0]
        return vectors


def padded(sequences: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ids and mask of one batch, [texts, tokens of its longest text]; 0 beyond the end of a
    text.
    """
    longest = max(map(len, sequences))
    ids, mask = (
        np.zeros((len(sequences), longest), np.int64),
        np.zeros((len(sequences), longest), np.int64),
    )
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1
    return ids, mask


def token_ids(mix: Mix) -> list[list[int]]:
    """Return the token ids of each text, special tokens included."""
    tokenizer = plain_tokenizer(minilm_directory())
    tokenizer.enable_truncation(MAX_TOKENS)
    return [encoding.ids for encoding in tokenizer.encode_batch(mix.texts)]


if __name__ == "__main__":
    typer.run(convert)

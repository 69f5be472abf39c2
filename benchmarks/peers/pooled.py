"""MiniLM as one torch module with pooling, which converters trace."""

from __future__ import annotations

import torch
from transformers import AutoModel

from benchmarks.common.texts import minilm_directory


class PooledPeer(torch.nn.Module):
    """The normalised means over each text's tokens: ids and mask, int64 [texts, tokens], to float32
    [texts, dimensions].
    """

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        self.model = AutoModel.from_pretrained(
            str(minilm_directory()),
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation=attention,
        ).eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        counted = mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * counted).sum(1) / counted.sum(1), dim=1)


def example() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask to trace with: two texts, one of which is padded."""
    ids, mask = torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    return ids, mask

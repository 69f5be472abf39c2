"""A checkpoint directory to load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from libs.catalog.card import Card
from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The arguments of `libs.models.load_served_model`, which describes them."""

    directory: Path
    model_id: str
    device: torch.device
    dtype: torch.dtype
    overrides: Overrides | None = None
    base: Path | None = None
    memory_bytes: int = 0

    def card(self) -> Card:
        """Read the card. Raises ModelBroken as `read_card` does."""
        return read_card(self.directory, self.model_id, self.overrides, self.base)

    def in_float32(self) -> LoadArguments:
        """Return the same model on the CPU in float32, whatever type its card names."""
        wide = None if self.overrides is None else replace(self.overrides, dtype="float32")
        return replace(self, device=torch.device("cpu"), dtype=torch.float32, overrides=wide)

"""The tensors outside the encoder, for a head with a separate configuration. Every one must be
used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from libs.errors import ModelBroken
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.weights import TensorFile


class HeadState(Mapping[str, Tensor]):
    """The head's tensors, float32 on the device. It records which are still unused.

    Args:
        config: The name of the head's configuration file.
    """

    def __init__(self, tensors: TensorFile, device: torch.device, config: str) -> None:
        self._tensors, self._device, self._config = tensors, device, config
        self._left = set(tensors.names())
        self._names = frozenset(self._left)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        self._left.discard(name)
        return self._tensors.read(name).to(device=self._device, dtype=torch.float32)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def drop(self, prefix: str) -> None:
        """Mark known tensors that no head needs as used."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def check_all_used(self) -> None:
        """Raise ModelBroken naming an unused tensor, which does not belong to the model."""
        for name in sorted(self._left):
            raise ModelBroken(
                f"{self._tensors.tensor_file(name)}: tensor {name!r} does not belong to the "
                f"model in {self._config}"
            )


def projection(
    state: Mapping[str, Tensor], stem: str, inputs: int, size: int, file: str
) -> HeadLinear | None:
    """Load the layer from the encoder's hidden size to the head's. The gliner and glirel packages
    have one only where the sizes differ.
    """
    if inputs == size:
        return None
    check_shape(state, f"{stem}.weight", (size, inputs), file)
    check_shape(state, f"{stem}.bias", (size,), file)
    return HeadLinear(state, stem, "identity")

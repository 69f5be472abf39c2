"""The images of items with one image each: uint8 pixels are normalised on the device for an image
encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from libs.errors import TaskNotSupported
from libs.models.images.decoding import decoding
from libs.models.images.processing import ImageProcessing
from libs.models.interface.sequences import YieldPoint
from libs.models.interface.work import Parts

MAX_BATCH_IMAGES: Final = 8
"""Images of one forward of an encoder. A larger number only takes more memory."""


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image as an encoder reads it."""

    pixels: NDArray[np.generic]
    """uint8 [height, width, 3], from `ImageProcessing`."""
    width: int
    """Width of the upright image that the client sent."""
    height: int
    """Height of the upright image that the client sent."""


def read_input_image(parts: Parts, processing: ImageProcessing, model: str) -> InputImage:
    """Return an item's image. Raises TaskNotSupported or InvalidInput with the part's path."""
    part = parts[0]
    if len(parts) > 1:
        raise TaskNotSupported(
            f"{model} reads one image per item, not {len(parts)} parts",
            field=part.field.rpartition(".")[0],
        )
    if not isinstance(part.content, bytes):
        raise TaskNotSupported(
            f"{model} reads images, not texts: send a question as the instruction",
            field=part.field,
        )
    with decoding(part.content, part.field) as image:
        return InputImage(processing.apply(image, part.field), image.width, image.height)


class PixelTower(nn.Module):
    """An image encoder behind its normalisation. The encoder maps normalised [images, 3, height,
    width] to [images, rows, width].
    """

    def __init__(self, encoder: nn.Module, processing: ImageProcessing) -> None:
        super().__init__()
        self.encoder = encoder
        self._processing = processing
        self.mean: Tensor
        self.std: Tensor
        for name in ("mean", "std"):
            numbers = torch.tensor(getattr(processing, name), dtype=torch.float32)
            self.register_buffer(name, numbers[:, None, None], persistent=False)

    @torch.inference_mode()
    def states(
        self, images: Sequence[NDArray[np.generic]], yield_point: YieldPoint
    ) -> list[Tensor]:
        """Map images, uint8 [height, width, 3] each, to states, [rows, width] each. A repeated
        image is computed once.
        """
        found: dict[int, Tensor] = {}
        sizes: dict[tuple[int, ...], list[NDArray[np.generic]]] = {}
        for image in {id(each): each for each in images}.values():
            sizes.setdefault(image.shape, []).append(image)
        for alike in sizes.values():
            for start in range(0, len(alike), MAX_BATCH_IMAGES):
                some = alike[start : start + MAX_BATCH_IMAGES]
                found |= zip(map(id, some), self._forward(np.stack(some), yield_point), strict=True)
        return [found[id(each)] for each in images]

    def _forward(self, images: NDArray[np.generic], yield_point: YieldPoint) -> Tensor:
        weight = next(self.encoder.parameters())
        pixels = torch.from_numpy(images).to(weight.device).permute(0, 3, 1, 2).float()
        # Divide, because 1 / 255 has no exact float32. This matches transformers, which multiplies
        # in float64.
        normal = (pixels / (1 / self._processing.scale) - self.mean) / self.std
        forward: Callable[[Tensor, YieldPoint], Tensor] = self.encoder.forward
        return forward(normal.to(weight.dtype), yield_point)

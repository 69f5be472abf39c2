"""Images of one item each, as the modules of image encoders take them: uint8 pixels to normalised
ones, on the device.
"""

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
from libs.models.work import Parts, YieldPoint

MAX_AT_ONCE: Final = 8
"""Images of one forward of an encoder: more would only take more memory."""


@dataclass(frozen=True, slots=True)
class Picture:
    """`pixels`: uint8 [height, width, 3], as `ImageProcessing` makes them. `width`, `height`: of
    the upright image as sent.
    """

    pixels: NDArray[np.generic]
    width: int
    height: int


def picture_of(parts: Parts, processing: ImageProcessing, model: str) -> Picture:
    """The image of an item. Raises TaskNotSupported or InvalidInput with the part's path."""
    part = parts[0]
    if len(parts) > 1:
        raise TaskNotSupported(
            f"{model} reads one image an item, not {len(parts)} parts",
            field=part.field.rpartition(".")[0],
        )
    if not isinstance(part.content, bytes):
        raise TaskNotSupported(
            f"{model} reads images, not texts: a question goes into the instruction",
            field=part.field,
        )
    with decoding(part.content, part.field) as image:
        return Picture(processing.apply(image, part.field), image.width, image.height)


class Tower(nn.Module):
    """An image encoder behind its normalisation; the module: normalised [images, 3, height, width]
    -> [images, rows, width].
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
    def states(self, images: Sequence[NDArray[np.generic]], between: YieldPoint) -> list[Tensor]:
        """uint8 [height, width, 3] each -> rows of states, [rows, width] each. One given twice is
        computed once.
        """
        found: dict[int, Tensor] = {}
        sizes: dict[tuple[int, ...], list[NDArray[np.generic]]] = {}
        for image in {id(each): each for each in images}.values():
            sizes.setdefault(image.shape, []).append(image)
        for alike in sizes.values():
            for start in range(0, len(alike), MAX_AT_ONCE):
                some = alike[start : start + MAX_AT_ONCE]
                found |= zip(map(id, some), self._forward(np.stack(some), between), strict=True)
        return [found[id(each)] for each in images]

    def _forward(self, images: NDArray[np.generic], between: YieldPoint) -> Tensor:
        weight = next(self.encoder.parameters())
        pixels = torch.from_numpy(images).to(weight.device).permute(0, 3, 1, 2).float()
        # Divided, as 1 / 255 has no exact float32: so the numbers are those of transformers, which
        # multiplies in float64.
        normal = (pixels / (1 / self._processing.scale) - self.mean) / self.std
        forward: Callable[[Tensor, YieldPoint], Tensor] = self.encoder.forward
        return forward(normal.to(weight.dtype), between)

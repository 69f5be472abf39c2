"""Inputs of published models: a scanned page and a few of its lines (scikit-image), and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import skimage

_IMAGES: Final = Path(skimage.__file__).parent / "data"
PAGE: Final = (_IMAGES / "page.png").read_bytes()
IMAGES: Final = [PAGE, (_IMAGES / "text.png").read_bytes()]
PHOTOS: Final = [
    (_IMAGES / name).read_bytes() for name in ("chelsea.png", "coffee.png", "rocket.jpg")
]

QUERY: Final = "Who wrote the first program for a machine?"
TEXTS: Final = [
    "Ada Lovelace wrote, in 1843 in London, what many call the first program: a way to compute "
    "Bernoulli numbers on the Analytical "
    "Engine that Charles Babbage had designed. The machine was never finished, and nobody ran "
    "her program while she lived.",
    (
        "The cat sat on the mat; it was 3.5 °C outside, and naïve Überraschung-users in 東京 were "
        "asleep."
    ),
    "Rain.",
]
LABELS: Final = ["history of computing", "weather", "cooking"]

"""The steps, in the order of what they would teach: whether it is right, how fast, why, and then the rest of the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Step:
    """`module`: of this package, with a function `run(context)`. `seconds`: the most that it may take on a GPU."""

    name: str
    module: str
    seconds: int
    measures: str


STEPS: Final = (
    Step("kernels", "kernels", 240, "every kernel against its definition, compiled for this GPU"),
    Step("parity", "parity", 180, "every family in float32 and bfloat16 against transformers"),
    Step("families", "families", 300, "published shapes: tokens/s, MFU, ratios to transformers and sentence-transformers"),
    Step("latency", "latency", 90, "one query of 12 tokens: p50 and p99"),
    Step("profile", "profile", 90, "where a batch's time goes: the longest kernels, and the gaps between them"),
    Step("swap", "swap", 90, "a warm model to the GPU, against the measured copy bandwidth"),
    Step("mesh", "mesh", 150, "the whole mesh on the GPU: bulk, single texts, mixed models"),
    Step("memory", "memory", 120, "forty models on a budget, and real out-of-memory recovery"),
)
BY_NAME: Final = {step.name: step for step in STEPS}

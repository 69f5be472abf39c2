"""The steps, in the order of their importance: correctness, speed, causes, and then the rest of the
mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MODELS: Final = (
    "libs",
    "tests/parity",
    "benchmarks/models/families.py",
    "benchmarks/gpu/published.py",
    "benchmarks/gpu/graphs.py",
)
_MESH: Final = ("libs", "services", "benchmarks/gpu/published.py")


@dataclass(frozen=True, slots=True)
class Step:
    """A measurement that runs in a separate process and writes a report."""

    name: str
    """The name of the step and of its module in this package, which has a function `run(context)`.
    """

    seconds: int
    """The most that it may take on a GPU."""

    measures: str
    uses: tuple[str, ...]
    """Files and folders, relative to the repository, on which its rows depend: a change there makes
    an earlier report void.
    """

    is_timed: bool = True
    """True if the step measures time; such steps do not run side by side."""

    is_expandable: bool = False
    """Whether torch's allocator has expandable segments there, as in a worker: for steps that move
    models.
    """

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.uses, f"benchmarks/gpu/steps/{self.name}.py")


STEPS: Final = (
    Step(
        "smoke",
        120,
        "one launch of each kind of thing that only a GPU can show",
        _MODELS,
        is_timed=False,
    ),
    Step(
        "kernels",
        240,
        "every kernel against its definition, compiled for this GPU",
        ("libs", "tests/kernels"),
        is_timed=False,
    ),
    Step(
        "parity",
        180,
        "every family in float32 and bfloat16 against transformers",
        _MODELS,
        is_timed=False,
    ),
    Step("latency", 90, "one query of 12 tokens: p50 and p99", _MODELS),
    Step(
        "decode",
        90,
        "ms per token of a generative model: eager, from graphs, transformers' generate",
        _MODELS,
    ),
    Step(
        "profile",
        90,
        "where a batch's time goes: the longest kernels, and the gaps between them",
        _MODELS,
    ),
    Step(
        "families",
        300,
        "published shapes: tokens/s, MFU, ratios to transformers and sentence-transformers",
        _MODELS,
        is_expandable=True,
    ),
    Step(
        "extractors",
        60,
        "DeBERTa-v3-base against transformers and by runs of equal lengths; grouped experts",
        _MODELS,
    ),
    Step(
        "swap",
        90,
        "a warm model to the GPU, against the measured copy bandwidth",
        (*_MESH, "benchmarks/models/swap.py"),
        is_expandable=True,
    ),
    Step("mesh", 150, "the whole mesh on the GPU: bulk, single texts, mixed models", _MESH),
    Step(
        "memory",
        120,
        "forty models on a budget, and real out-of-memory recovery",
        _MESH,
        is_expandable=True,
    ),
)
BY_NAME: Final = {step.name: step for step in STEPS}

"""How the answers of a request are chosen: sampling, stop strings, their number and log
probabilities. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.v1 import inference_pb2 as pb

from services.edge.messages.base import Fields, HttpError, invalid

MAX_ANSWERS: Final = 16
MAX_COPIES_BYTES: Final = 16 << 20
"""The most bytes of all copies of the prompts, where each is answered more than once."""
MAX_TOP_LOGPROBS: Final = 20
_SEEDS: Final = 1 << 64
SAMPLING: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""The fields of `pb.Sampling`, which OpenAI's and vLLM's wires have by the same names."""


@dataclass(frozen=True, slots=True)
class Choices:
    """`sampling`: values by our names. `names`: the caller's name of a field, by ours. `count`:
    answers to each prompt.
    """

    sampling: Mapping[str, float | None] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    count: int = 1
    top_logprobs: int | None = None

    def fill(self, task: pb.TextTask) -> None:
        """Raises HttpError for what fits no field; routers check the ranges."""
        for name, value in self.sampling.items():
            if value is None or (name == "top_k" and value == -1):  # vLLM's way to say all
                continue
            path = self._name(f"sampling.{name}", name)
            if not math.isfinite(value) or (name == "top_k" and not 0 <= value < 1 << 31):
                raise invalid(f"{path} is {value}, which is out of range", path)
            setattr(task.sampling, name, value)
        if self.count > 1:
            path = self._name("temperature", "temperature")
            if self.sampling.get("temperature") == 0:
                raise invalid(
                    f"{path} is 0, so that all {self.count} answers would be the same: raise it, or ask for one",
                    path,
                )
            if not task.sampling.HasField("temperature"):
                task.sampling.temperature = 1.0
        task.stop.extend(self.stop)
        if self.top_logprobs is not None:
            task.top_logprobs = self.top_logprobs

    def items(self, items: Sequence[pb.Item]) -> list[pb.Item]:
        """Each item once for each answer, with the seed of the answer. Raises HttpError where the
        copies exceed MAX_COPIES_BYTES.
        """
        size = self.count * sum(item.ByteSize() for item in items)
        if self.count > 1 and size > MAX_COPIES_BYTES:
            raise HttpError(
                "TOO_LARGE",
                f"{self.count} answers to each prompt take {size:,} bytes of prompts, more than the {MAX_COPIES_BYTES:,} that are"
                " allowed: ask for fewer answers at a time",
                field="n",
            )
        found = []
        for item in items:
            for number in range(self.count):
                own = pb.Item()
                own.CopyFrom(item)
                if self.seed is not None:
                    own.seed = (self.seed + number) % _SEEDS
                found.append(own)
        return found

    def fields(self) -> Fields:
        """The caller's names of our fields."""
        sampling = {
            f"text.sampling.{name}": self._name(f"sampling.{name}", name) for name in SAMPLING
        }
        stop, tops = self._name("stop", "stop"), self._name("top_logprobs", "top_logprobs")
        usual = self._name("sampling.temperature", "temperature")
        return {
            **sampling,
            "text.sampling": usual,
            "text.stop": stop,
            "text.stop[]": stop,
            "text.top_logprobs": tops,
        }

    def _name(self, ours: str, usual: str) -> str:
        return self.names.get(ours, usual)


def stops_of(stop: str | Sequence[str] | None) -> Sequence[str]:
    """One stop string, or several."""
    return (
        ([stop] if stop else []) if isinstance(stop, str) else [each for each in stop or () if each]
    )


def sampling_of(request: Any) -> dict[str, float | None]:
    """The fields of a request that has them by the names of `SAMPLING`."""
    return {name: getattr(request, name) for name in SAMPLING}


def count_of_answers(count: int | None, best_of: int | None) -> int:
    """Raises HttpError."""
    count = 1 if count is None else count
    if not 1 <= count <= MAX_ANSWERS:
        raise invalid(f"n is {count}; it must be within 1 and {MAX_ANSWERS}", "n")
    if best_of not in (None, count):
        raise invalid(
            f"best_of is {best_of}, and n is {count}: all answers that are written are returned, so leave it out",
            "best_of",
        )
    return count

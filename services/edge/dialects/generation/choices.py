"""Options that decide the answers of a generation request: sampling, stop strings, number of
answers, and log probabilities. Pure.
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
"""The maximum size of all copies of the prompts if each has several answers."""
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
"""The fields of `pb.Sampling`, which have the same names in OpenAI's and vLLM's requests."""


@dataclass(frozen=True, slots=True)
class AnswerChoices:
    """Options that decide the answers.

    Attributes:
        sampling: Values by the names of `SAMPLING`; None: the model's default.
        names: The caller's name of each field, by Shoal's name.
        seed: Makes sampling reproducible; answer i of a prompt uses `seed` + i.
        stop: Strings that end an answer.
        count: The number of answers per prompt.
        top_logprobs: The number of most probable tokens to return at each position; None: no log
            probabilities.
    """

    sampling: Mapping[str, float | None] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    count: int = 1
    top_logprobs: int | None = None

    def fill(self, task: pb.TextTask) -> None:
        """Set the fields of a task. Raises HttpError for values that do not fit into a field;
        routers check the ranges.
        """
        for name, value in self.sampling.items():
            if value is None or (name == "top_k" and value == -1):  # in vLLM -1 means all
                continue
            path = self._name(f"sampling.{name}", name)
            if not math.isfinite(value) or (name == "top_k" and not 0 <= value < 1 << 31):
                raise invalid(f"{path} is {value}, which is out of range", path)
            setattr(task.sampling, name, value)
        if self.count > 1:
            path = self._name("temperature", "temperature")
            if self.sampling.get("temperature") == 0:
                raise invalid(
                    (
                        f"{path} is 0, so all {self.count} answers would be identical: raise it, "
                        "or request one"
                    ),
                    path,
                )
            if not task.sampling.HasField("temperature"):
                task.sampling.temperature = 1.0
        task.stop.extend(self.stop)
        if self.top_logprobs is not None:
            task.top_logprobs = self.top_logprobs

    def items(self, items: Sequence[pb.Item]) -> list[pb.Item]:
        """Return `count` copies of each item, each with the seed of its answer. Raises HttpError if
        they exceed MAX_COPIES_BYTES.
        """
        size = self.count * sum(item.ByteSize() for item in items)
        if self.count > 1 and size > MAX_COPIES_BYTES:
            raise HttpError(
                "TOO_LARGE",
                f"{self.count} answers per prompt need {size:,} bytes of prompts, above the limit "
                f"of {MAX_COPIES_BYTES:,}: request fewer answers",
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
        """Return the caller's names of Shoal's fields."""
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


def list_stops(stop: str | Sequence[str] | None) -> Sequence[str]:
    """Return the stop strings as a list, because OpenAI's API also accepts a single string."""
    return (
        ([stop] if stop else []) if isinstance(stop, str) else [each for each in stop or () if each]
    )


def sampling_fields(request: Any) -> dict[str, float | None]:
    """Return the sampling fields of a request that uses the names of `SAMPLING`."""
    return {name: getattr(request, name) for name in SAMPLING}


def count_of_answers(count: int | None, best_of: int | None) -> int:
    """Return the number of answers. Raises HttpError if it is out of range, or if `best_of`
    is another number.
    """
    count = 1 if count is None else count
    if not 1 <= count <= MAX_ANSWERS:
        raise invalid(f"n is {count}; it must be within 1 and {MAX_ANSWERS}", "n")
    if best_of not in (None, count):
        raise invalid(
            (
                f"best_of is {best_of} and n is {count}: all generated answers are returned, so "
                "omit it"
            ),
            "best_of",
        )
    return count

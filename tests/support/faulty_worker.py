"""A worker with models that fail on purpose: `python -m tests.support.faulty_worker`.

It is the real worker but for its device's `load`. The environment variable FAULTS is a JSON object
of faults by model id, with the fields of Faults.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from libs.errors import ModelBroken
from libs.models import Forwarded, InputSequence, Model, YieldPoint, never_yield
from services.worker.__main__ import main
from services.worker.machine.device import Device, Load, open_device
from services.worker.settings import Settings

VARIABLE = "FAULTS"
HUGE_BYTES = 10**15


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of one model; 0 for never.

    Its forward passes on the device thread run out of memory the first `times` times, while a batch
    has more than `above_tokens`, and while more than `above_models` are in memory, itself included.

    `load`: it raises, waits until `release` (a file) is there, or gives a model that says it has
    HUGE_BYTES.
    """

    times: int = 0
    above_tokens: int = 0
    above_models: int = 0
    load: Literal["", "fail", "hang", "huge"] = ""
    release: str = ""


class FaultyModel:
    """A model with faults; everything but its forward is the model's own."""

    def __init__(
        self, model: Model, faults: Faults, everything: weakref.WeakSet[FaultyModel]
    ) -> None:
        self._model = model
        self._faults = faults
        self._left = faults.times
        self._everything = everything
        self.bytes = HUGE_BYTES if faults.load == "huge" else model.bytes
        everything.add(self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(
        self, head: str, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> Sequence[Forwarded]:
        if threading.current_thread().name == "device" and self._is_out_of_memory(sequences):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.00 GiB (a fault of our making)"
            )
        return self._model.forward(head, sequences, yield_point)

    def _is_out_of_memory(self, sequences: list[InputSequence]) -> bool:
        self._left -= 1
        faults, tokens = self._faults, sum(sequence.tokens for sequence in sequences)
        is_crowded = bool(faults.above_models) and len(self._everything) > faults.above_models
        return (
            self._left >= 0
            or (bool(faults.above_tokens) and tokens > faults.above_tokens)
            or is_crowded
        )


def faulty(load: Load, by_model: Mapping[str, Faults]) -> Load:
    everything: weakref.WeakSet[FaultyModel] = weakref.WeakSet()

    def with_faults(directory: Path, model: str, base: Path | None = None, /) -> Model:
        faults = by_model.get(model, Faults())
        while faults.load == "hang" and not Path(faults.release).exists():
            time.sleep(0.02)
        if faults.load == "fail":
            raise ModelBroken(f"{model}: a fault of our making")
        return FaultyModel(load(directory, model, base), faults, everything)  # type: ignore[return-value]  # by __getattr__

    return with_faults


def open_faulty(settings: Settings) -> Device:
    device = open_device(settings)
    by_model = {
        model: Faults(**faults)
        for model, faults in json.loads(os.environ.get(VARIABLE, "{}")).items()
    }
    return replace(device, load=faulty(device.load, by_model))


if __name__ == "__main__":
    main(open_faulty)

"""Jobs of models that read images, and a loaded model's answers to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from libs.models.generation.model import GenerativeModel
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import Unfinished
from libs.models.interface.work import GenerationWork, Part, TextWork
from libs.models.loading import load_served_model

MAX_TOKENS = 33


def load(directory: Path, dtype: torch.dtype = torch.float32) -> GenerativeModel:
    model = load_served_model(directory, "a/reader", torch.device("cpu"), dtype)
    assert isinstance(model, GenerativeModel)
    return model


def work_on(images: list[bytes], **settings: Any) -> TextWork:
    """Return works of one item each."""
    parts = {place: (Part(image, f"items[{place}].image"),) for place, image in enumerate(images)}
    return TextWork([""] * len(images), parts=parts, **({"max_tokens": MAX_TOKENS} | settings))


def written_for(model: GenerativeModel, *works: GenerationWork) -> list[list[list[int]]]:
    """Return the ids of each job's texts, all generated in one loop."""
    return [[output.ids.tolist() for output in outputs] for _, outputs in _answers(model, works)]


def run_work(model: GenerativeModel, work: GenerationWork) -> ExtractResult:
    ((prepared, outputs),) = _answers(model, [work])
    found = model.finish(prepared, outputs)
    assert isinstance(found, ExtractResult)
    return found


def _answers(model: GenerativeModel, works: Any) -> list[Any]:
    prepared = [model.prepare(work) for work in works]
    sequences = [sequence for each in prepared for sequence in each.sequences]
    found: dict[int, Any] = {}
    while left := [each for each in sequences if id(each) not in found]:
        for each, output in zip(left, model.forward("generate", left), strict=True):
            if not isinstance(output, Unfinished):
                found[id(each)] = output
    return [(each, [found[id(sequence)] for sequence in each.sequences]) for each in prepared]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative difference."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())

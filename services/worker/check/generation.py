"""Runs a generative model on this machine's CPU: part of `shoal models check`.

It tests that the weights fit the configuration, that token probabilities are finite, and that the
answer to a text does not depend on the other texts of a batch. It does not judge the quality of
answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from libs.catalog.overrides import Overrides
from libs.errors import TaskNotSupported
from libs.models import ExtractResult, GeneratedIds, Model, Prepared, load_served_model
from libs.models.interface.work import never_cancelled
from libs.models.runtime.precision.samples import generation_work
from services.worker.check.explain import Test

TESTED_ANSWER_TOKENS: Final = 16
"""Tokens of each answer of the self-test."""
_SHOWN: Final = 60
"""Maximum characters of an answer in a message."""


def run(directory: Path, model: str, overrides: Overrides | None) -> Iterator[Test]:
    """Run the checks and yield each when it is done. Raises ModelBroken if the model fails to
    load.
    """
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        loaded = load_served_model(directory, model, torch.device("cpu"), dtype, overrides)
        yield Test(
            f"loads in {name}",
            True,
            f"{loaded.bytes:,} bytes, at most {loaded.card.max_tokens:,} tokens",
        )
        prepared = _prepared(loaded)
        outputs = _generate(loaded, prepared, range(len(prepared.sequences)))
        yield from _probabilities(name, outputs)
        if dtype == torch.float32:
            yield from _answers(loaded, prepared, outputs)
        del loaded


def _prepared(model: Model) -> Prepared:
    """Return the greedy job of the self-test, with probabilities if the model supports them."""
    try:
        return model.prepare(
            generation_work(model.card, TESTED_ANSWER_TOKENS, has_probabilities=True),
            never_cancelled,
        )
    except TaskNotSupported:  # Readers of images decode greedily in their own format.
        return model.prepare(
            generation_work(model.card, TESTED_ANSWER_TOKENS, has_probabilities=False),
            never_cancelled,
        )


def _generate(model: Model, prepared: Prepared, indices: Sequence[int]) -> list[GeneratedIds]:
    """Generate the answers of the sequences with these indices together, as one batch."""
    made: dict[int, GeneratedIds] = {}
    while left := [index for index in indices if index not in made]:
        outputs = model.forward(prepared.head, [prepared.sequences[index] for index in left])
        made |= {
            index: output
            for index, output in zip(left, outputs, strict=True)
            if isinstance(output, GeneratedIds)
        }
    return [made[index] for index in indices]


def _probabilities(dtype: str, outputs: Sequence[GeneratedIds]) -> Iterator[Test]:
    found = np.array([score.logprob for output in outputs for score in output.scores])
    if len(found):
        detail = f"log probabilities of {len(found)} tokens, {found.min():.2f} to {found.max():.2f}"
        yield Test(f"generate: finite in {dtype}", bool(np.isfinite(found).all()), detail)


def _answers(model: Model, prepared: Prepared, outputs: Sequence[GeneratedIds]) -> Iterator[Test]:
    """Test the generated tokens and the answers. The last item of the job repeats the first, so
    their answers must be equal.
    """
    tokens = sum(len(output.ids) for output in outputs)
    yield Test(
        "generate: tokens",
        all(len(output.ids) for output in outputs),
        f"{tokens} tokens for {len(outputs)} prompts",
    )
    alone = [_generate(model, prepared, [index])[0] for index in range(len(outputs))]
    differing = sum(
        not np.array_equal(one.ids, other.ids) for one, other in zip(outputs, alone, strict=True)
    )
    yield Test(
        "generate: together as alone",
        not differing,
        f"{differing} of {len(outputs)} answers differ",
    )
    is_same = np.array_equal(outputs[0].ids, outputs[-1].ids)
    yield Test(
        "generate: same input, same answer",
        is_same,
        "the same tokens" if is_same else "other tokens",
    )
    result = model.finish(prepared, list(outputs), never_cancelled)
    texts = [item.text for item in result.items] if isinstance(result, ExtractResult) else []
    yield Test(
        "generate: answer",
        len(texts) == len(outputs),
        f"{texts[0][:_SHOWN]!r}" if texts else "no answers",
    )

"""Sampling: tokens are drawn from transformers' distribution, by numbers that depend on nothing but
the seed and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.generation import logits_process

from libs.models.generation import DecodeLoop, DecodeSettings, SequenceRequest
from libs.models.generation.decoding import sampling
from libs.models.generation.decoding.rules import TokenRules, apply
from libs.models.generation.decoding.sampling import Draw, Sampler, choose, token_scores, warp
from tests.generation.checkpoints import prompts, write
from tests.generation.test_loop import finished, load

pytestmark = pytest.mark.filterwarnings("ignore")

DRAWS = 10_000
SAMPLERS: dict[str, Sampler] = {
    "temperature": Sampler(0.7),
    "high temperature": Sampler(1.7),
    "top_k": Sampler(1.0, top_k=5),
    "top_p": Sampler(1.0, top_p=0.8),
    "min_p": Sampler(1.3, min_p=0.1),
    "all of them": Sampler(1.2, top_k=30, top_p=0.9, min_p=0.02),
    "the likeliest alone": Sampler(1.0, top_p=0.0),
    "top_k above the vocabulary": Sampler(1.0, top_k=10_000),
}


def random_scores(rows: int, width: int = 300, seed: int = 0) -> Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)) * 3


def reference(scores: Tensor, sampler: Sampler) -> Tensor:
    """Apply transformers' warpers to one row in the order of its `generate`."""
    ids = torch.zeros((1, 1), dtype=torch.int64)
    scores = logits_process.TemperatureLogitsWarper(sampler.temperature)(ids, scores)
    if sampler.top_k:
        scores = logits_process.TopKLogitsWarper(sampler.top_k)(ids, scores)
    if sampler.top_p < 1.0:
        scores = logits_process.TopPLogitsWarper(sampler.top_p)(ids, scores)
    if sampler.min_p:
        scores = logits_process.MinPLogitsWarper(sampler.min_p)(ids, scores)
    return scores


@pytest.mark.parametrize("candidates", [1024, 7])
def test_warpers_are_those_of_transformers_each_row_by_its_own(
    candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "NUCLEUS_CANDIDATES", candidates)
    samplers = list(SAMPLERS.values())
    scores = random_scores(len(samplers))
    together = warp(scores, samplers)
    for row, sampler in enumerate(samplers):
        wanted = reference(scores[row : row + 1], sampler)
        assert torch.equal(together[row : row + 1], wanted)
        assert torch.equal(warp(scores[row : row + 1], [sampler]), wanted)


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_are_distributed_as_the_references_probabilities(name: str) -> None:
    sampler, scores = SAMPLERS[name], random_scores(1, seed=3)
    probabilities = reference(scores, sampler).softmax(dim=-1)[0].double().numpy()
    counts = np.zeros(len(probabilities))
    for seed in range(10):
        draws = {row: Draw(replace(sampler, key=bytes([seed])), row) for row in range(DRAWS // 10)}
        np.add.at(counts, choose(scores.expand(DRAWS // 10, -1).clone(), draws), 1)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities * DRAWS) < 5


def chi_square(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Standard deviations by which the statistic is above its mean; classes with less than 5
    expected are one class.
    """
    common = expected >= 5
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    kept = expected > 0
    if kept.sum() < 2:
        return 0.0
    statistic, freedom = (
        float((((counts - expected) ** 2)[kept] / expected[kept]).sum()),
        int(kept.sum()) - 1,
    )
    return (statistic - freedom) / (2 * freedom) ** 0.5


def test_draw_depends_on_its_seed_and_step_alone() -> None:
    samplers = [replace(each, key=bytes([number])) for number, each in enumerate(SAMPLERS.values())]
    scores = random_scores(len(samplers) + 1)
    draws = {row: Draw(sampler, 7) for row, sampler in enumerate(samplers)}
    together = choose(scores.clone(), draws)
    assert together[-1] == int(scores[-1].argmax())  # a greedy row among sampled ones
    assert together[:-1] == [
        choose(scores[row : row + 1].clone(), {0: draw})[0] for row, draw in draws.items()
    ]
    flat = scores[:1] / 10
    steps = [choose(flat.clone(), {0: Draw(samplers[0], step)})[0] for step in range(40)]
    keys = [
        choose(flat.clone(), {0: Draw(replace(samplers[0], key=bytes([9, key])), 7)})[0]
        for key in range(40)
    ]
    assert min(len(set(steps)), len(set(keys))) > 5


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.2, -0.4, 0.7)]
)
def test_penalties_are_repetitions_first_then_presence_and_frequency_of_the_answer(
    repetition: float, presence: float, frequency: float
) -> None:
    prompt, answer = [3, 4, 5], [5, 9, 9, 11]
    ids = np.array([*prompt, *answer], np.int32)
    settings = DecodeSettings(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    scores = random_scores(1)
    wanted = logits_process.RepetitionPenaltyLogitsProcessor(repetition)(
        torch.from_numpy(ids).long()[None], scores.clone()
    )
    for token in set(answer):
        wanted[0, token] -= presence + frequency * answer.count(token)
    found = scores.clone()
    apply(found, [TokenRules(settings, len(prompt), 100).edits(ids)])
    torch.testing.assert_close(found, wanted)


def test_log_probabilities_are_the_chosen_tokens_and_the_likeliest() -> None:
    logprobs = random_scores(3).log_softmax(dim=-1)
    found = token_scores(logprobs, [4, 0, 7], [2, 0, 20])
    assert [len(each.top) for each in found] == [2, 0, 20]
    assert [each.logprob for each in found] == [
        float(logprobs[row, token]) for row, token in enumerate((4, 0, 7))
    ]
    assert found[0].top == tuple(
        zip(*(each[0, :2].tolist() for each in logprobs.sort(descending=True)[::-1]), strict=True)
    )


def requests(settings: DecodeSettings, seeds: Sequence[int]) -> list[SequenceRequest]:
    inputs = prompts(len(seeds))
    return [
        SequenceRequest(ids, most=24, settings=settings, seed=bytes([seed]))
        for ids, seed in zip(inputs, seeds, strict=True)
    ]


def test_seed_writes_the_same_alone_and_among_others(tmp_path: Path) -> None:
    write("qwen3", tmp_path)
    language_model = load(tmp_path)
    settings = replace(language_model.settings, temperature=1.0, top_p=0.95, presence_penalty=0.3)
    requested = requests(settings, range(12))
    requested[3] = replace(requested[3], settings=language_model.settings)  # greedy
    together = finished(DecodeLoop(language_model, 96, most_rows=40), requested, every=2)
    alone = [finished(DecodeLoop(language_model, 8), [each])[0] for each in requested]
    assert together == alone
    again = finished(
        DecodeLoop(language_model, 96), [replace(each, seed=b"another") for each in requested]
    )
    assert [number for number in range(12) if again[number] == together[number]] == [3]


def test_first_tokens_of_a_model_are_distributed_as_transformers_would_draw_them(
    tmp_path: Path,
) -> None:
    """10,000 sequences of one prompt, each with a seed: the whole way from scores over rules to
    draws.
    """
    theirs = write("qwen3", tmp_path, {"repetition_penalty": 1.2, "suppress_tokens": [0]})
    language_model, prompt = load(tmp_path), prompts(8)[7]
    settings = replace(language_model.settings, temperature=0.8, top_k=40, top_p=0.9)
    loop = DecodeLoop(language_model, 256 * 2)
    counts = np.zeros(language_model.vocabulary)
    for number in range(0, DRAWS, 250):
        seeds = [seed.to_bytes(4, "little") for seed in range(number, number + 250)]
        for ids, _ in finished(
            loop, [SequenceRequest(prompt, most=1, settings=settings, seed=seed) for seed in seeds]
        ):
            counts[ids[0]] += 1
    with torch.inference_mode():
        inputs = torch.from_numpy(prompt).long()[None]
        config = transformers.GenerationConfig(
            do_sample=True,
            temperature=0.8,
            top_k=40,
            top_p=0.9,
            repetition_penalty=1.2,
            suppress_tokens=[0],
        )
        output = theirs.generate(
            inputs, config, max_new_tokens=1, output_scores=True, return_dict_in_generate=True
        )
    probabilities = output.scores[0][0].softmax(dim=-1).double().numpy()
    assert counts[probabilities == 0].sum() == 0
    assert chi_square(counts, probabilities * DRAWS) < 5


def test_checkpoint_that_samples_has_its_settings(tmp_path: Path) -> None:
    write("qwen3", tmp_path, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    settings = load(tmp_path).settings
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (
        0.6,
        20,
        0.95,
        0.0,
    )
    assert settings.sampler(b"x") == Sampler(0.6, 20, 0.95, 0.0, b"x")
    write("qwen3", tmp_path, {"do_sample": False})
    assert load(tmp_path).settings.sampler(b"x") is None

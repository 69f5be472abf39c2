"""Beam search of one sequence, step by step like transformers, so the same answer wins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from libs.models.generation.decoding.rules import Ids
from libs.models.generation.decoding.settings import DecodeSettings

_LOW = -1e9
"""Score of beams that must not win but may fill a slot."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A beam of the next step: the beam that it continues, and its token."""

    beam: int
    token: int


class BeamSearch:
    """Searches `beams` texts at a time. Finished texts are kept in `finished` while they may still
    win.

    `prompt` and `longest`: tokens of the prompt, and of prompt and longest answer together.
    """

    def __init__(self, settings: DecodeSettings, prompt: Ids, longest: int) -> None:
        self._settings, self._prompt, self._longest = settings, len(prompt), longest
        self._stops = torch.tensor(settings.stops, dtype=torch.int64)
        self._kept = max(2, 1 + len(settings.stops)) * settings.beams
        self._length = len(prompt)
        self._texts = [prompt] * settings.beams
        # All beams start equal, so only the first one's continuations count.
        self._scores = torch.full((settings.beams,), _LOW)
        self._scores[0] = 0.0
        self._finished: list[Ids] = [prompt] * settings.beams
        self._finished_scores = torch.full((settings.beams,), _LOW)
        self._is_finished = torch.zeros(settings.beams, dtype=torch.bool)
        self._may_improve = True

    @property
    def best(self) -> Ids:
        """Return prompt and answer of the best finished text."""
        return self._finished[0]

    def advance(self, log_probabilities: Tensor) -> list[Chosen]:
        """Return the beams of the next step for [beams, vocabulary] after the rules; empty when the
        search is over.
        """
        beams, settings = self._settings.beams, self._settings
        vocabulary = log_probabilities.shape[1]
        top, index = torch.topk((log_probabilities + self._scores[:, None]).reshape(-1), self._kept)
        parents, tokens = (index // vocabulary).tolist(), index % vocabulary
        stops = torch.isin(tokens, self._stops) | (self._length + 1 >= self._longest)
        texts = [
            np.append(self._texts[parent], np.int32(token))
            for parent, token in zip(parents, tokens.tolist(), strict=True)
        ]
        running = top + stops.float() * _LOW
        going = torch.topk(running, beams)[1]
        self._keep_finished(top, stops, texts)
        self._scores = running[going]
        self._texts = [texts[place] for place in going.tolist()]
        self._length += 1
        self._may_improve = self._may_improve and self._can_win()
        full = bool(self._is_finished.all()) and settings.early_stopping is True
        if not self._may_improve or full or bool(stops.all()):
            return []
        return [Chosen(parents[place], int(tokens[place])) for place in going.tolist()]

    def _keep_finished(self, top: Tensor, stops: Tensor, texts: list[Ids]) -> None:
        """Keep the best of the finished texts and those that ended in this step, one per beam."""
        beams, settings = self._settings.beams, self._settings
        just = stops & (torch.arange(len(stops)) < beams)
        scores = top / ((self._length + 1 - self._prompt) ** settings.length_penalty)
        if settings.early_stopping is True and bool(self._is_finished.all()):
            scores = scores + _LOW
        if not self._may_improve:
            scores = scores + _LOW
        scores = scores + (~just).float() * _LOW
        merged, ended = (
            torch.cat((self._finished_scores, scores)),
            torch.cat((self._is_finished, just)),
        )
        best = torch.topk(merged, beams)[1]
        every = [*self._finished, *texts]
        self._finished = [every[place] for place in best.tolist()]
        self._finished_scores, self._is_finished = merged[best], ended[best]

    def _can_win(self) -> bool:
        """Return whether the best running beam may still score better than the worst finished
        one.
        """
        settings = self._settings
        far = settings.early_stopping == "never" and settings.length_penalty > 0
        length = (self._longest if far else self._length) - self._prompt
        best = self._scores[0] / (length**settings.length_penalty)
        worst = torch.where(self._is_finished, self._finished_scores.min(), torch.tensor(_LOW))
        return bool((best > worst).any())

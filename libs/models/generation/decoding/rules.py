"""Restrict the next token: transformers' logits processors, as lists of ids for each sequence.

None of them depends on the scores, so the host builds the lists in advance, and `apply` changes the
scores of all sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.kernels.layout import to_device
from libs.models.generation.decoding.settings import DecodeSettings

Ids = NDArray[np.int32]
Bits = NDArray[np.uint8]
"""A set of ids: bit `id % 8` of byte `id // 8`. Ids beyond its bytes are not in it."""
Allows = Callable[[Ids], Bits]
"""A grammar: maps the generated ids, without the prompt, to the ids that may follow, at least
one.
"""

_NONE: Final = np.zeros(0, np.int32)


def _none() -> Ids:
    return _NONE


def _no_numbers() -> NDArray[np.float32]:
    return np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of the scores of one sequence's next token, in the order of their application.

    Attributes:
        penalty: Divides the scores of `penalised`; negative scores are multiplied by it.
        counted: Ids with scores from which `subtracted` is subtracted.
        banned: Ids that are never chosen.
        only: The only possible id.
        suppressed: As `banned`, applied later.
        allowed: All ids that may be chosen; None for any.
        vocabulary: Ids from here on are never chosen; None for no bound.
    """

    penalty: float = 1.0
    penalised: Ids = field(default_factory=_none)
    counted: Ids = field(default_factory=_none)
    subtracted: NDArray[np.float32] = field(default_factory=_no_numbers)
    banned: Ids = field(default_factory=_none)
    only: int | None = None
    suppressed: Ids = field(default_factory=_none)
    allowed: Bits | None = None
    vocabulary: int | None = None


class TokenRules:
    """The rules of one request.

    Args:
        prompt: Number of tokens of the decoder's prompt.
        longest: Maximum tokens of prompt and answer together.
    """

    def __init__(
        self, settings: DecodeSettings, prompt: int, longest: int, allows: Allows | None = None
    ) -> None:
        self._settings, self._prompt, self._longest, self._allows = (
            settings,
            prompt,
            longest,
            allows,
        )
        stops = set(settings.stops)
        words = [word for word in settings.bad_words if not (len(word) == 1 and word[0] in stops)]
        self._single = [word[0] for word in words if len(word) == 1]
        self._words = [np.array(word, np.int32) for word in words if len(word) > 1]
        late = prompt == 1 and settings.forced_first is not None
        self._begin = prompt + (1 if late else 0)
        self._suppressed = np.array(settings.suppressed, np.int32)
        self._suppressed_first = np.array(settings.suppressed_first, np.int32)
        forced = settings.forced_first is not None or settings.forced_last is not None
        least = settings.min_length > prompt or settings.min_new > 0
        bounded = allows is not None or bool(settings.no_repeat_ngram)
        suppresses = bool(words or settings.suppressed or settings.suppressed_first)
        self._counts = settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0
        penalises = self._counts or settings.repetition_penalty != 1.0
        self.is_plain = not (forced or least or bounded or suppresses or penalises)
        """Whether any token of the vocabulary may follow and scores stay unchanged."""

    def edits(self, ids: Ids) -> Edits | None:
        """Return the edits for the token after `ids`, the prompt and answer so far; None for
        none.
        """
        if self.is_plain and self._settings.vocabulary is None:
            return None
        settings, length = self._settings, len(ids)
        suppressed = self._suppressed
        if length == self._begin and len(self._suppressed_first):
            suppressed = np.concatenate((suppressed, self._suppressed_first))
        edits = Edits(
            penalty=settings.repetition_penalty,
            penalised=_NONE if settings.repetition_penalty == 1.0 else np.unique(ids),
            banned=self._banned(ids),
            only=self._only(length),
            suppressed=suppressed,
            vocabulary=settings.vocabulary,
        )
        if self._counts:
            counted, counts = np.unique(ids[self._prompt :], return_counts=True)
            subtracted = settings.presence_penalty + settings.frequency_penalty * counts
            edits = replace(edits, counted=counted, subtracted=subtracted.astype(np.float32))
        return edits if self._allows is None else _held(edits, self._allows(ids[self._prompt :]))

    def _only(self, length: int) -> int | None:
        settings = self._settings
        last = settings.forced_last if length == self._longest - 1 else None
        return settings.forced_first if last is None and length == 1 else last

    def _banned(self, ids: Ids) -> Ids:
        settings = self._settings
        banned = [*self._single]
        if len(ids) < settings.min_length or len(ids) - self._prompt < settings.min_new:
            banned.extend(settings.stops)
        banned.extend(
            int(word[-1]) for word in self._words if np.array_equal(ids[1 - len(word) :], word[:-1])
        )
        found = np.array(banned, np.int32)
        if not settings.no_repeat_ngram:
            return found
        return np.concatenate((found, _completing(ids, settings.no_repeat_ngram)))


def _held(edits: Edits, allowed: Bits) -> Edits:
    """Add a grammar to the edits. If the edits leave no allowed token, the grammar takes
    precedence.
    """
    barred = np.concatenate((edits.banned, edits.suppressed))
    barred = barred[(barred >= 0) & (barred < 8 * len(allowed))]
    left = allowed.copy()
    np.bitwise_and.at(left, barred >> 3, ~(np.uint8(1) << (barred & 7).astype(np.uint8)))
    if left.any():
        return replace(edits, only=None, allowed=left)
    return replace(edits, only=None, banned=_NONE, suppressed=_NONE, allowed=allowed)


def _completing(ids: Ids, size: int) -> Ids:
    """Return the tokens that would complete a run of `size` tokens that `ids` already has."""
    if len(ids) + 1 < size:
        return _NONE
    ends = np.arange(size - 1, len(ids))  # possible ends of such a run
    for back in range(1, size):
        ends = ends[ids[ends - back] == ids[-back]]
        if not len(ends):
            return _NONE
    return ids[ends]


def apply(scores: Tensor, edits: Sequence[Edits | None]) -> None:
    """Apply edits to scores [sequences, vocabulary], float32, in place."""
    if all(each is None for each in edits):
        return
    some = [(row, each) for row, each in enumerate(edits) if each is not None]
    where = _where([(row, each.penalised) for row, each in some], scores.device)
    if where is not None:
        penalty = torch.tensor(
            [each.penalty for _, each in some for _ in each.penalised], device=scores.device
        )
        old = scores[where]
        scores[where] = torch.where(old < 0, old * penalty, old / penalty)
    where = _where([(row, each.counted) for row, each in some], scores.device)
    if where is not None:
        subtracted = to_device(
            np.concatenate([each.subtracted for _, each in some]), scores.device, np.float32
        )
        scores[where] = scores[where] - subtracted
    _ban(scores, [(row, each.banned) for row, each in some])
    for row, each in some:
        if each.only is not None:
            scores[row] = -torch.inf
            scores[row, each.only] = 0.0
    _ban(scores, [(row, each.suppressed) for row, each in some])
    _keep(scores, [(row, each.allowed) for row, each in some if each.allowed is not None])
    bounds = {each.vocabulary for _, each in some}
    if len(some) == len(scores) and len(bounds) == 1 and (bound := bounds.pop()) is not None:
        scores[:, bound:] = -torch.inf
        return
    for row, each in some:
        if each.vocabulary is not None:
            scores[row, each.vocabulary :] = -torch.inf


def _keep(scores: Tensor, sets: Sequence[tuple[int, Bits]]) -> None:
    """Ban all ids outside the set of each row."""
    if not sets:
        return
    width = scores.shape[1]
    bits = np.zeros((len(sets), -(-width // 8)), np.uint8)
    for own, (_, each) in zip(bits, sets, strict=True):
        own[: len(each)] = each[: len(own)]
    barred = to_device(
        np.unpackbits(~bits, axis=1, count=width, bitorder="little"), scores.device, np.bool_
    )
    if len(sets) == len(scores):
        scores.masked_fill_(barred, -torch.inf)
        return
    rows = to_device(np.array([row for row, _ in sets]), scores.device, np.int64)
    scores[rows] = scores[rows].masked_fill(barred, -torch.inf)


def _ban(scores: Tensor, ids: Sequence[tuple[int, Ids]]) -> None:
    where = _where(ids, scores.device)
    if where is not None:
        scores[where] = -torch.inf


def _where(ids: Sequence[tuple[int, Ids]], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not any(len(each) for _, each in ids):
        return None
    rows = np.concatenate([np.full(len(each), row, np.int32) for row, each in ids])
    return to_device(rows, device).long(), to_device(
        np.concatenate([each for _, each in ids]), device
    ).long()

"""The state of each sequence in a decode loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from libs.kernels.attention.paged import PAGE, pages_for
from libs.models.generation.decoding.beams import BeamSearch, Chosen
from libs.models.generation.decoding.pages import PageClaim
from libs.models.generation.decoding.rules import Allows, Ids, TokenRules
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.interface.packed import GivenRows

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A request to generate tokens.

    Attributes:
        prompt: Prompt of the decoder; None for its start token.
        states: Hidden states of the encoder, [tokens, hidden].
        most: Maximum new tokens; None for the checkpoint's number.
        settings: None for the checkpoint's.
        allows: A grammar.
        given: Input rows without a token, by index in the prompt.
        axes: The prompt's positions in several dimensions (M-RoPE), [axes, tokens]. New tokens
            continue from the largest of them.
        seed: Seed of sampling, at most 64 bytes.
        ends: Returns whether the answer ends after the generated ids. Not called for beam search.
        top_logprobs: Number of likely tokens to return with log probabilities next to each
            generated one; None for no log probabilities at all.
    """

    prompt: Ids | None = None
    states: Tensor | None = None
    most: int | None = None
    settings: DecodeSettings | None = None
    allows: Allows | None = None
    given: GivenRows | None = None
    axes: Ids | None = None
    seed: bytes = b""
    ends: Callable[[Ids], bool] | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a forward: its rows, and the keys of all their sequences."""

    kind: Literal["prefill", "decode"]
    rows: int
    keys: int


class Row:
    """One growing text (or beam): `ids[:length]`, of which the first `stored` have keys in
    `pages`.
    """

    def __init__(self, prompt: Ids, longest: int, slot: int = 0) -> None:
        """`slot` is the row's place in the memory of states, of a model that has them."""
        self.ids = np.zeros(longest, np.int32)
        self.ids[: len(prompt)] = prompt
        self.length, self.stored = len(prompt), 0
        self.pages: list[int] = []
        self.slot = slot

    @property
    def text(self) -> Ids:
        return self.ids[: self.length]

    @property
    def left(self) -> int:
        """Return the number of tokens without keys."""
        return self.length - self.stored

    def write(self, token: int) -> None:
        self.ids[self.length] = token
        self.length += 1

    def fork(self, token: int, slot: int) -> Row:
        """Return a copy with one more token. The caller shares its pages and copies its states."""
        copy = Row(self.text, len(self.ids), slot)
        copy.stored, copy.pages = self.stored, [*self.pages]
        copy.write(token)
        return copy


class DecodeSequence:
    """One request between `add` and its end."""

    def __init__(
        self,
        request: SequenceRequest,
        prompt: Ids,
        longest: int,
        settings: DecodeSettings,
        claim: PageClaim,
        slots: list[int],
    ) -> None:
        """Start a sequence.

        Args:
            longest: Tokens of prompt and longest answer together.
            slots: Claimed slots for the states of its rows; empty for a model without states.
        """
        self.request, self.prompt, self.longest, self.settings = (
            request,
            len(prompt),
            longest,
            settings,
        )
        self.claim, self.slots = claim, slots
        self.rules = TokenRules(settings, len(prompt), longest, request.allows)
        self.rows = [Row(prompt, longest, slots[0] if slots else 0)]
        self.sampler = settings.sampler(request.seed)
        self.beams = BeamSearch(settings, prompt, longest) if settings.beams > 1 else None
        self.states = request.states
        self.cross_tokens = 0 if request.states is None else len(request.states)
        self.cross_pages: list[int] = []
        self.finish: Finish | None = None
        # Offset between a generated token's index and its position.
        self.ahead = 0 if request.axes is None else int(request.axes.max()) + 1 - len(prompt)

    @property
    def is_prefilled(self) -> bool:
        return self.rows[0].stored >= self.prompt and self.rows[0].left <= 1

    def make_room(self, row: Row, count: int) -> list[tuple[int, int]]:
        """Take pages for `count` more keys of a row. Returns pairs of pages to copy, from and to,
        that were shared.
        """
        copied: list[tuple[int, int]] = []
        place = row.stored // PAGE
        if place < len(row.pages) and self.claim.is_shared(row.pages[place]):
            own, shared = self.claim.take(), row.pages[place]
            self.claim.drop(shared)
            row.pages[place] = own
            copied.append((shared, own))
        while len(row.pages) * PAGE < row.stored + count:
            row.pages.append(self.claim.take())
        return copied

    def replace_beams(self, chosen: list[Chosen]) -> list[tuple[int, int]]:
        """Replace the beams by the chosen ones. Returns pairs of slots: copy the states of the
        first to the second.
        """
        before = self.rows
        slots = self.slots or [0] * len(chosen)
        # In the first step, all beams are the prefilled row.
        origins = [before[min(each.beam, len(before) - 1)] for each in chosen]
        self.rows = [
            row.fork(each.token, slot)
            for row, each, slot in zip(origins, chosen, slots[: len(chosen)], strict=True)
        ]
        for row in self.rows:
            for page in row.pages:
                self.claim.share(page)
        for row in before:
            self._drop(row.pages)
        pairs = [(origin.slot, row.slot) for origin, row in zip(origins, self.rows, strict=True)]
        return [pair for pair in pairs if pair[0] != pair[1]]

    def end(self, finish: Finish) -> None:
        """End the sequence and free all of its memory."""
        for row in self.rows:
            self._drop(row.pages)
        self._drop(self.cross_pages)
        self.claim.end()
        self.states, self.finish = None, finish

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            self.claim.drop(page)
        pages.clear()


def pages_needed(prompt: int, longest: int, beams: int, cross: int) -> int:
    """Return the pages of a prompt and its longest answer. Beams share whole pages of the
    prompt.
    """
    shared = prompt // PAGE if beams > 1 else 0
    return shared + beams * (pages_for(longest) - shared) + pages_for(cross)

"""What a decode loop keeps of each sequence that it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from libs.kernels.attention.paged import PAGE, pages_for
from libs.models.generation.decoding.beams import BeamSearch, Chosen
from libs.models.generation.decoding.pages import Claim
from libs.models.generation.decoding.rules import Allows, Ids, Rules
from libs.models.generation.decoding.settings import Settings
from libs.models.packed import GivenRows

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be written. `prompt` None: the decoder's start token. `states`: of the encoder,
    [tokens, hidden].

    `most`: new tokens; None: as the checkpoint says. `settings` None: the checkpoint's. `allows`: a
    grammar. `given`: rows that stand for no token, at places of the prompt. `axes`: the prompt's
    positions in several dimensions (M-RoPE), [axes, tokens]; what is written is counted on from the
    largest of them.

    `seed`: of its random numbers, where it is sampled; at most 64 bytes. `ends`: is given what was
    written, without the prompt, and says whether the answer ends there; not asked under beams.
    `top_logprobs`: of how many tokens the log probabilities are wanted beside each written one;
    None: of none, not of the written one either.
    """

    prompt: Ids | None = None
    states: Tensor | None = None
    most: int | None = None
    settings: Settings | None = None
    allows: Allows | None = None
    given: GivenRows | None = None
    axes: Ids | None = None
    seed: bytes = b""
    ends: Callable[[Ids], bool] | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The cost of a forward: its `rows`, and how many keys their sequences have altogether."""

    kind: Literal["prefill", "decode"]
    rows: int
    keys: int


class Row:
    """One text that grows: `ids[:length]`, of which the first `stored` have keys in `pages`. A beam
    is a row.
    """

    def __init__(self, prompt: Ids, longest: int) -> None:
        self.ids = np.zeros(longest, np.int32)
        self.ids[: len(prompt)] = prompt
        self.length, self.stored = len(prompt), 0
        self.pages: list[int] = []

    @property
    def text(self) -> Ids:
        return self.ids[: self.length]

    @property
    def left(self) -> int:
        """Tokens that have no keys yet."""
        return self.length - self.stored

    def write(self, token: int) -> None:
        self.ids[self.length] = token
        self.length += 1

    def fork(self, token: int) -> Row:
        """A copy that goes on with a token; its pages are shared by the caller."""
        copy = Row(self.text, len(self.ids))
        copy.stored, copy.pages = self.stored, [*self.pages]
        copy.write(token)
        return copy


class DecodeSequence:
    """One request between `add` and its end."""

    def __init__(
        self, request: Request, prompt: Ids, longest: int, settings: Settings, claim: Claim
    ) -> None:
        """`longest`: tokens of prompt and longest answer together."""
        self.request, self.prompt, self.longest, self.settings = (
            request,
            len(prompt),
            longest,
            settings,
        )
        self.claim = claim
        self.rules = Rules(settings, len(prompt), longest, request.allows)
        self.rows = [Row(prompt, longest)]
        self.sampler = settings.sampler(request.seed)
        self.beams = BeamSearch(settings, prompt, longest) if settings.beams > 1 else None
        self.states = request.states
        self.cross_tokens = 0 if request.states is None else len(request.states)
        self.cross_pages: list[int] = []
        self.finish: Finish | None = None
        # What is added to the place of a written token for its position.
        self.ahead = 0 if request.axes is None else int(request.axes.max()) + 1 - len(prompt)

    @property
    def is_prefilled(self) -> bool:
        return self.rows[0].stored >= self.prompt and self.rows[0].left <= 1

    def make_room(self, row: Row, count: int) -> list[tuple[int, int]]:
        """Takes pages for so many more keys of a row. Returns the pages to be copied, from and to:
        those that it shared.
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

    def check_cancelled(self, chosen: list[Chosen]) -> None:
        """Replaces the beams by those that were chosen."""
        before = self.rows
        # In the first step all beams are the one row that was prefilled.
        self.rows = [before[min(each.beam, len(before) - 1)].fork(each.token) for each in chosen]
        for row in self.rows:
            for page in row.pages:
                self.claim.share(page)
        for row in before:
            self._drop(row.pages)

    def end(self, finish: Finish) -> None:
        """Returns all of its memory."""
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
    """Pages for a prompt and its longest answer, which have so many tokens together; beams share
    whole pages of the prompt.
    """
    shared = prompt // PAGE if beams > 1 else 0
    return shared + beams * (pages_for(longest) - shared) + pages_for(cross)

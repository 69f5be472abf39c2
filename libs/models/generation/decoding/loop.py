"""The decode loop: sequences of different requests are generated together, and join and leave
between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from libs.errors import InvalidInput, NoCapacity
from libs.kernels.attention.paged import copy_page, pages_for
from libs.kernels.layout import to_device
from libs.models.generation.decoding.graphs import StepGraphs
from libs.models.generation.decoding.language_model import KeyValuePlaces, LanguageModel
from libs.models.generation.decoding.pages import PagePool
from libs.models.generation.decoding.rules import Ids, apply
from libs.models.generation.decoding.sampling import Draw, choose, token_scores
from libs.models.generation.decoding.sequences import (
    DecodeSequence,
    Finish,
    Row,
    SequenceRequest,
    StepCost,
    pages_needed,
)
from libs.models.generation.decoding.settings import DecodeSettings
from libs.models.generation.decoding.steps import StepForward, StepRow
from libs.models.interface.packed import GivenRows, Packed
from libs.models.interface.sequences import TokenScore, YieldPoint, never_yield
from libs.models.runtime.graphs.capture import Capture
from libs.models.runtime.graphs.graphs import Owner

MAX_ROWS = 2048
"""Tokens of a prefill step; longer prompts are split."""


@dataclass(frozen=True, slots=True)
class StepDelta:
    """The result of a step for one sequence: new token ids, and whether it has ended.

    Attributes:
        score: The log probability of the token, if requested.
    """

    sequence: DecodeSequence
    ids: tuple[int, ...]
    finish: Finish | None
    score: TokenScore | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    """The next `count` tokens of a row to compute keys for."""

    sequence: DecodeSequence
    row: Row
    count: int


class DecodeLoop:
    """Generates sequences. Not thread-safe: the device thread makes all calls, and calls `add` and
    `cancel` between two steps.
    """

    def __init__(
        self,
        language_model: LanguageModel,
        pages: int,
        *,
        slots: int | None = None,
        most_rows: int = MAX_ROWS,
    ) -> None:
        """Create a loop.

        Keys and values take at most `pages * language_model.page_bytes` of memory, and the states
        of layers without keys `slots * language_model.state_bytes`.

        Args:
            slots: The largest number of rows at a time, of a model with states; None: as many as
                pages.
        """
        self.language_model, self.pool = language_model, PagePool(pages)
        self._pages = language_model.pages(pages)
        has_states = language_model.state_bytes > 0
        self._states = language_model.states(
            (pages if slots is None else slots) if has_states else 0
        )
        self._most_rows = most_rows
        self._steps = (
            StepForward(language_model, self._pages)
            if StepForward.takes(language_model, self._pages)
            else None
        )
        self._graphs: StepGraphs | None = None
        self._sequences: list[DecodeSequence] = []
        self._prefilled_last = False

    @property
    def sequences(self) -> tuple[DecodeSequence, ...]:
        """Return the sequences in progress."""
        return tuple(self._sequences)

    @property
    def claimed_share(self) -> float:
        """Return the claimed share of the pages, or of the slots if that is larger."""
        slots = self._states.total
        return max(
            self.pool.claimed / self.pool.total,
            1 - self._states.unclaimed / slots if slots else 0.0,
        )

    def needs(self, request: SequenceRequest) -> int:
        """Return the number of pages that a request claims. Raises InvalidInput for a request that
        the model cannot process.
        """
        prompt, longest = self._extent(request)
        settings = request.settings or self.language_model.settings
        cross = 0 if request.states is None else len(request.states)
        return pages_needed(len(prompt), longest, settings.beams, cross)

    def has_room(self, request: SequenceRequest) -> bool:
        return self.count_fitting([request]) == 1

    def count_fitting(self, requests: Iterable[SequenceRequest]) -> int:
        """Return the number of requests, from the first one, that have room together. None after
        one without room is looked at.
        """
        pages, slots, count = self.pool.unclaimed, self._states.unclaimed, 0
        for request in requests:
            pages, slots = pages - self.needs(request), slots - self._slots_needed(request)
            if min(pages, slots) < 0:
                break
            count += 1
        return count

    def _slots_needed(self, request: SequenceRequest) -> int:
        """Return the number of slots for the states of a request's rows."""
        beams = (request.settings or self.language_model.settings).beams
        return beams if self.language_model.state_bytes else 0

    def add(self, request: SequenceRequest) -> DecodeSequence:
        """Claim a request's pages. A following step prefills it. Raises InvalidInput, and
        NoCapacity if `has_room` is false.
        """
        slots = self._slots_needed(request)
        if slots > self._states.unclaimed:
            raise NoCapacity(
                f"the request needs the states of {slots} rows; {self._states.unclaimed} are free"
            )
        claim = self.pool.claim(needed := self.needs(request))
        if claim is None:
            raise NoCapacity(
                f"the request needs {needed} pages of key/value memory; {self.pool.unclaimed} "
                "are free"
            )
        prompt, longest = self._extent(request)
        sequence = DecodeSequence(
            request,
            prompt,
            longest,
            request.settings or self.language_model.settings,
            claim,
            self._states.claim(slots),
        )
        self._sequences.append(sequence)
        return sequence

    def cancel(self, sequence: DecodeSequence) -> None:
        """End a sequence and free its pages, unless it has ended already."""
        if sequence.finish is None:
            self._end(sequence, "cancelled")

    def next_step(self) -> StepCost | None:
        """Return the cost of the next `step` of all sequences; None if nothing is left to do."""
        pieces = self._next(self._sequences)
        if not pieces:
            return None
        keys = sum(piece.row.stored + piece.count + piece.sequence.cross_tokens for piece in pieces)
        return StepCost(
            "decode" if pieces[0].sequence.is_prefilled else "prefill",
            sum(piece.count for piece in pieces),
            keys,
        )

    @torch.inference_mode()
    def step(
        self, among: Sequence[DecodeSequence] | None = None, yield_point: YieldPoint = never_yield
    ) -> list[StepDelta]:
        """Run one forward and return its results; empty if a prompt has more pieces or nothing is
        left to do.

        Args:
            among: The sequences to advance; None for all.
            yield_point: Called between two layers; it may call `step` for other sequences.
        """
        pieces = self._next(
            self._sequences
            if among is None
            else [sequence for sequence in among if sequence.finish is None]
        )
        if not pieces:
            return []
        self._prefilled_last = not pieces[0].sequence.is_prefilled
        for piece in pieces:
            for origin, to in piece.sequence.make_room(piece.row, piece.count):
                copy_page(self._pages, origin, to)
        if self._steps is not None and not self._prefilled_last:
            return self._decode(self._steps, pieces)
        self._keep_states([piece.sequence for piece in pieces if piece.sequence.states is not None])
        places = self._places(pieces)
        scores = self.language_model.forward(
            self._batch(pieces, places), self._pages, places, yield_point, self._states
        )
        for piece in pieces:
            piece.row.stored += piece.count
        return self._choose(pieces, scores)

    def keep_graphs(self, capture: Capture, owner: Owner) -> StepGraphs | None:
        """Replay decode steps from graphs, which wait for their capture. None if the model's steps
        cannot be captured.
        """
        self._graphs = None if self._steps is None else StepGraphs(self._steps, capture, owner)
        return self._graphs

    def _decode(self, steps: StepForward, pieces: Sequence[_Piece]) -> list[StepDelta]:
        """Run a step of one token for each sequence on CUDA."""
        rows = [_step_row(piece.sequence, piece.row) for piece in pieces]
        made = None if self._graphs is None else self._graphs.run(rows)
        likeliest, scores = steps.eager(rows) if made is None else made
        for piece in pieces:
            piece.row.stored += 1
        bound = self.language_model.settings.vocabulary
        if any(_needs_scores(piece.sequence, bound) for piece in pieces):
            return self._choose(pieces, scores)
        tokens: list[int] = likeliest.tolist()
        return [
            self._write(piece, token, None) for piece, token in zip(pieces, tokens, strict=True)
        ]

    def _extent(self, request: SequenceRequest) -> tuple[Ids, int]:
        """Return the prompt, and its length with the longest answer."""
        language_model, settings = (
            self.language_model,
            request.settings or self.language_model.settings,
        )
        prompt = request.prompt
        if prompt is None and settings.start is not None:
            prompt = np.array([settings.start], np.int32)
        if prompt is None or not len(prompt):
            raise InvalidInput("the prompt is empty: at least one token is needed")
        if language_model.has_cross != (request.states is not None) or (
            request.states is not None and not len(request.states)
        ):
            raise InvalidInput(
                "encoder states must be given for models with an encoder, and only for those"
            )
        if (
            not 0
            <= int(prompt.min())
            <= int(prompt.max())
            < language_model.decoder.embed.vocabulary
        ):
            raise InvalidInput(
                f"the prompt has a token outside 0..{language_model.decoder.embed.vocabulary - 1}"
            )
        new = settings.longest(len(prompt), request.most, language_model.max_positions)
        turn = language_model.decoder.long_from
        if settings.beams > 1 and len(prompt) <= turn:
            # Beams share pages of keys, so their keys cannot be computed again.
            new = min(new, turn - len(prompt))
        if new < 1:
            raise InvalidInput(f"a prompt of {len(prompt)} tokens leaves no room for an answer")
        return prompt, len(prompt) + new

    def _next(self, among: Sequence[DecodeSequence]) -> list[_Piece]:
        """Return the pieces of the next step: prefill first, but decoding sequences never wait for
        two steps.
        """
        waiting = [sequence for sequence in among if not sequence.is_prefilled]
        going = [sequence for sequence in among if sequence.is_prefilled]
        if not waiting or (going and self._prefilled_last):
            return [_Piece(sequence, row, 1) for sequence in going for row in sequence.rows]
        pieces: list[_Piece] = []
        left = self._most_rows
        for sequence in waiting:
            count = min(left, sequence.rows[0].left)
            if count:
                pieces.append(_Piece(sequence, sequence.rows[0], count))
            left -= count
        return pieces

    def _keep_states(self, sequences: Sequence[DecodeSequence]) -> None:
        if not sequences:
            return
        states = [sequence.states for sequence in sequences if sequence.states is not None]
        for sequence in sequences:
            sequence.cross_pages = [
                sequence.claim.take() for _ in range(pages_for(sequence.cross_tokens))
            ]
            sequence.states = None
        self.language_model.keep_states(
            states, self._pages, [sequence.cross_pages for sequence in sequences]
        )

    def _places(self, pieces: Sequence[_Piece]) -> KeyValuePlaces:
        cross = None
        if self.language_model.has_cross:
            cross = (
                [piece.sequence.cross_tokens for piece in pieces],
                [piece.sequence.cross_pages for piece in pieces],
            )
        keys = [piece.row.stored + piece.count for piece in pieces]
        pages = [piece.row.pages for piece in pieces]
        slots = [piece.row.slot for piece in pieces] if self.language_model.state_bytes else ()
        return KeyValuePlaces.create(
            [piece.count for piece in pieces], keys, pages, self.language_model.device, cross, slots
        )

    def _batch(self, pieces: Sequence[_Piece], places: KeyValuePlaces) -> Packed:
        device, where = self.language_model.device, places.every
        spans = [(last - count, last) for last, count in zip(where.keys, where.rows, strict=True)]
        ids = np.concatenate(
            [piece.row.ids[first:last] for piece, (first, last) in zip(pieces, spans, strict=True)]
        )
        positions = [
            _positions(piece.sequence, first, last)
            for piece, (first, last) in zip(pieces, spans, strict=True)
        ]
        return Packed(
            ids=to_device(ids, device),
            positions=to_device(np.concatenate(positions), device),
            type_ids=None,
            lengths=where.rows,
            layout=where.layout,
            key_rows=None,
            keys=where.keys,
            given=_given(pieces, spans),
            axes=_axes(pieces, spans, positions, device),
            wholes=tuple(piece.row.length for piece in pieces),
        )

    def _choose(self, pieces: Sequence[_Piece], scores: Tensor) -> list[StepDelta]:
        """Choose the next token of every row with keys for all its tokens."""
        done: list[StepDelta] = []
        greedy = [
            place
            for place, piece in enumerate(pieces)
            if piece.row.left == 0 and piece.sequence.beams is None
        ]
        if greedy:
            own = scores if len(greedy) == len(pieces) else scores[greedy]
            chosen = [pieces[place] for place in greedy]
            scored = [
                row
                for row, piece in enumerate(chosen)
                if piece.sequence.request.top_logprobs is not None
            ]
            logprobs = torch.log_softmax(own[scored], dim=-1) if scored else None
            apply(own, [piece.sequence.rules.edits(piece.row.text) for piece in chosen])
            tokens = choose(own, _draws(chosen))
            found = {} if logprobs is None else _scores(logprobs, scored, tokens, chosen)
            for row, (piece, token) in enumerate(zip(chosen, tokens, strict=True)):
                done.append(self._write(piece, token, found.get(row)))
        searches: dict[int, list[int]] = {}
        for place, piece in enumerate(pieces):
            if piece.row.left == 0 and piece.sequence.beams is not None:
                searches.setdefault(id(piece.sequence), []).append(place)
        for places in searches.values():
            done += self._search(pieces[places[0]].sequence, scores[places])
        return done

    def _write(self, piece: _Piece, token: int, score: TokenScore | None) -> StepDelta:
        sequence, row = piece.sequence, piece.row
        row.write(token)
        if row.length - 1 == self.language_model.decoder.long_from:
            row.stored = 0  # long sequences have other frequencies: compute all keys again
        ends = sequence.request.ends
        finish: Finish | None = None
        if token in sequence.settings.stops or (
            ends is not None and ends(row.text[sequence.prompt :])
        ):
            finish = "stop"
        elif row.length == sequence.longest:
            finish = "length"
        if finish is not None:
            self._end(sequence, finish)
        return StepDelta(sequence, (token,), finish, score)

    def _search(self, sequence: DecodeSequence, scores: Tensor) -> list[StepDelta]:
        """Run a step of beam search. Its tokens are returned when the search ends."""
        search, settings = sequence.beams, sequence.settings
        if search is None:
            raise TypeError("the sequence does not use beam search")
        texts = [row.text for row in sequence.rows]
        logs = torch.log_softmax(scores, dim=-1)
        apply(logs, [sequence.rules.edits(text) for text in texts])
        if settings.renormalizes:
            logs = torch.log_softmax(logs, dim=-1)
        chosen = search.advance(logs.cpu().expand(settings.beams, -1))
        if chosen:
            self._states.copy(sequence.replace_beams(chosen))
            return []
        ids = tuple(int(token) for token in search.best[sequence.prompt :])
        finish: Finish = "stop" if ids and ids[-1] in settings.stops else "length"
        self._end(sequence, finish)
        return [StepDelta(sequence, ids, finish)]

    def _end(self, sequence: DecodeSequence, finish: Finish) -> None:
        sequence.end(finish)
        self._states.end(sequence.slots)
        self._sequences.remove(sequence)


def compile_kernels(language_model: LanguageModel, most: int) -> None:
    """Generate two tokens with each variant of a step's kernels for up to `most` sequences.

    Triton compiles a kernel at its first use, which takes seconds: on a load's thread, only that
    model waits for it, and on the device thread all do. Without Triton this does nothing.
    """
    if not StepForward.takes(language_model, language_model.pages(1)):
        return
    request = SequenceRequest(np.zeros(2, np.int32), most=2, settings=DecodeSettings())
    for count in StepForward.sizes(language_model, most):
        loop = DecodeLoop(language_model, count)
        for _ in range(count):
            loop.add(request)
        while loop.sequences:
            loop.step()


def _step_row(sequence: DecodeSequence, row: Row) -> StepRow:
    place = row.stored
    return StepRow(int(row.ids[place]), place + sequence.ahead, place + 1, row.pages)


def _needs_scores(sequence: DecodeSequence, vocabulary: int | None) -> bool:
    """Return whether choosing its next token needs more than the argmax over `vocabulary`."""
    is_greedy = (
        sequence.beams is None
        and sequence.sampler is None
        and sequence.request.top_logprobs is None
    )
    return not (
        is_greedy and sequence.rules.is_plain and sequence.settings.vocabulary == vocabulary
    )


def _draws(pieces: Sequence[_Piece]) -> dict[int, Draw]:
    """Return the draws of the sampled rows."""
    return {
        row: Draw(piece.sequence.sampler, piece.row.length - piece.sequence.prompt)
        for row, piece in enumerate(pieces)
        if piece.sequence.sampler is not None
    }


def _scores(
    logprobs: Tensor, rows: Sequence[int], tokens: Sequence[int], pieces: Sequence[_Piece]
) -> dict[int, TokenScore]:
    """Return the scores by row. `logprobs`: one for each of `rows`."""
    counts = [pieces[row].sequence.request.top_logprobs or 0 for row in rows]
    return dict(
        zip(rows, token_scores(logprobs, [tokens[row] for row in rows], counts), strict=True)
    )


def _given(pieces: Sequence[_Piece], spans: Sequence[tuple[int, int]]) -> GivenRows | None:
    """Return the given rows of these pieces of prompts."""
    places, values, deeper, start = [], [], [], 0
    for piece, (first, last) in zip(pieces, spans, strict=True):
        given = piece.sequence.request.given
        if given is not None and first < piece.sequence.prompt:
            own = (given.places >= first) & (given.places < last)
            places.append(given.places[own] - first + start)
            values.append(given.values[own])
            deeper.append([each[own] for each in given.deeper])
        start += last - first
    if not places:
        return None
    return GivenRows(
        torch.cat(places),
        torch.cat(values),
        tuple(torch.cat(each) for each in zip(*deeper, strict=True)),
    )


def _positions(sequence: DecodeSequence, first: int, last: int) -> Ids:
    """Return the positions of prompt tokens, or of generated ones, which continue from the prompt's
    largest position.
    """
    return np.arange(first, last, dtype=np.int32) + np.int32(
        sequence.ahead if first >= sequence.prompt else 0
    )


def _axes(
    pieces: Sequence[_Piece],
    spans: Sequence[tuple[int, int]],
    positions: Sequence[Ids],
    device: torch.device,
) -> Tensor | None:
    """Return positions in several dimensions; None if they are `positions` in all of them, as for
    generated tokens.
    """
    own = [
        None
        if piece.sequence.request.axes is None or first >= piece.sequence.prompt
        else piece.sequence.request.axes[:, first:last]
        for piece, (first, last) in zip(pieces, spans, strict=True)
    ]
    count = next((len(axes) for axes in own if axes is not None), 0)
    if not count:
        return None
    whole = [
        np.tile(places, (count, 1)) if axes is None else axes
        for axes, places in zip(own, positions, strict=True)
    ]
    return to_device(np.concatenate(whole, axis=1), device)

"""Which waiting sequences go into the next forward pass: decisions only, no clock, no device.

On the way of a request between `intake.py`, which prepares sequences, and `runner.py`, which runs the batch chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Group:
    """What a batch has in common: one model and one head."""

    model: str
    head: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sequence `index` of the held job number `job`, waiting since `since` (seconds, any clock that only rises)."""

    job: int
    index: int
    tokens: int
    since: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one batch: token budget, number of sequences, and the age from which order counts more than fit (seconds)."""

    tokens: int
    items: int
    max_age: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one group for one forward pass, the longest-waiting first."""

    group: Group
    chosen: tuple[Waiting, ...]
    tokens: int


def next_batch(
    waiting: Mapping[Group, Sequence[Waiting]], limits: Limits, now: float, cap: Callable[[Group], int] | None = None
) -> Batch | None:
    """The batch to run now, or None if nothing waits. Each group's sequences must be in order of `since`.

    The group whose oldest sequence has waited longest is served, and that sequence is always part of the batch, alone if it exceeds
    the budget: nothing can starve. Sequences older than `max_age` follow strictly in order; if one does not fit, the batch ends.
    The room that is left goes to those whose length is nearest to the oldest one's, which keeps runs of equal length together.
    `cap`: the token budget of a group, for groups that may be below that of `limits`.
    """
    candidates = [(sequences[0].since, number, group) for number, (group, sequences) in enumerate(waiting.items()) if sequences]
    if not candidates:
        return None
    group = min(candidates)[2]
    if cap is not None:
        limits = replace(limits, tokens=min(limits.tokens, cap(group)))
    chosen = _pick(waiting[group], limits, now)
    return Batch(group, chosen, sum(sequence.tokens for sequence in chosen))


def _pick(sequences: Sequence[Waiting], limits: Limits, now: float) -> tuple[Waiting, ...]:
    oldest = sequences[0]
    overdue = _count_overdue(sequences, now - limits.max_age)
    chosen, room = [oldest], limits.tokens - oldest.tokens
    for sequence in sequences[1:overdue]:
        if sequence.tokens > room or len(chosen) >= limits.items:
            return tuple(chosen)
        chosen.append(sequence)
        room -= sequence.tokens
    rest = sequences[max(overdue, 1) :]
    if sum(sequence.tokens for sequence in rest) > room or len(rest) + len(chosen) > limits.items:
        rest = sorted(rest, key=lambda sequence: abs(sequence.tokens - oldest.tokens))
    for sequence in rest:
        if len(chosen) >= limits.items:
            break
        if sequence.tokens <= room:
            chosen.append(sequence)
            room -= sequence.tokens
    return tuple(chosen)


def _count_overdue(sequences: Sequence[Waiting], before: float) -> int:
    for count, sequence in enumerate(sequences):
        if sequence.since >= before:
            return count
    return len(sequences)


class WaitingRoom:
    """Prepared sequences that wait for a forward pass, by group, in order of arrival. Not thread-safe: `runner.py` guards it."""

    def __init__(self) -> None:
        # The whole state: every waiting sequence is in exactly one of these lists.
        self._groups: dict[Group, list[Waiting]] = {}
        self.tokens = 0

    def add(self, group: Group, sequences: Collection[Waiting]) -> None:
        """Sequences must not be older than those that wait already."""
        self._groups.setdefault(group, []).extend(sequences)
        self.tokens += sum(sequence.tokens for sequence in sequences)

    def jobs(self) -> set[int]:
        """Numbers of the jobs that have sequences here."""
        return {sequence.job for sequences in self._groups.values() for sequence in sequences}

    def remove(self, jobs: Collection[int]) -> None:
        """Forget the sequences of these jobs."""
        for group, sequences in list(self._groups.items()):
            self._keep(group, [sequence for sequence in sequences if sequence.job not in jobs])

    def take(self, limits: Limits, now: float, cap: Callable[[Group], int] | None = None) -> Batch | None:
        """Choose the next batch, as `next_batch` does, and take it out."""
        batch = next_batch(self._groups, limits, now, cap)
        if batch is not None:
            taken = {(sequence.job, sequence.index) for sequence in batch.chosen}
            self._keep(batch.group, [one for one in self._groups[batch.group] if (one.job, one.index) not in taken])
        return batch

    def _keep(self, group: Group, sequences: list[Waiting]) -> None:
        self.tokens -= sum(one.tokens for one in self._groups[group]) - sum(one.tokens for one in sequences)
        if sequences:
            self._groups[group] = sequences
        else:
            del self._groups[group]

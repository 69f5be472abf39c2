"""Read texts that are longer than the model's maximum in overlapping windows, for every processor.

A text of several windows becomes several texts of the model's own processor, so windows are
independent sequences of the same packed batches. Their results are merged when all are there
(`merging.py`). A text of one window has exactly the result that it has without windows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Final, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from shoal.extractions import Extraction
from tokenizers import Tokenizer

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.models.interface.processor import Processor, finish_rows, prepare_parts
from libs.models.interface.results import EncodeResult, ExtractResult, Result, ScoreResult
from libs.models.interface.sequences import ANY_BYTES, InputSequence, Output, Prepared
from libs.models.interface.work import (
    CancelCheck,
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    Given,
    ModelWork,
    RelationsWork,
    ScoreWork,
    Span,
    StructureWork,
    Work,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import document_path, item_path
from libs.models.text.processing.answers import best_first, is_multi_label, labels_reaching
from libs.models.text.tokenising.text import TextProcessor, Where
from libs.models.text.windows import merging
from libs.models.text.windows.spans import (
    MAX_SEQUENCES,
    MAX_WINDOWS,
    check_outputs,
    halves,
    token_windows,
    too_many_windows,
)

WindowedWork: TypeAlias = ScoreWork | EntitiesWork | ClassifyWork | RelationsWork | StructureWork
_PROBE: Final = "a"
"""A word of one token in nearly all vocabularies."""
_PROBE_CANDIDATES: Final = 4096
"""Other words of the vocabulary that are tried if that one is unknown."""
_PROBE_REPEATS: Final = 4
"""Times the model's maximum that the word is repeated to get a text that is cut."""
_MIN_WINDOW_BYTES: Final = 8192
"""Least size of one window's results, in an answer that holds those of all windows together."""
_FLOAT_BYTES: Final = 4
_MARKERS: Final = "#▁Ġ"
"""Characters by which vocabularies mark a token that continues or begins a word."""
_INDEX: Final = re.compile(r"\b(items|documents)\[(\d+)\]")


@runtime_checkable
class WordWindows(Protocol):
    """A processor that reads texts word by word and divides them itself."""

    def word_windows(
        self,
        work: ModelWork,
        index: int,
        overlap: int | None,
        path: str,
        check_cancelled: CancelCheck,
    ) -> list[Span]:
        """Return the windows of text `index`, each of which the model reads whole.

        Raises InvalidInput for an overlap of more than half of a window, and for more than
        MAX_WINDOWS.
        """


@runtime_checkable
class SizesOutputs(Protocol):
    """A processor that knows the sizes of its model's outputs."""

    def output_bytes(self, prepared: Prepared) -> int:
        """Return the bytes of a job's outputs in the worker's memory."""


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Texts that were prepared together.

    Attributes:
        prepared: Their windows.
        texts: Their indices in the job.
        spans: The windows of each.
    """

    prepared: Prepared
    texts: Sequence[int]
    spans: Sequence[Sequence[Span]]

    @property
    def owners(self) -> list[int]:
        """Return the text's index of each window."""
        pairs = zip(self.texts, self.spans, strict=True)
        return [index for index, own in pairs for _ in own]


@dataclass(frozen=True, slots=True)
class WindowNotes:
    """The texts of a job, by groups in the order of the sequences."""

    groups: Sequence[WindowGroup]


class WindowedProcessor:
    """A processor of texts of any length around the processor of one model.

    Args:
        processor: Reads texts up to the model's maximum.
        tokenizer: The tokenizer of the model's main encoder.
    """

    def __init__(self, card: Card, processor: Processor, tokenizer: Tokenizer) -> None:
        self._card, self._processor = card, processor
        self._text = TextProcessor(tokenizer, limit=card.max_tokens, segments=False)
        self._probe = _probe(tokenizer)

    def prepare(self, work: ModelWork, check_cancelled: CancelCheck) -> Prepared:
        if not isinstance(work, WindowedWork) or work.truncation != "windows":
            return self._processor.prepare(work, check_cancelled)
        inner = _inner(work)
        everything = range(len(_texts(work)))
        prepared = self._processor.prepare(inner, check_cancelled)
        path_of, cut_texts = _item_path(work), prepared.cut_texts
        cut = [index for index in everything if path_of(index) in cut_texts]
        if not cut:
            spans = [[Span(0, len(text))] for text in _texts(work)]
            return _joined(work, [WindowGroup(prepared, everything, spans)])
        windows = dict(zip(cut, self._windows(inner, cut, prepared, check_cancelled), strict=True))
        del prepared
        groups = [
            self._group(inner, group, windows, check_cancelled) for group in _groups(work, cut)
        ]
        longest = max(cut, key=lambda index: len(windows[index]))
        check_outputs(sum(self._output_bytes(group.prepared) for group in groups), path_of(longest))
        return _joined(work, groups)

    def prepare_parts(self, work: EncodeWork, check_cancelled: CancelCheck) -> Iterator[Prepared]:
        yield from prepare_parts(self._processor, work, check_cancelled)

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        return finish_rows(self._processor, prepared, outputs, first, most_bytes)

    def finish(
        self, prepared: Prepared, outputs: Sequence[Output], check_cancelled: CancelCheck
    ) -> Result:
        notes, work = prepared.notes, prepared.work
        if not isinstance(notes, WindowNotes):
            return self._processor.finish(prepared, outputs, check_cancelled)
        if isinstance(work, ScoreWork):
            (group,) = notes.groups
            scores = self._processor.finish(group.prepared, outputs, check_cancelled)
            counts = [len(own) for own in group.spans]
            return ScoreResult(merging.best_scores(cast("ScoreResult", scores).scores, counts))
        found: dict[int, Extraction] = {}
        rest = iter(outputs)
        for group in notes.groups:
            own = list(islice(rest, len(group.prepared.sequences)))
            found.update(self._merged(work, group, own, prepared.answer_bytes, check_cancelled))
        items = (found[index] for index in range(len(found)))
        return build_result(items, prepared.answer_bytes, check_cancelled)

    def _merged(
        self,
        work: Work,
        group: WindowGroup,
        outputs: Sequence[Output],
        answer_bytes: int,
        check_cancelled: CancelCheck,
    ) -> Iterator[tuple[int, Extraction]]:
        """Yield the index and the result of each text of a group."""
        share = _window_bytes(answer_bytes, max(map(len, group.spans)))
        inner = replace(group.prepared, answer_bytes=share)
        result = self._processor.finish(inner, outputs, check_cancelled)
        rest = iter(cast("ExtractResult", result).items)
        rules = _rules(work, self._card)
        for index, spans in zip(group.texts, group.spans, strict=True):
            own = list(islice(rest, len(spans)))
            merged = merging.merged(_texts(work)[index], spans, own, rules, check_cancelled)
            yield index, _reaching(merged, work)

    def _output_bytes(self, prepared: Prepared) -> int:
        """Return the bytes of a job's outputs: vectors or classes of tokens or of sequences, if
        the processor does not report them.
        """
        if isinstance(self._processor, SizesOutputs):
            return self._processor.output_bytes(prepared)
        card, work = self._card, prepared.work
        floats = len(prepared.sequences) * max(card.dimensions, len(card.classes))
        by_token = {ScoreWork: card.multi_vector_dimensions, EntitiesWork: len(card.classes)}
        floats += by_token.get(type(work), 0) * sum(one.tokens for one in prepared.sequences)
        return _FLOAT_BYTES * floats

    def _windows(
        self,
        work: WindowedWork,
        cut: Sequence[int],
        prepared: Prepared,
        check_cancelled: CancelCheck,
    ) -> Iterator[list[Span]]:
        """Yield the windows of the texts `cut`, which are too long.

        Args:
            prepared: The whole job, with each of them cut.
        """
        path_of, room, overlap = _item_path(work), 0, work.window_overlap
        sequences = Counter(one.cut for one in prepared.sequences)
        for index in cut:
            check_cancelled()
            path = path_of(index)
            if isinstance(self._processor, WordWindows):
                found = self._processor.word_windows(work, index, overlap, path, check_cancelled)
            else:
                room = room or self._room(work, check_cancelled)
                own = _texts(work)[index]
                found = token_windows(self._text, own, room, overlap, path, check_cancelled)
            _check_count(found, path, sequences[path])
            yield found or [Span(0, len(_texts(work)[index]))]

    def _room(self, work: WindowedWork, check_cancelled: CancelCheck) -> int:
        """Return the tokens of a text that fit next to those of labels, query and prompt: the
        difference between the sequences of a text that is too long and of a text of one token.

        Both are made of a known word, because a processor may remove the unknown tokens of a
        request's texts.
        """
        words = f"{self._probe} " * (_PROBE_REPEATS * self._card.max_tokens)
        long = self._processor.prepare(_with_texts(work, [words]), check_cancelled)
        short = self._processor.prepare(_with_texts(work, [self._probe]), check_cancelled)
        path = _item_path(work)(0)
        pairs = zip(long.sequences, short.sequences, strict=True)
        rooms = [_tokens(one) - _tokens(other) for one, other in pairs if one.cut == path]
        return max(1, min(rooms, default=0) + 1)

    def _group(
        self,
        work: WindowedWork,
        texts: Sequence[int],
        windows: Mapping[int, list[Span]],
        check_cancelled: CancelCheck,
    ) -> WindowGroup:
        """Prepare all windows of some texts, and halve those of which the model would read only a
        part: a tokenizer may make more tokens of a window than of its place in the text.
        """
        path_of = _item_path(work)
        spans = [windows.get(index, [Span(0, len(_texts(work)[index]))]) for index in texts]
        while True:
            pieces = _with_windows(work, texts, spans)
            owners = [index for index, own in zip(texts, spans, strict=True) for _ in own]
            try:
                prepared = self._processor.prepare(pieces, check_cancelled)
            except InvalidInput as error:
                raise _relocated(error, owners) from None
            cut_texts = prepared.cut_texts
            cut = {number for number in range(len(owners)) if path_of(number) in cut_texts}
            halved = self._halved(work, texts, spans, cut, check_cancelled) if cut else spans
            if halved == spans:
                return WindowGroup(prepared, texts, spans)
            spans = halved
            for index, own in zip(texts, spans, strict=True):
                _check_count(own, path_of(index), 1)

    def _halved(
        self,
        work: WindowedWork,
        texts: Sequence[int],
        spans: Sequence[Sequence[Span]],
        cut: Set[int],
        check_cancelled: CancelCheck,
    ) -> list[list[Span]]:
        """Return the windows, with each number of `cut` divided. One of a single character stays as
        it is.
        """
        numbers = count()
        found: list[list[Span]] = []
        for index, own in zip(texts, spans, strict=True):
            divided: list[Span] = []
            for span in own:
                if next(numbers) not in cut:
                    divided.append(span)
                    continue
                piece = _texts(work)[index][span.start : span.end]
                divided += [
                    Span(span.start + part.start, span.start + part.end)
                    for part in halves(self._text, piece, check_cancelled)
                ]
            found.append(divided)
        return found


def _probe(tokenizer: Tokenizer) -> str:
    """Return a word that is one token of the vocabulary; any word if none is found."""
    if _is_known(tokenizer, _PROBE):
        return _PROBE
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = (token.strip(_MARKERS) for token, _ in by_id)
    candidates = islice((word for word in words if word.isalnum()), _PROBE_CANDIDATES)
    return next((word for word in candidates if _is_known(tokenizer, word)), _PROBE)


def _is_known(tokenizer: Tokenizer, word: str) -> bool:
    tokens = tokenizer.encode(word, add_special_tokens=False).tokens
    return len(tokens) == 1 and word in tokens[0]


def _check_count(spans: Sequence[Span], path: str, sequences: int) -> None:
    """Refuse a text of too many windows, or of too many sequences with each window."""
    if len(spans) > MAX_WINDOWS:
        raise too_many_windows(path)
    if len(spans) * sequences > MAX_SEQUENCES:
        raise too_many_windows(path, MAX_SEQUENCES, "windows, each with every label")


def _groups(work: WindowedWork, cut: Sequence[int]) -> list[Sequence[int]]:
    """Return the texts to be prepared together: all, or, where the size of a result is unknown, all
    texts of one window and each of the others, because an item's results are bounded by its own
    windows.
    """
    everything = range(len(_texts(work)))
    if isinstance(work, ScoreWork | ClassifyWork):
        return [everything]
    long = set(cut)
    short = [index for index in everything if index not in long]
    return [*([short] if short else []), *([index] for index in cut)]


def _joined(work: WindowedWork, groups: Sequence[WindowGroup]) -> Prepared:
    """Return one prepared job of all groups' sequences. Its paths are those of the texts."""
    first = groups[0].prepared
    sequences: list[InputSequence] = []
    fields: list[str] = []
    cut: list[str] = []
    for group in groups:
        prepared, owners = group.prepared, group.owners
        sequences += [
            replace(one, cut=_owner_path(one.cut, owners)) if one.cut else one
            for one in prepared.sequences
        ]
        cut += [_owner_path(path, owners) for path in prepared.cut]
        if prepared.fields:
            fields += [_owner_path(path, owners) for path in prepared.fields]
        elif len(prepared.sequences) == len(owners):
            fields += map(_item_path(work), owners)
    return Prepared(
        work,
        first.head,
        sequences,
        WindowNotes(groups),
        looked_up=sum(group.prepared.looked_up for group in groups),
        heads=first.heads,
        fields=tuple(fields) if len(fields) == len(sequences) else (),
        cut=tuple(cut),
    )


def _inner(work: WindowedWork) -> WindowedWork:
    """Return the work of windows: a threshold applies to the merged scores of labels, not to those
    of a window.
    """
    if isinstance(work, ClassifyWork):
        return replace(work, truncation="end", threshold=None)
    if isinstance(work, StructureWork):
        questions = tuple(replace(one, threshold=None) for one in work.schema.classifications)
        return replace(
            work, truncation="end", schema=replace(work.schema, classifications=questions)
        )
    return replace(work, truncation="end")


def _reaching(found: Extraction, work: Work) -> Extraction:
    """Return a text's result without labels below the request's threshold."""
    if isinstance(work, ClassifyWork) and work.threshold is not None:
        labels = [(one.label, np.float32(one.score)) for one in found.labels]
        return replace(found, labels=best_first(labels, work.threshold))
    if isinstance(work, StructureWork) and found.classifications:
        pairs = zip(found.classifications, work.schema.classifications, strict=True)
        return replace(
            found,
            classifications=tuple(
                replace(one, labels=labels_reaching(one.labels, question.threshold))
                for one, question in pairs
            ),
        )
    return found


def _rules(work: Work, card: Card) -> merging.MergeRules:
    match work:
        case EntitiesWork():
            return merging.MergeRules(flat=work.flat)
        case ClassifyWork():
            return merging.MergeRules(exclusive=_is_exclusive(work, card))
        case StructureWork():
            questions = {one.name: not one.multi_label for one in work.schema.classifications}
            return merging.MergeRules(flat=False, exclusive_questions=questions)
    return merging.MergeRules()


def _is_exclusive(work: ClassifyWork, card: Card) -> bool:
    """Return whether the scores of labels add up to 1: a softmax over several labels or classes."""
    if is_multi_label(work, card) or "encode" in card.tasks:
        return False
    fixed = len(card.classes) if card.contradiction is None or not work.labels else 0
    return (fixed or len(work.labels)) > 1


def _window_bytes(answer_bytes: int, windows: int) -> int:
    """Return the maximum bytes of one window's results."""
    if windows == 1 or answer_bytes == ANY_BYTES:
        return answer_bytes
    return min(answer_bytes, max(_MIN_WINDOW_BYTES, 2 * answer_bytes // windows))


def _texts(work: Work) -> list[str]:
    if isinstance(work, ScoreWork):
        return work.documents
    return cast("EntitiesWork", work).texts


def _item_path(work: Work) -> Where:
    return document_path if isinstance(work, ScoreWork) else item_path


def _with_texts(work: WindowedWork, texts: list[str]) -> WindowedWork:
    if isinstance(work, ScoreWork):
        return replace(work, documents=texts)
    return replace(work, texts=texts)


def _with_windows(
    work: WindowedWork, texts: Sequence[int], spans: Sequence[Sequence[Span]]
) -> WindowedWork:
    """Return a work with the windows of some texts as texts. Entities of the request are given to
    the windows that hold them whole.
    """
    windows = [(index, span) for index, own in zip(texts, spans, strict=True) for span in own]
    pieces = [_texts(work)[index][span.start : span.end] for index, span in windows]
    if isinstance(work, RelationsWork) and work.entities:
        given = tuple(_given(work.entities[index], span) for index, span in windows)
        return replace(work, texts=pieces, entities=given)
    return _with_texts(work, pieces)


def _given(entities: Sequence[Given], span: Span) -> tuple[Given, ...]:
    return tuple(
        Given(one.start - span.start, one.end - span.start, one.label)
        for one in entities
        if span.start <= one.start and one.end <= span.end
    )


def _tokens(sequence: InputSequence) -> int:
    return sequence.tokens + (0 if sequence.before is None else len(sequence.before))


def _relocated(error: InvalidInput, owners: Sequence[int]) -> InvalidInput:
    """Return the error with the paths of texts instead of windows."""
    return type(error)(_owner_path(error.message, owners), field=_owner_path(error.field, owners))


def _owner_path(path: str, owners: Sequence[int]) -> str:
    """Replace the numbers of windows in a path or a message by those of their texts."""
    return _INDEX.sub(lambda found: f"{found[1]}[{owners[int(found[2])]}]", path)

"""Encode, score and classify with an embedding model: vectors of texts in each of its
representations, and their similarities.

A job fails as a whole, and independently of others. One forward returns all representations of a
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray
from shoal.extractions import Extraction

from libs.catalog.card import Card, Representation
from libs.errors import InputTooLong, InvalidInput, TaskNotSupported
from libs.models.interface.results import EncodeResult, Result, ScoreResult
from libs.models.interface.sequences import InputSequence, Output, Prepared, SparseRow
from libs.models.interface.work import (
    CancelCheck,
    ClassifyWork,
    EncodeWork,
    Role,
    ScoreWork,
    Span,
    Truncation,
    Work,
    never_cancelled,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.text.checks import (
    document_path,
    hypotheses,
    item_path,
    need_labels,
    need_task,
    query_path,
    select_adapter,
    select_prompt,
    unsupported,
)
from libs.models.text.processing import answers
from libs.models.text.processing.chunking.dividing import (
    DEFAULT_TOKENS,
    MAX_CHUNKS,
    check_contexts,
    check_total,
    divide_in_parts,
)
from libs.models.text.processing.chunking.growing import (
    PORTION_CHARACTERS,
    EmbeddingNotes,
    GrowingJob,
    GrowingLateJob,
    computed_rows,
    cut_window,
    embedding_notes,
    slice_chunks,
)
from libs.models.text.processing.chunking.span_pooling import (
    SPANS_HEAD,
    PooledWindow,
    SpanPooling,
)
from libs.models.text.processing.pooling import MAX_VECTORS
from libs.models.text.processing.static import StaticLookup
from libs.models.text.tokenising.late import Kept, LateFrame
from libs.models.text.tokenising.text import TextProcessor, Where

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Tokenised texts."""

    sequences: list[InputSequence]
    masks: list[Kept]
    """The token vectors of each text that are returned (None: all)."""


@dataclass(frozen=True, slots=True)
class _Forms:
    """The outputs for texts, in order, in the requested representations; the others are empty."""

    dense: list[Array]
    sparse: list[SparseRow]
    multi_vector: list[Array]


class EmbeddingProcessor:
    """The processor of one model.

    Args:
        late: For late-interaction models.
        static: For queries that need no forward.
        spans: For models with the head SPANS_HEAD.
    """

    def __init__(
        self,
        card: Card,
        text: TextProcessor,
        late: LateFrame | None = None,
        static: StaticLookup | None = None,
        spans: SpanPooling | None = None,
    ) -> None:
        self._card, self._text, self._late, self._static, self._spans = (
            card,
            text,
            late,
            static,
            spans,
        )

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        need_task(work, self._card)
        match work:
            case EncodeWork():
                (prepared,) = deque(self.prepare_parts(work, check_cancelled), maxlen=1)
                return prepared
            case ScoreWork():
                return self._score(work, check_cancelled)
            case ClassifyWork():
                return self._classify(work, check_cancelled)
        raise unsupported(work, self._card)

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        work = prepared.work
        if isinstance(work, EncodeWork) and embedding_notes(prepared).windows:
            return self._late_vectors(work, prepared, outputs, check_cancelled)
        forms = self._forms(prepared, outputs)
        match work:
            case EncodeWork():
                return self._vectors(work, prepared, forms, check_cancelled)
            case ScoreWork():
                return ScoreResult(self._scores(work, forms))
            case ClassifyWork():
                labels = answers.nearest_labels(work, np.stack(forms.dense))
                return build_result(
                    (Extraction(labels=found) for found in labels),
                    prepared.answer_bytes,
                    check_cancelled,
                )
        raise unsupported(work, self._card)

    def prepare_parts(
        self, work: EncodeWork, check_cancelled: CancelCheck = never_cancelled
    ) -> Iterator[Prepared]:
        """Prepare a job, and yield its prepared part as texts are read and divided.

        Each result has the sequences of the one before, in the same order, and the last one has all
        of them. Raises as `prepare`.
        """
        need_task(work, self._card)
        forms = asked_forms(work, self._card)
        check_encode(work, forms, self._card)
        prompt = work.instruction or select_prompt(self._card, work.role, work.adapter)
        if work.chunking is None:
            yield self._whole(work, work.texts, forms, prompt, item_path, check_cancelled)
        elif work.chunking.late:
            yield from self._late_chunks(work, forms, prompt, check_cancelled)
        else:
            yield from self._chunks(work, forms, prompt, check_cancelled)

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        """Return the vectors of the next chunks of a job that is not complete; None if the first
        one is not computed, or if its sparse vector may have to be cut. The last chunk of a job is
        never returned.

        Args:
            outputs: The outputs so far, by sequence.
            first: The first chunk.
            most_bytes: Of the vectors, as they are computed. The first one may have more.
        """
        notes = embedding_notes(prepared)
        rows = computed_rows(notes, outputs, first, most_bytes)
        if rows is None or notes.chunks is None:
            return None
        found, windows = [outputs[index] for index in rows.sequences], list[PooledWindow]()
        if notes.windows:
            spans = [name == SPANS_HEAD for name in prepared.head.split("+")]
            for place, index in enumerate(rows.sequences):
                window, found[place] = cut_window(notes.windows[index], found[place], rows, spans)
                windows.append(window)
        chunks = slice_chunks(notes.chunks, rows.first, rows.end)
        part = replace(
            prepared,
            notes=EmbeddingNotes(
                [notes.masks[index] for index in rows.sequences],
                [],
                chunks,
                tuple(windows),
            ),
            # An item's share is divided by its chunks, which are not known before the last one.
            answer_bytes=prepared.answer_bytes // MAX_CHUNKS * int(np.diff(chunks.offsets).max()),
        )
        result = cast(EncodeResult, self.finish(part, found))
        return None if result.sparse is not None and result.sparse.truncated else result

    def _whole(
        self,
        work: EncodeWork,
        texts: list[str],
        forms: Sequence[Representation],
        prompt: str,
        where: Where,
        check_cancelled: CancelCheck,
    ) -> Prepared:
        """Prepare `texts`, the texts of the work or their chunks."""
        if self._static is not None and self._is_static(work.role):
            found, tokens, cut = self._static.rows(
                texts, prompt, work.truncation, where, check_cancelled
            )
            return Prepared(
                work, "sparse", [], EmbeddingNotes([], found), looked_up=tokens, cut=cut
            )
        encoded = self._adapted(
            self.encode_texts(texts, prompt, work.role, work.truncation, where, check_cancelled),
            work.role,
            work.adapter,
        )
        check_pooled(work, encoded.sequences, where)
        return Prepared(work, "+".join(forms), encoded.sequences, EmbeddingNotes(encoded.masks, []))

    def _chunks(
        self,
        work: EncodeWork,
        forms: Sequence[Representation],
        prompt: str,
        check_cancelled: CancelCheck,
    ) -> Iterator[Prepared]:
        """Prepare each chunk as a separate text, preceded by its contexts. Yield the prepared
        part as it grows.
        """
        job = GrowingJob(work, "+".join(forms))
        room = self.longest(work.role) - self._text.frame_tokens - self._prompt_tokens(prompt)
        for index in range(len(work.texts)):
            check_cancelled()
            context = work.contexts[index] if work.contexts else ""
            own_room = self._room(work, index, room, context)
            spans: list[Span] = []
            for part in divide_in_parts(self._text, work, index, own_room, check_cancelled):
                spans += part
                check_contexts(spans, context, index)
                job.add(index, part, context)
                check_total(work, len(job.table), index)
                if job.waiting_characters >= PORTION_CHARACTERS:
                    self._prepare_waiting(job, forms, prompt, check_cancelled)
                    if job.growth.is_due(len(job.tokens)):
                        yield job.prepared()
        self._prepare_waiting(job, forms, prompt, check_cancelled)
        yield job.prepared()

    def _prepare_waiting(
        self,
        job: GrowingJob,
        forms: Sequence[Representation],
        prompt: str,
        check_cancelled: CancelCheck,
    ) -> None:
        """Tokenise the chunks of a job that were not tokenised yet."""
        pieces, paths = job.take_waiting()
        if not pieces:
            return
        where = paths.__getitem__
        job.extend(self._whole(job.work, pieces, forms, prompt, where, check_cancelled), paths)

    def _room(self, work: EncodeWork, index: int, room: int, context: str) -> int:
        """Return the maximum tokens of a text's chunk.

        Raises InvalidInput if the request asks for more, or if no tokens are left.
        """
        asked = 0 if work.chunking is None else work.chunking.max_tokens
        left = room - (self._text.count_tokens(context, room) if context else 0)
        if left < 1:
            where = f"items[{index}].context" if context else "instruction"
            raise InvalidInput(
                f"{where} leaves no tokens for a chunk: the model's maximum with it is {room}",
                field=where,
            )
        if asked > left:
            message = (
                f"chunking.max_tokens is {asked}; the model's maximum with special tokens, prompt "
                f"and context is {left}"
            )
            raise InvalidInput(
                f"{message}: request fewer, or late chunks", field="chunking.max_tokens"
            )
        return left

    def _prompt_tokens(self, prompt: str) -> int:
        return self._text.count_tokens(prompt, self._text.limit) if prompt else 0

    def longest(self, role: Role) -> int:
        """Return the maximum tokens of a sequence in a role, special ones included."""
        return self._text.limit if self._late is None else self._late.longest(role)

    def _late_chunks(
        self,
        work: EncodeWork,
        forms: Sequence[Representation],
        prompt: str,
        check_cancelled: CancelCheck,
    ) -> Iterator[Prepared]:
        """Prepare the windows of each text. Token states are pooled by chunk. Yield the prepared
        part as it grows.
        """
        spans = self._spans
        if spans is None or ("dense" in forms and not spans.has_vectors):
            raise TaskNotSupported(
                f"{self._card.model} does not support late chunks: its pooling cannot be applied "
                "to spans",
                field="chunking.late",
            )
        if "sparse" in forms:
            raise TaskNotSupported(
                "late chunks have only dense vectors and multi-vectors", field="representations"
            )
        if self._late is not None and work.role == "query" and "multi_vector" in forms:
            raise InvalidInput("late chunks are supported for documents, not queries", field="role")
        if any(work.contexts) or any(span.context for own in work.spans for span in own):
            raise InvalidInput(
                "late chunks do not take a context: leave it empty",
                field="items[0].context",
            )
        job = GrowingLateJob(
            work,
            "+".join(SPANS_HEAD if form == "dense" else form for form in forms),
            select_adapter(self._card, work.role, work.adapter),
            lambda sequence: None if self._late is None else self._late.kept(sequence, "document"),
        )
        for index in range(len(work.texts)):
            check_cancelled()
            read = partial(work.read_text, index)
            windows = spans.grow(
                self.longest(work.role),
                pools_prompt=self._card.pool_prompt or not prompt,
                path=item_path(index),
            )
            job.begin_text(windows)
            for is_whole in windows.read(
                self._text.encode_in_parts(read, prompt, check_cancelled),
                divide_in_parts(self._text, work, index, DEFAULT_TOKENS, check_cancelled),
            ):
                check_total(work, job.chunks, index)
                _check_late_pooled(work, job.extend(is_whole=is_whole), index)
                if not is_whole and job.is_due():
                    yield job.prepared()
        yield job.prepared()

    def _late_vectors(
        self,
        work: EncodeWork,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck,
    ) -> EncodeResult:
        notes, names = embedding_notes(prepared), prepared.head.split("+")
        if self._spans is None or notes.chunks is None:
            raise TypeError("the job was not prepared for late chunks")
        columns, offsets = _columns(names, outputs), notes.chunks.offsets
        dense: list[Array] = []
        tokens: list[Array] = []
        if SPANS_HEAD in columns:
            pooled = cast("Sequence[Array]", columns[SPANS_HEAD])
            for vectors in self._spans.vectors(notes.windows, pooled, offsets):
                check_cancelled()
                dense += list(vectors)
        if "multi_vector" in columns:
            rows = cast("Sequence[Array]", columns["multi_vector"])
            tokens = self._spans.token_rows(notes.windows, rows, notes.masks, offsets[-1])
        return EncodeResult(
            dense=answers.dense_rows(work, self._card, dense) if dense else None,
            multi_vector=answers.token_rows(work, self._card, tokens, check_cancelled)
            if tokens
            else None,
            chunks=notes.chunks,
        )

    def _is_static(self, role: Role) -> bool:
        queries = None if self._card.sparse is None else self._card.sparse.queries
        return queries is not None and (role == "query" or (queries.default and not role))

    def _score(self, work: ScoreWork, check_cancelled: CancelCheck) -> Prepared:
        """Prepare the query, then the documents."""
        if work.scale == "probability" and self._card.scoring != "cosine":
            vectors = " and ".join(self._card.representations)
            how = f" by {self._card.scoring}" if self._card.kind == "dense" else ""
            raise InvalidInput(
                f"scores of {vectors} vectors{how} cannot be probabilities: leave `scale` empty",
                field="scale",
            )
        prompt = work.instruction or select_prompt(self._card, "query", work.adapter)
        other = select_prompt(self._card, "document", work.adapter)
        forms = self._card.representations
        cut: tuple[str, ...] = ()
        if self._static is not None:
            found, tokens, cut = self._static.rows(
                [work.query], prompt, work.truncation, query_path, check_cancelled
            )
            query = EncodedTexts([], [])
        else:
            found, tokens = [], 0
            query = self.encode_texts(
                [work.query], prompt, "query", work.truncation, query_path, check_cancelled
            )
            query = self._adapted(query, "query", work.adapter)
        documents = self.encode_texts(
            work.documents, other, "document", work.truncation, document_path, check_cancelled
        )
        documents = self._adapted(documents, "document", work.adapter)
        notes = EmbeddingNotes(query.masks + documents.masks, found)
        sequences = query.sequences + documents.sequences
        return Prepared(work, "+".join(forms), sequences, notes, looked_up=tokens, cut=cut)

    def _classify(self, work: ClassifyWork, check_cancelled: CancelCheck) -> Prepared:
        """Prepare the texts, then one prompt per label."""
        need_labels(work.labels, self._card, "classify.labels")
        prompts = hypotheses(work)
        default = select_prompt(self._card, "", work.adapter)
        texts = self.encode_texts(
            work.texts, default, "", work.truncation, item_path, check_cancelled
        )
        labels = self.encode_texts(
            prompts, default, "", work.truncation, _label_path, check_cancelled
        )
        texts, labels = (
            self._adapted(texts, "", work.adapter),
            self._adapted(labels, "", work.adapter),
        )
        return Prepared(
            work,
            "dense",
            texts.sequences + labels.sequences,
            EmbeddingNotes(texts.masks + labels.masks, []),
        )

    def _adapted(self, encoded: EncodedTexts, role: Role, named: str) -> EncodedTexts:
        """Set the sequences' adapter: the request's, else the checkpoint's for their role."""
        adapter = select_adapter(self._card, role, named)
        return (
            EncodedTexts(
                [replace(one, adapter=adapter) for one in encoded.sequences], encoded.masks
            )
            if adapter
            else encoded
        )

    def encode_texts(
        self,
        texts: list[str],
        prompt: str,
        role: Role,
        truncation: Truncation,
        where: Where,
        check_cancelled: CancelCheck,
    ) -> EncodedTexts:
        """Return the sequences of texts in a role. `where` returns the path of each in the job."""
        if self._late is not None:
            frame = self._late.queries if role == "query" else self._late.documents
            return EncodedTexts(*frame(texts, prompt, truncation, where, check_cancelled))
        sequences = self._text.encode(
            texts, truncation, where, prompt=prompt, check_cancelled=check_cancelled
        )
        if not self._card.pool_prompt and prompt:
            skip = self._text.prompt_tokens(prompt)
            # Pool at least the last token: a truncated text could otherwise have no tokens.
            sequences = [replace(item, skip=min(skip, item.tokens - 1)) for item in sequences]
        return EncodedTexts(sequences, [None] * len(sequences))

    def _forms(self, prepared: Prepared, outputs: Sequence[Output]) -> _Forms:
        notes = embedding_notes(prepared)
        columns = _columns(prepared.head.split("+"), outputs)
        sparse = [*notes.found, *cast("Sequence[SparseRow]", columns.get("sparse", ()))]
        rows = zip(
            cast("Sequence[Array]", columns.get("multi_vector", ())), notes.masks, strict=False
        )
        return _Forms(
            dense=list(cast("Sequence[Array]", columns.get("dense", ()))),
            sparse=[
                answers.strongest(
                    row, 0 if self._card.sparse is None else self._card.sparse.strongest
                )
                for row in sparse
            ],
            multi_vector=[row if mask is None else row[mask] for row, mask in rows],
        )

    def _vectors(
        self, work: EncodeWork, prepared: Prepared, forms: _Forms, check_cancelled: CancelCheck
    ) -> EncodeResult:
        names, most = prepared.head.split("+"), prepared.answer_bytes
        chunks = embedding_notes(prepared).chunks
        if chunks is not None:
            most //= int(np.diff(chunks.offsets).max())
        return EncodeResult(
            dense=answers.dense_rows(work, self._card, forms.dense) if "dense" in names else None,
            sparse=answers.sparse_rows(work, self._columns, forms.sparse, most)
            if "sparse" in names
            else None,
            multi_vector=answers.token_rows(work, self._card, forms.multi_vector, check_cancelled)
            if "multi_vector" in names
            else None,
            chunks=chunks,
        )

    def _scores(self, work: ScoreWork, forms: _Forms) -> Array:
        scores: dict[Representation, Array] = {}
        if forms.dense:
            scores["dense"] = answers.dense_scores(
                forms.dense[0], np.stack(forms.dense[1:]), self._card, work.scale
            )
        if forms.sparse:
            cosine = self._card.scoring == "sparse_cosine"
            scores["sparse"] = answers.dot_scores(
                forms.sparse[0], forms.sparse[1:], self._columns, cosine=cosine
            )
        if forms.multi_vector:
            scores["multi_vector"] = answers.maxsim_scores(
                forms.multi_vector[0], forms.multi_vector[1:], self._card
            )
        return (
            answers.hybrid_scores(scores)
            if self._card.scoring == "hybrid"
            else next(iter(scores.values()))
        )

    @property
    def _columns(self) -> int:
        return 0 if self._card.sparse is None else self._card.sparse.columns


def _columns(names: Sequence[str], outputs: Sequence[Output]) -> Mapping[str, Sequence[Output]]:
    """Return the outputs of each head, for all sequences."""
    each = (
        [outputs]
        if len(names) == 1
        else list(zip(*cast("Sequence[tuple[Output, ...]]", outputs), strict=True))
    )
    return dict(zip(names, each, strict=False))


def asked_forms(work: EncodeWork, card: Card) -> tuple[Representation, ...]:
    """Return the requested representations in the model's order; without any, the main one.

    Raises TaskNotSupported for one that the model lacks.
    """
    for number, form in enumerate(work.representations):
        if form not in card.representations:
            message = (
                f"{card.model} has no {form} vectors; its vectors: "
                f"{', '.join(card.representations)}"
            )
            raise TaskNotSupported(message, field=f"representations[{number}]")
    return (
        tuple(form for form in card.representations if form in work.representations)
        or card.representations[:1]
    )


def check_encode(work: EncodeWork, forms: Sequence[Representation], card: Card) -> None:
    """Raise InvalidInput for dimensions and data types that the requested representations do not
    support."""
    other = next((form for form in forms if form != "dense"), None)
    if work.dimensions and "dense" not in forms:
        raise InvalidInput(
            f"only dense vectors can be truncated, not {other}: leave it 0",
            field="dimensions",
        )
    if work.pooling_factor > 1 and "multi_vector" not in forms:
        raise InvalidInput(
            "only multi-vectors are pooled, and none are requested: leave it 0",
            field="pooling_factor",
        )
    if work.dimensions > card.dimensions:
        raise InvalidInput(
            f"{work.dimensions} exceeds the {card.dimensions} dimensions of {card.model}",
            field="dimensions",
        )
    if work.data_type in ("uint8", "binary") and other is not None:
        raise InvalidInput(
            f"{work.data_type} is supported for dense vectors, not for {other}", field="data_type"
        )
    if work.data_type == "int8" and "sparse" in forms:
        raise InvalidInput(
            "int8 is supported for dense vectors and multi-vectors, not for sparse",
            field="data_type",
        )


def check_pooled(work: EncodeWork, sequences: Sequence[InputSequence], where: Where) -> None:
    """Raise InputTooLong for an item with too many vectors to pool."""
    if work.pooling_factor <= 1:
        return
    for index, sequence in enumerate(sequences):
        if sequence.tokens > MAX_VECTORS:
            message = (
                f"{where(index)} has {sequence.tokens:,} tokens; pooling takes at most "
                f"{MAX_VECTORS:,}"
            )
            raise InputTooLong(message, field=where(index))


def _check_late_pooled(work: EncodeWork, tokens: Sequence[int], index: int) -> None:
    most = max(tokens, default=0)
    if work.pooling_factor > 1 and most > MAX_VECTORS:
        where = item_path(index)
        message = f"{where} has a chunk of {most:,} tokens; pooling takes at most {MAX_VECTORS:,}"
        raise InputTooLong(message, field=where)


def _label_path(number: int) -> str:
    return f"classify.labels[{number}]"

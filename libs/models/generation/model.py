"""The served generative model. Sequences stay in its decode loop between two forwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from threading import RLock
from typing import Final

import numpy as np
import torch
from shoal.extractions import Extraction, PageText

from libs.catalog.card import Card
from libs.errors import InvalidInput
from libs.kernels.attention.paged import PAGE, pages_for
from libs.models.generation.decoding.graphs import SEQUENCES, StepGraphs
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.loop import DecodeLoop, compile_kernels
from libs.models.generation.decoding.sequences import DecodeSequence, SequenceRequest, pages_needed
from libs.models.generation.reader import Reader
from libs.models.generation.stops import stable_text
from libs.models.interface.results import ExtractResult, Result
from libs.models.interface.sequences import (
    GENERATE,
    GeneratedIds,
    Head,
    InputSequence,
    Output,
    Prepared,
    TokenScore,
    Unfinished,
    YieldPoint,
    never_yield,
)
from libs.models.interface.work import (
    CancelCheck,
    GenerationWork,
    Parts,
    RegionsWork,
    TextWork,
    TokenWork,
    Work,
    items_as_parts,
    never_cancelled,
    without_images,
)
from libs.models.runtime.answer_budget import build_result
from libs.models.runtime.documents import Page
from libs.models.runtime.graphs.graphs import Graphs
from libs.models.runtime.loaded.tiers import Arena, ParkedModel, copying
from libs.models.text.checks import need_task
from libs.models.text.tokens import TokenProcessor
from libs.work_estimate import DEFAULT_ANSWER_TOKENS

STEPS_SECONDS: Final = 0.004
"""Time for the steps of a forward, which makes at least one. Steps of small models take less time
than the work between two forwards.
"""

POOL_BYTES: Final = 256 << 20
"""Memory of keys and values on a CPU, and of the states of layers without keys; more if the longest
request needs it.
"""

POOL_TOKENS: Final = 131_072
"""Tokens with keys and values on an accelerator: 64 sequences of 2,048."""

POOL_SHARE: Final = 1 / 8
"""Maximum share of an accelerator's model memory for keys and values, and for states; more if the
longest request needs it.
"""

MAX_REQUESTS: Final = 64
"""Maximum size of the pool in requests of the longest length."""

_ROW_VECTORS: Final = 16
"""Estimated activations of a row, in float32 vectors of the hidden size."""


@dataclass(slots=True)
class _Generation:
    """A sequence in progress. `decoding` None: it waits for memory for its keys and values."""

    sequence: InputSequence
    request: SequenceRequest
    decoding: DecodeSequence | None = None
    ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Notes:
    """The notes of a prepared job."""

    work: GenerationWork
    """The work with one item for each text that is generated."""
    of_reader: object
    items: tuple[_Item, ...] | None
    """The texts of each item of the job, by their indices in `work`; pages that were read from the
    text layer are included as they are. None: the reader's items are the job's.
    """


@dataclass(frozen=True, slots=True)
class _Item:
    """The texts of one item: known pages, or the index of a generated text and its page number (0
    without a document).
    """

    texts: tuple[PageText | tuple[int, int], ...]
    document_pages: int

    @property
    def has_pages(self) -> bool:
        return any(isinstance(each, PageText) or each[1] for each in self.texts)


class GenerativeModel:
    """Implements `libs.models.Model`. `forward` returns `Unfinished` for sequences that need
    another forward.

    `bytes`: weights, and the keys, values and states of all sequences, allocated by the first
    forward and constant from then on.
    """

    def __init__(self, card: Card, reader: Reader, memory_bytes: int = 0) -> None:
        """Create a model. `memory_bytes`: accelerator memory for all models; 0 for all of it."""
        language_model = reader.language_model
        self.card, self._reader = card, reader
        self._tokens = TokenProcessor(card, reader.tokenizer)
        self.data_type = str(language_model.decoder.dtype).removeprefix("torch.")
        inputs = card.max_tokens if language_model.has_cross else 0
        longest = language_model.max_positions
        largest = pages_needed(1, longest, language_model.settings.beams, inputs)
        self.pages = max(
            largest,
            min(
                MAX_REQUESTS * largest,
                _pool_pages(language_model.device, language_model.page_bytes, memory_bytes),
            ),
        )
        self.slots = _pool_slots(language_model, memory_bytes)
        self._arena: Arena | None = None
        if language_model.device.type != "cpu":
            self._arena = Arena(list(language_model.modules()), language_model.device)
            self._arena.stow()
            self._arena.bring()
        weights = language_model.bytes if self._arena is None else self._arena.bytes
        # A forward holds the new states of all its rows until it has succeeded.
        states = 2 * self.slots * language_model.state_bytes
        pools = self.pages * language_model.page_bytes + states
        self.bytes = max(weights + pools, card.memory_bytes)
        # State of the device thread.
        self.claimed_share = 0.0
        """The share of the pool that sequences had claimed during the last forward."""
        self._loop: DecodeLoop | None = None
        self._granted: Graphs | None = None  # until the loop creates its graphs
        self._graphs: StepGraphs | None = None
        # Guards the device, since other threads drop graphs. Reentrant: a forward on a CPU may call
        # another.
        self._computing = RLock()
        self._generations: dict[
            int, _Generation
        ] = {}  # by the id of the sequence, which this keeps alive

    # Threads

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        """Build the prompts of a job. Thread-safe. Pages with a text layer need none, unless the
        work requests it.
        """
        if isinstance(work, TokenWork):
            return self._tokens.prepare(work, check_cancelled)
        need_task(work, self.card)
        if isinstance(work, RegionsWork):
            sequences, of_reader = self._reader.prepare(work, check_cancelled)
            return self._prepared(
                work, sequences, _Notes(_without_images(work), of_reader, None), ()
            )
        if not isinstance(work, TextWork):
            raise TypeError("a generative model has only the tasks text and regions")
        items, to_generate = _items(work, check_cancelled)
        if not to_generate:
            notes = _Notes(replace(work, texts=[], parts={}), None, items)
            return Prepared(replace(work, parts={}), GENERATE, [], notes=notes)
        own = replace(
            work,
            texts=[""] * len(to_generate),
            parts=dict(enumerate(to_generate)),
            seeds=_seeds(work, items),
        )
        sequences, of_reader = self._reader.prepare(own, check_cancelled)
        fields = tuple(parts[0].field for parts in to_generate)
        return self._prepared(
            work, sequences, _Notes(_without_images(own), of_reader, items), fields
        )

    def _prepared(
        self, work: Work, sequences: list[InputSequence], notes: _Notes, fields: tuple[str, ...]
    ) -> Prepared:
        images = sum(len(each.rows.places) for each in sequences if each.rows is not None)
        fields = fields if len(fields) == len(sequences) else ()
        return Prepared(
            without_images(work),
            GENERATE,
            sequences,
            notes=notes,
            fields=fields,
            image_tokens=images,
        )

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        if isinstance(prepared.work, TokenWork):
            return self._tokens.finish(prepared)
        notes = prepared.notes
        generated = [output for output in outputs if isinstance(output, GeneratedIds)]
        if not isinstance(notes, _Notes) or len(generated) != len(outputs):
            raise TypeError("the job was not prepared or not computed by a generative model")
        made = (
            self._reader.finish(notes.work, notes.of_reader, generated)
            if generated
            else ExtractResult([])
        )
        items = (
            made.items
            if notes.items is None
            else (_merge_texts(item, made.items) for item in notes.items)
        )
        return build_result(items, prepared.answer_bytes, check_cancelled, made.output_tokens)

    def places(self, prepared: Prepared) -> Sequence[tuple[int, int]]:
        """Return the item and page (0: none) of each sequence; empty if the job's text cannot be
        streamed.
        """
        notes = prepared.notes
        if (
            not isinstance(notes, _Notes)
            or notes.items is None
            or not self._reader.can_stream(notes.of_reader)
        ):
            return ()
        found: dict[int, tuple[int, int]] = {}
        for number, item in enumerate(notes.items):
            found |= {
                text[0]: (number, text[1]) for text in item.texts if not isinstance(text, PageText)
            }
        return (
            [found[place] for place in sorted(found)]
            if len(found) == len(prepared.sequences)
            else ()
        )

    def text(self, prepared: Prepared, ids: Sequence[int]) -> str:
        """Return the beginning of the answer's text for the tokens so far of one of the job's
        sequences.
        """
        text, notes = self._reader.text(list(ids)), prepared.notes
        work = notes.work if isinstance(notes, _Notes) else None
        if not isinstance(work, TextWork):
            return text.strip()
        found = stable_text(text, work.stops)
        if work.tools and self._reader.tool_form is not None:
            found = self._reader.tool_form.stable_text(found)
        return found if work.raw_prompt else found.strip()

    # The device thread

    def forward(
        self, head: Head, sequences: list[InputSequence], yield_point: YieldPoint = never_yield
    ) -> list[Output | Unfinished]:
        """Run some steps for these sequences. After an exception, generation restarts if they are
        sent again.
        """
        called = yield_point if self._reader.language_model.device.type == "cpu" else never_yield
        with self._computing:
            if self._arena is not None:
                self._arena.wait()
            try:
                self._begin(sequences, called)
                self.claimed_share = self._decode.claimed_share
                self._steps(
                    [
                        generation
                        for each in sequences
                        if (generation := self._generations.get(id(each))) is not None
                    ],
                    called,
                )
            except BaseException:
                self.drop(sequences)
                raise
            return [self._outcome(each) for each in sequences]

    def keep_graphs(self, graphs: Graphs) -> None:
        """Replay decode steps from graphs in the memory of `graphs` until the model is parked.

        The graphs wait for `capture_graph`.
        """
        self._granted = graphs

    @property
    def awaits_capture(self) -> bool:
        """True if `capture_graph` has work to do. May be read from any thread."""
        graphs = self._graphs
        return self._granted is not None if graphs is None else graphs.is_pending

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Capture the next graph. Call it on the device thread while no batch is in progress; it
        takes tens of milliseconds.

        The first call allocates keys and values, as graphs record their addresses.
        """
        with self._computing:
            if self._arena is not None:
                self._arena.wait()
            granted, self._granted = self._granted, None
            if granted is not None:
                self._graphs = self._decode.keep_graphs(granted.capture, granted.owner)
            if self._graphs is not None:
                self._graphs.capture_one()

    def drop_graphs(self) -> None:
        """Free the memory of all graphs after waiting for a forward in progress. They are captured
        again when memory is granted.
        """
        with self._computing:
            if self._graphs is not None:
                self._graphs.drop()

    def drop(self, sequences: Sequence[InputSequence]) -> None:
        """Free the memory of sequences that will not be sent again."""
        for each in sequences:
            generation = self._generations.pop(id(each), None)
            if generation is not None and generation.decoding is not None:
                self._decode.cancel(generation.decoding)

    @property
    def claimed_bytes(self) -> int:
        """Memory of keys and values that sequences have claimed."""
        return (
            0
            if self._loop is None
            else self._loop.pool.claimed * self._reader.language_model.page_bytes
        )

    @property
    def pool_tokens(self) -> int:
        """Tokens of the prompts and longest answers that fit into memory together."""
        tokens = self.pages * PAGE
        return min(tokens, self.slots * DEFAULT_ANSWER_TOKENS) if self.slots else tokens

    @property
    def generating(self) -> int:
        """Number of sequences in progress."""
        return 0 if self._loop is None else len(self._loop.sequences)

    @property
    def _decode(self) -> DecodeLoop:
        if self._loop is None:
            self._loop = DecodeLoop(self._reader.language_model, self.pages, slots=self.slots)
        return self._loop

    def _begin(self, sequences: Sequence[InputSequence], yield_point: YieldPoint) -> None:
        """Add sequences to the loop while memory lasts. Encoders and vision towers run only for
        sequences that fit: the rows of those that wait would take memory.

        The first one without room ends this: later ones would take the memory that it waits for.
        """
        loop = self._decode
        new = [
            each
            for each in takewhile(lambda each: not self._waits_for_room(each), sequences)
            if id(each) not in self._generations
        ]
        if new := new[: loop.count_fitting(map(self._reader.plan, new))]:
            for each, request in zip(new, self._reader.requests(new, yield_point), strict=True):
                self._generations[id(each)] = _Generation(each, request)
        for each in sequences:
            generation = self._generations.get(id(each))
            if generation is not None and generation.decoding is not None:
                continue
            # While an encoder yielded, another call may have used the memory.
            if generation is None or not loop.has_room(generation.request):
                return
            generation.decoding = loop.add(generation.request)

    def _waits_for_room(self, sequence: InputSequence) -> bool:
        """Return whether a sequence that was encoded found no memory to begin."""
        generation = self._generations.get(id(sequence))
        return (
            generation is not None
            and generation.decoding is None
            and not self._decode.has_room(generation.request)
        )

    def _steps(self, generations: Sequence[_Generation], yield_point: YieldPoint) -> None:
        loop, until = self._decode, time.perf_counter() + STEPS_SECONDS
        among = {id(each.decoding): each for each in generations if each.decoding is not None}
        while among:
            decoding = [each.decoding for each in among.values() if each.decoding is not None]
            has_ended = False
            for generated in loop.step(decoding, yield_point):
                generation = among[id(generated.sequence)]
                generation.ids += generated.ids
                if generated.score is not None:
                    generation.scores.append(generated.score)
                has_ended |= generated.finish is not None
            if has_ended or time.perf_counter() >= until:
                return
            yield_point()

    def _outcome(self, sequence: InputSequence) -> Output | Unfinished:
        generation = self._generations.get(id(sequence))
        if generation is None or generation.decoding is None:
            return Unfinished(has_begun=False)
        if generation.decoding.finish is None:
            return Unfinished(generation.ids)
        del self._generations[id(sequence)]
        finish = generation.decoding.finish
        return GeneratedIds(
            np.array(generation.ids, np.int32),
            "stop" if finish == "stop" else "length",
            tuple(generation.scores),
        )

    # Memory; no call of the model is in progress

    @property
    def host_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.host_bytes

    def drop_host_copy(self) -> None:
        if self._arena is not None:
            self._arena.drop_host_copy()

    def park(self) -> ParkedModel[GenerativeModel]:
        self.drop_graphs()  # graphs record the current addresses of weights, keys and values
        self._loop = self._graphs = self._granted = None
        self._generations.clear()
        if self._arena is None:
            return ParkedModel(self, self.bytes, None)
        self._arena.stow()
        return ParkedModel(self, self._arena.bytes, self._arena)

    def probe(self) -> float:
        """Return an estimate. Compiles the kernels of decode steps, in memory that the pool of keys
        and values takes later.
        """
        language_model = self._reader.language_model
        with self._computing, copying(language_model.device):
            compile_kernels(language_model, min(SEQUENCES[-1], self.pages))
        return float(
            _ROW_VECTORS
            * language_model.decoder.token_weight.shape[1]
            * np.dtype(np.float32).itemsize
        )

    def load_fp32_fallback(self) -> None:
        """Return None: a generated text is valid whatever the precision of its scores."""
        return


def _pool_pages(device: torch.device, page_bytes: int, memory_bytes: int) -> int:
    """Return the number of key/value pages for `memory_bytes` of model memory; 0 for all of the
    device's.
    """
    if device.type != "cuda":
        return POOL_BYTES // page_bytes
    memory_bytes = memory_bytes or torch.cuda.get_device_properties(device).total_memory
    return min(pages_for(POOL_TOKENS), int(memory_bytes * POOL_SHARE) // page_bytes)


def _pool_slots(language_model: LanguageModel, memory_bytes: int) -> int:
    """Return the number of rows that can have states at a time; 0 for a model without states."""
    if not language_model.state_bytes:
        return 0
    budget = POOL_BYTES
    if language_model.device.type == "cuda":
        total = torch.cuda.get_device_properties(language_model.device).total_memory
        budget = int((memory_bytes or total) * POOL_SHARE)
    beams = language_model.settings.beams
    return max(beams, min(MAX_REQUESTS * beams, budget // language_model.state_bytes))


def _without_images(work: GenerationWork) -> GenerationWork:
    found = without_images(work)
    if not isinstance(found, TextWork | RegionsWork):
        raise TypeError("work without its images is of the same kind")
    return found


def _items(work: TextWork, check_cancelled: CancelCheck) -> tuple[tuple[_Item, ...], list[Parts]]:
    """Return the known texts of each item, and the parts of each text to generate.

    An item with pages has one text for each, and no other parts. Raises InvalidInput or
    TaskNotSupported with a part's path.
    """
    if work.json_schema and work.text_layer == "only":
        raise InvalidInput(
            "a text layer does not follow a JSON schema: let the model read the pages",
            field="text.text_layer",
        )
    if work.turns and work.text_layer == "only":
        raise InvalidInput(
            "a text layer does not answer a conversation: let the model read the pages",
            field="text.text_layer",
        )
    asks_model = work.text_layer == "never" or bool(work.json_schema) or bool(work.turns)
    items: list[_Item] = []
    to_generate: list[Parts] = []
    for parts in items_as_parts(work):
        if not any(isinstance(part.content, Page) for part in parts):
            items.append(_Item(((len(to_generate), 0),), 0))
            to_generate.append(parts)
            continue
        texts: list[PageText | tuple[int, int]] = []
        lengths: dict[bytes, int] = {}
        for part in parts:
            check_cancelled()
            page = part.content
            if work.top_logprobs is not None or work.tools:
                name = "text.tools" if work.tools else "text.top_logprobs"
                raise InvalidInput(
                    f"{name} is not supported for pages of documents: send images instead",
                    field=name,
                )
            if not isinstance(page, Page):
                raise InvalidInput(
                    "an item with a document cannot have other parts: send them as separate items",
                    field=part.field,
                )
            lengths[page.document.key] = page.document.length
            layer = "" if asks_model else page.text(part.field)
            if layer.strip() or work.text_layer == "only":
                texts.append(PageText(page.number, layer, bool(layer.strip())))
            else:
                texts.append((len(to_generate), page.number))
                to_generate.append((part,))
        items.append(_Item(tuple(texts), sum(lengths.values())))
    return tuple(items), to_generate


def _seeds(work: TextWork, items: Sequence[_Item]) -> tuple[bytes, ...]:
    """Return the seed of each generated text: its item's, with the page number for a document."""
    if not work.seeds:
        return ()
    texts = [
        (text, seed) for item, seed in zip(items, work.seeds, strict=True) for text in item.texts
    ]
    return tuple(
        seed + text[1].to_bytes(4, "little")
        for text, seed in texts
        if not isinstance(text, PageText)
    )


def _merge_texts(item: _Item, generated: Sequence[Extraction]) -> Extraction:
    if not item.has_pages:
        ((place, _),) = [each for each in item.texts if not isinstance(each, PageText)]
        return generated[place]
    pages: list[PageText] = []
    finishes: list[Extraction] = []
    for each in item.texts:
        if isinstance(each, PageText):
            pages.append(each)
        else:
            finishes.append(generated[each[0]])
            pages.append(PageText(each[1], generated[each[0]].text, False))
    cut = any(each.finish_reason == "length" for each in finishes)
    return Extraction(
        pages=tuple(pages),
        document_pages=item.document_pages,
        finish_reason="length" if cut else "stop" if finishes else "",
    )

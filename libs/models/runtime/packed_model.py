"""The served model: `prepare` (threads) -> `forward` (the device thread) -> `finish` (threads). The
calls overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import RLock

import torch
from torch import nn

from libs.catalog.card import Card
from libs.catalog.checkpoint.tasks import OwnAdapters
from libs.errors import TaskNotSupported
from libs.models.interface.head import Compacts, ModelHead, PreemptedHead, ReadsDevice
from libs.models.interface.output_cache import FindOutput, OutputCache
from libs.models.interface.packed import Packed
from libs.models.interface.pending import DeviceQueue, Submission
from libs.models.interface.processor import Processor, TokenizerWork, finish_rows, prepare_parts
from libs.models.interface.results import EncodeResult, ExtractResult, Result
from libs.models.interface.sequences import (
    Head,
    InputSequence,
    Output,
    Prepared,
    YieldPoint,
    never_yield,
)
from libs.models.interface.work import (
    CancelCheck,
    EncodeWork,
    Role,
    TextWork,
    TokenWork,
    Work,
    never_cancelled,
)
from libs.models.layers.encoder import resident_bytes
from libs.models.runtime.answer_budget import build_result
from libs.models.runtime.backbone import Backbone
from libs.models.runtime.documents import read_text_layers
from libs.models.runtime.graphs.capture import PendingCopy
from libs.models.runtime.graphs.graphs import Graphs, Replayed
from libs.models.runtime.loaded.cuda_queue import cuda_queue
from libs.models.runtime.loaded.lora import Adapters
from libs.models.runtime.loaded.peft import TensorNames
from libs.models.runtime.loaded.probe import activation_bytes_per_token, image_bytes
from libs.models.runtime.loaded.tasks import add_own_adapters
from libs.models.runtime.loaded.tiers import Arena, ParkedModel, copying, find_tensors, sharing
from libs.models.weights import TensorFile


class PackedModel:
    """A model of one or several backbones with packed batches. Every served model that is not
    generative is one.

    Attributes:
        bytes: Size of the weights on the device, or more if the card reserves more.
        max_tokens: Length of the longest sequence.
        data_type: Type of the weights, such as "bfloat16".
        default_role: Role of a text without one, of an image model that frames queries differently.
    """

    def __init__(
        self,
        card: Card,
        backbones: Sequence[Backbone],
        processor: Processor,
        names: TensorNames,
        device: torch.device,
        base: Callable[[], TensorFile] | None = None,
    ) -> None:
        """Assemble a model.

        Args:
            backbones: LoRA adapters apply to the encoder of the first one.
            names: Names of its layers in adapters.
            base: See `Adapters`.
        """
        self.card = card
        self.backbones = tuple(backbones)
        self.bytes = 0
        self.max_tokens = card.max_tokens
        self._backbone_of = {
            name: backbone for backbone in self.backbones for name in backbone.heads
        }
        self._processor, self._device = processor, device
        main = self.backbones[0].encoder
        self.data_type = str(main.dtype).removeprefix("torch.")
        self.default_role: Role = ""
        self._adapters = Adapters(main, names, main.dtype, device, base)
        self.count()
        # A batch's adapters are bound to the encoder's layers, so forwards take turns. A forward
        # that preempts another, on the same thread and between two of its layers, binds its
        # adapters.
        self._computing = RLock()
        self._arena: Arena | None = None
        self._graphs: Graphs | None = None
        self.queue: DeviceQueue | None = cuda_queue(device) if device.type == "cuda" else None
        """The queue of an asynchronous device; None if a forward has computed when it returns."""
        self._last: Submission | None = (
            None  # the newest batch not collected yet; guarded by `_computing`
        )
        self.max_tower_tokens = 0
        """Tokens, within the tower, of its largest input."""
        self.tokens: TokenizerWork | None = None
        """The processor of the tokenizer; None if the model reads no texts."""
        self.output_cache: OutputCache | None = None
        """Looks up outputs of items with images; None if the model has no outputs to cache."""
        self.fp32_loader: Callable[[], PackedModel] | None = None
        """Loads the checkpoint again in float32 on the CPU; None if the model computes in float32.
        """

    @property
    def heads(self) -> Mapping[str, ModelHead]:
        """The heads by name, as in `Prepared.head`."""
        return {name: backbone.heads[name] for name, backbone in self._backbone_of.items()}

    def modules(self) -> list[nn.Module]:
        """Return the modules that hold weights: encoders, towers and heads."""
        return [
            *(module for backbone in self.backbones for module in backbone.modules()),
            self._adapters.own,
        ]

    def count(self) -> None:
        """Update `bytes` after weights were replaced."""
        self.bytes = max(
            sum(resident_bytes(module) for module in self.modules()), self.card.memory_bytes
        )

    def prepare(self, work: Work, check_cancelled: CancelCheck = never_cancelled) -> Prepared:
        """Tokenise a job. Thread-safe.

        `check_cancelled` is called every few milliseconds; its exception ends the preparation.
        Raises TaskNotSupported, InputTooLong or InvalidInput with the field's path in the job.
        """
        if isinstance(work, TokenWork):
            return self._own_tokens.prepare(work, check_cancelled)
        if isinstance(work, TextWork) and "text" not in self.card.tasks:
            return read_text_layers(work, self.card.model, check_cancelled)
        prepared = self._processor.prepare(work, check_cancelled)
        self._refuse_outside(prepared, 0)
        return prepared

    def prepare_parts(
        self, work: Work, check_cancelled: CancelCheck = never_cancelled
    ) -> Iterator[Prepared]:
        """Tokenise a job, and yield its prepared part as it grows.

        Each result has the sequences of the one before, in the same order, and the last one has all
        of them: more than one for texts that are read and divided into chunks. Raises as `prepare`.
        """
        if not isinstance(work, EncodeWork):
            yield self.prepare(work, check_cancelled)
            return
        done = 0
        for prepared in prepare_parts(self._processor, work, check_cancelled):
            self._refuse_outside(prepared, done)
            done = len(prepared.sequences)
            yield prepared

    def finish_rows(
        self, prepared: Prepared, outputs: Mapping[int, Output], first: int, most_bytes: int
    ) -> EncodeResult | None:
        """Return the vectors of the next chunks from `first` on, as many as have `most_bytes`, of a
        job that is not complete; None if the first one is not computed. Thread-safe.
        """
        return finish_rows(self._processor, prepared, outputs, first, most_bytes)

    def _refuse_outside(self, prepared: Prepared, first: int) -> None:
        """Refuse sequences from `first` on with tokens that the model does not have."""
        for head, indices in prepared.groups().items():
            self._backbone(head).refuse_outside(
                [prepared.sequences[index] for index in indices if index >= first]
            )

    @property
    def _own_tokens(self) -> TokenizerWork:
        if self.tokens is None:
            raise TaskNotSupported(
                f"{self.card.model} reads no text, so it has no tokenizer", field="model"
            )
        return self.tokens

    def _backbone(self, head: Head) -> Backbone:
        return self._backbone_of[head.split("+", 1)[0]]

    @torch.inference_mode()
    def forward(
        self, head: Head, sequences: Sequence[InputSequence], yield_point: YieldPoint = never_yield
    ) -> list[Output]:
        """Run sequences of any number of jobs for one head as one packed batch, and return their
        outputs in order.

        `yield_point` is called on a CPU only: an accelerator computes asynchronously, after the
        host has launched all layers.
        """
        if self.queue is not None:
            return self.launch(head, sequences).collect()
        order = _order(sequences)
        with self._computing:
            if self._arena is not None:
                self._arena.wait()
            called = yield_point if self._device.type == "cpu" else never_yield
            computed = self._compute(head, [sequences[i] for i in order], called)
            if computed.copy is not None:
                rows = computed.split_copy(computed.copy)
            else:
                rows = _joined(
                    [
                        self._outputs(*one, computed.packed)[computed.shared :]
                        for one in computed.of_heads
                    ]
                )
        outputs = dict(zip(order, rows, strict=True))
        return [outputs[i] for i in range(len(sequences))]

    def can_launch(self, head: Head) -> bool:
        """Implement `LaunchesBatches.can_launch`. Copying a tower's inputs to the device blocks the
        host.
        """
        if self.queue is None:
            return False
        backbone = self._backbone(head)
        return backbone.tower is None and not any(
            isinstance(backbone.heads[name], ReadsDevice) for name in head.split("+")
        )

    @torch.inference_mode()
    def launch(self, head: Head, sequences: Sequence[InputSequence]) -> PackedBatch:
        """Implement `LaunchesBatches.launch`. Raises RuntimeError on a device that is not
        asynchronous.
        """
        if self.queue is None:
            raise RuntimeError("launch needs an asynchronous device: call forward instead")
        order = _order(sequences)
        with self._computing:
            if self._arena is not None:
                self._arena.wait()
            self.queue.begin()
            computed = self._compute(head, [sequences[i] for i in order], never_yield)
            # All heads are launched before the first copy. Outputs to compact are copied once their
            # size is known.
            plain = [
                result for head_, result in computed.of_heads if not isinstance(head_, Compacts)
            ]
            self._last = submission = self.queue.submit(
                [] if computed.copy is not None else list(chain.from_iterable(plain))
            )
        return PackedBatch(self, self.queue, computed, submission, order)

    def _collected(self, submission: Submission) -> None:
        with self._computing:
            if self._last is submission:
                self._last = None

    def _wait_for_launched(self) -> None:
        """Wait until the device has computed all launched batches. Requires `_computing`. Raises
        the device's error.
        """
        if self._last is not None:
            self._last.wait()

    def forward_all(self, prepared: Prepared) -> list[Output]:
        """Run all sequences of a job, one batch per head, and return their outputs in order."""
        outputs: dict[int, Output] = dict(prepared.known)
        for head, indices in prepared.groups().items():
            found = self.forward(head, [prepared.sequences[index] for index in indices])
            outputs.update(zip(indices, found, strict=True))
        return [outputs[index] for index in range(len(prepared.sequences))]

    def finish(
        self,
        prepared: Prepared,
        outputs: Sequence[Output],
        check_cancelled: CancelCheck = never_cancelled,
    ) -> Result:
        """Turn the outputs of `prepared.sequences` into the job's result. Thread-safe.
        `check_cancelled` is called between two items.
        """
        if isinstance(prepared.work, TokenWork):
            return self._own_tokens.finish(prepared)
        if isinstance(prepared.work, TextWork) and isinstance(prepared.notes, ExtractResult):
            return build_result(prepared.notes.items, prepared.answer_bytes, check_cancelled)
        return self._processor.finish(prepared, outputs, check_cancelled)

    def add_adapter(self, name: str, directory: Path) -> int:
        """Load a LoRA adapter for sequences that name it, and return its bytes on the device.

        May be called from any thread, also during a forward. Raises ModelBroken with the file and
        the key or tensor at fault.
        """
        if self._arena is not None:
            # Some adapters are multiplied by weights, which may still be on their way to the
            # device.
            with self._computing:
                self._arena.wait()
        with sharing():
            return self._adapters.add(name, directory)

    def add_own_adapters(self, own: OwnAdapters, directory: Path, factors: TensorFile) -> None:
        """Load the adapters that are part of the checkpoint in `directory`. Call it before
        `gather`.

        `factors` are their tensors. Raises ModelBroken with the file and the key or tensor at
        fault.
        """
        add_own_adapters(self._adapters, own, directory, factors)
        self.count()

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter if it is loaded. Any thread; no waiting sequence may name it."""
        self._adapters.remove(name)

    def _compute(
        self, head: Head, sequences: Sequence[InputSequence], yield_point: YieldPoint
    ) -> _Computed:
        """Launch the encoder and all heads. The caller then copies the results to the host."""
        shared = _shared(sequences)
        packed = [*shared.values(), *sequences]
        number = {key: place for place, key in enumerate(shared)}
        places = [
            None if item.before is None else number[item.adapter, item.before.tobytes()]
            for item in packed
        ]
        backbone = self._backbone(head)
        heads = [backbone.heads[name] for name in head.split("+")]
        adapters = [item.adapter for item in packed]
        with (
            self._adapters.bound(adapters, [item.tokens for item in packed])
            if backbone is self.backbones[0]
            else nullcontext()
        ):
            done = None if self._graphs is None else self._graphs.forward(backbone, packed, heads)
            if done is None:
                batch = backbone.pack(packed, places, yield_point)
                hidden = backbone.encoder.forward(
                    batch, heads[0].rows if len(heads) == 1 else None, yield_point
                )
                done = Replayed(hidden, batch, is_pooled=False)
        if done.is_pooled:
            return _Computed([(heads[0], (done.output,))], packed, len(shared), done.copy)
        return _Computed(
            [(one, _run_head(one, done.output, done.batch, packed, yield_point)) for one in heads],
            packed,
            len(shared),
        )

    @staticmethod
    def _outputs(
        head: ModelHead, result: tuple[torch.Tensor, ...], packed: Sequence[InputSequence]
    ) -> list[Output]:
        result = head.compact(result) if isinstance(head, Compacts) else result
        return head.split(tuple(tensor.cpu().numpy() for tensor in result), packed)

    def keep_graphs(self, graphs: Graphs) -> None:
        """Replay forwards of small batches from graphs until the model is parked.

        The most frequent shapes wait for `capture_graph`.
        """
        with self._computing:
            self._graphs = graphs
            graphs.expect(self.backbones)

    @property
    def awaits_capture(self) -> bool:
        """True if `capture_graph` has work to do. May be read from any thread."""
        graphs = self._graphs
        return graphs is not None and graphs.is_pending

    @torch.inference_mode()
    def capture_graph(self) -> None:
        """Capture the next worthwhile graph. Call it on the device thread while no batch is in
        progress; it takes tens of milliseconds.
        """
        with self._computing:
            if self._graphs is not None:
                if self._arena is not None:
                    self._arena.wait()
                self._graphs.capture_one()

    def drop_graphs(self) -> None:
        """Free the memory of all graphs after waiting for batches in progress. They are captured
        again when memory is granted.
        """
        with self._computing:
            if self._graphs is not None:
                self._wait_for_launched()
                self._graphs.drop()

    def use_output_cache(self, find: FindOutput | None) -> bool:
        """Let `prepare` look up outputs of items with images by `find`; None turns lookups off.

        Returns whether the model has such outputs.
        """
        if self.output_cache is None:
            return False
        self.output_cache.find = find
        return True

    def gather(self) -> None:
        """Move all tensors into one buffer, on the device and in host memory. Call it one time,
        before the first forward.
        """
        self._arena = Arena(self.modules(), self._device)
        self._arena.stow()
        self._arena.bring()
        self.bytes = max(self._arena.bytes, self.card.memory_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights' copy in host memory; 0 without one."""
        return 0 if self._arena is None else self._arena.host_bytes

    def drop_host_copy(self) -> None:
        """Free the copy in host memory and keep none from now on."""
        if self._arena is not None:
            self._arena.drop_host_copy()

    def park(self) -> ParkedModel[PackedModel]:
        """Move the model to host memory and unload its adapters. No forward may start before
        `resume`.

        Waits for the launched batches: their kernels read the weights. Their outputs can still be
        collected.
        """
        with self._computing:
            self._wait_for_launched()
        for name in self._adapters.directories():
            self._adapters.remove(name)
        self.drop_graphs()  # graphs read the weights at their current addresses
        self._graphs = None
        if self._arena is None:
            return ParkedModel(self, self.bytes, None)
        self._arena.stow()
        return ParkedModel(self, self._arena.bytes, self._arena)

    def probe(self) -> float:
        """Measure the bytes of activations per token of a batch on the device with a tiny
        forward.
        """
        with self._computing, copying(self._device):
            weights = find_tensors(*self.modules())
            return max(activation_bytes_per_token(backbone, weights) for backbone in self.backbones)

    def image_bytes(self, tokens: int) -> int:
        """Measure the bytes of activations on the device for a batch of `tokens` image tokens, or
        for the largest image if that needs more; 0 for a text model.

        Runs a small image. Blocks.
        """
        with self._computing, copying(self._device):
            weights, images = find_tensors(*self.modules()), self.card.images
            largest = 0 if images is None else images.max_tokens
            return max(
                image_bytes(backbone, weights, tokens, largest, self.max_tower_tokens)
                for backbone in self.backbones
            )

    def load_fp32_fallback(self) -> PackedModel | None:
        """Load the checkpoint again in float32 on the CPU; None if the model computes in float32.
        Raises as `load`.
        """
        if self.fp32_loader is None:
            return None
        fallback = self.fp32_loader()
        fallback._adapters.follow(self._adapters)
        return fallback


@dataclass(slots=True, eq=False)
class _Computed:
    """A fully launched batch.

    Attributes:
        of_heads: Each head and its result on the device.
        packed: The sequences of the batch. The first `shared` are prefixes without an output.
        copy: A graph's running copy of the only head's result to the host. Rows of padding follow
            those of the batch.
    """

    of_heads: list[tuple[ModelHead, tuple[torch.Tensor, ...]]]
    packed: list[InputSequence]
    shared: int
    copy: PendingCopy | None = None

    def split_copy(self, copy: PendingCopy) -> list[Output]:
        """Wait for the copy and return the outputs."""
        return self.of_heads[0][0].split((copy.wait()[: len(self.packed)],), self.packed)


class PackedBatch:
    """A `PendingBatch`. `order` maps packed sequences to their indices in the launched batch."""

    def __init__(
        self,
        model: PackedModel,
        queue: DeviceQueue,
        computed: _Computed,
        submission: Submission,
        order: Sequence[int],
    ) -> None:
        self._model, self._queue, self._computed, self._submission, self._order = (
            model,
            queue,
            computed,
            submission,
            order,
        )

    def is_done(self) -> bool:
        return self._submission.is_done()

    def wait(self) -> None:
        self._submission.wait()

    @torch.inference_mode()
    def collect(self) -> list[Output]:
        self._submission.wait()
        self._model._collected(self._submission)
        copies, computed = iter(self._submission.copies), self._computed
        found = [] if computed.copy is None else [computed.split_copy(computed.copy)]
        for head, result in computed.of_heads if computed.copy is None else ():
            if isinstance(head, Compacts):
                tensors = self._queue.read(partial(head.compact, result))
            else:
                # Page-locked memory is scarce and outputs may be kept for minutes: copy them.
                tensors = tuple(next(copies).clone() for _ in result)
            found.append(
                head.split(tuple(tensor.numpy() for tensor in tensors), computed.packed)[
                    computed.shared :
                ]
            )
        outputs = dict(zip(self._order, _joined(found), strict=True))
        return [outputs[place] for place in range(len(outputs))]

    @property
    def seconds(self) -> float:
        return self._submission.seconds

    @property
    def idle_seconds(self) -> float:
        return self._submission.idle_seconds


def _order(sequences: Sequence[InputSequence]) -> list[int]:
    """Sort sequences so that neighbours share an adapter's product and, on a CPU, a kernel call of
    equal lengths.
    """
    return sorted(
        range(len(sequences)),
        key=lambda i: (sequences[i].adapter, sequences[i].tokens, sequences[i].seen),
    )


def _joined(of_heads: list[list[Output]]) -> list[Output]:
    """Combine the outputs of all heads into one output per sequence."""
    return of_heads[0] if len(of_heads) == 1 else list(zip(*of_heads, strict=True))


def _run_head(
    head: ModelHead,
    hidden: torch.Tensor,
    batch: Packed,
    packed: Sequence[InputSequence],
    yield_point: YieldPoint,
) -> tuple[torch.Tensor, ...]:
    if isinstance(head, PreemptedHead):
        return head.forward_preemptible(hidden, batch, packed, yield_point)
    return head.forward(hidden, batch, packed)


def _shared(sequences: Sequence[InputSequence]) -> dict[tuple[str, bytes], InputSequence]:
    """Return the shared prefixes as sequences, one per adapter and prefix. The jobs of a split
    request share a prefix.
    """
    found = [(item.adapter, item.before) for item in sequences if item.before is not None]
    return {
        (adapter, before.tobytes()): InputSequence(before, adapter=adapter)
        for adapter, before in found
    }

"""A text model: `prepare` (threads) -> `forward` (the device thread) -> `finish` (threads), three calls that overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from libs.catalog.card import Card
from libs.catalog.checkpoint.files import need_config
from libs.catalog.detect import read_card
from libs.catalog.overrides import Overrides
from libs.errors import InvalidInput, ModelBroken
from libs.models.layers.encoder import TextEncoder, resident_bytes
from libs.models.lora import Adapters, Names
from libs.models.packed import Packed
from libs.models.results import Result
from libs.models.text.heads.head import Compacts, TextHead
from libs.models.text.kinds import kind_of
from libs.models.text.kinds.kind import Built, Parts
from libs.models.text.probe import activation_bytes_per_token
from libs.models.text.processing.tokenizer import failing
from libs.models.text.registry import build_encoder, names_of
from libs.models.tiers import Arena, ParkedModel, copying, tensors_of
from libs.models.weights import TensorFile
from libs.models.work import (
    Between,
    GoOn,
    Head,
    Output,
    Prepared,
    Sequence,
    Work,
    go_on_anyway,
    nothing_between,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TextModel:
    """`bytes`: of weights on the device, or more if the card reserves more; `max_tokens`: the longest sequence."""

    def __init__(self, card: Card, encoder: TextEncoder, built: Built, names: Names, device: torch.device) -> None:
        self.card = card
        modules = [head for head in built.heads.values() if isinstance(head, nn.Module)]
        self.bytes = max(encoder.bytes + sum(resident_bytes(head) for head in modules), card.memory_bytes)
        self.max_tokens = card.max_tokens
        self._encoder, self._heads, self._processor, self._device = encoder, built.heads, built.processor, device
        self._adapters = Adapters(encoder, names, encoder.token_weight.dtype, device)
        # A batch's adapters are bound to the encoder's layers, so forwards take turns. A forward that preempts another, on the same
        # thread and between two of its layers, binds its own.
        self._computing = RLock()
        self._widen: Callable[[], TextModel] | None = None
        self._arena: Arena | None = None

    @classmethod
    def load(
        cls, directory: Path, model_id: str, device: torch.device, dtype: torch.dtype, said: Overrides | None = None
    ) -> TextModel:
        """Loads a checkpoint directory; the encoder computes in `dtype` unless the card has one, the head in float32.

        `said`: the catalog's overrides for the model. Raises ModelBroken with the file and the key or tensor at fault.
        """
        with failing(_broken_tokenizer):
            return cls._load(directory, model_id, device, dtype, said)

    @classmethod
    def _load(cls, directory: Path, model_id: str, device: torch.device, dtype: torch.dtype, said: Overrides | None) -> TextModel:
        card = read_card(directory, model_id, said)
        kind = kind_of(card)
        own, rest = TensorFile.open(directory, card.encoder_folder).split(card.encoder_prefix)
        config = encoder_config(directory, card)
        with copying(device):
            encoder, state = build_encoder(
                config, own, dtype=_DTYPES.get(card.dtype, dtype), device=device, head_tables=kind.head_table(card)
            )
            card = replace(card, max_tokens=min(card.max_tokens, encoder.max_positions))
            table, prefixes = names_of(config)
            names = Names(table, (*prefixes, *(card.encoder_prefix + prefix for prefix in prefixes)), kind.head_table(card))
            model = cls(card, encoder, kind.build(Parts(card, directory, encoder, state, rest, device)), names, device)
            if device.type != "cpu":
                model.gather()
        if _DTYPES.get(card.dtype, dtype) is not torch.float32:
            wide = None if said is None else replace(said, dtype="float32")
            model._widen = partial(cls.load, directory, model_id, torch.device("cpu"), torch.float32, wide)
        return model

    @property
    def encoder(self) -> TextEncoder:
        return self._encoder

    @property
    def heads(self) -> Mapping[str, TextHead]:
        """The heads, by the names that `Prepared.head` may have."""
        return self._heads

    def prepare(self, work: Work, go_on: GoOn = go_on_anyway) -> Prepared:
        """Tokenises a job; thread-safe. Raises TaskNotSupported, InputTooLong or InvalidInput with the field's path in the job.

        `go_on`, a cancellation check, is called every few milliseconds; what it raises ends the preparation.
        """
        with failing(_cannot_tokenise):
            prepared = self._processor.prepare(work, go_on)
        self._refuse_outside(prepared.sequences)
        return prepared

    def _refuse_outside(self, sequences: Many[Sequence]) -> None:
        """Raises InvalidInput for ids that the encoder has no embedding for, as the failed lookup would crash a CUDA process."""
        if not sequences:
            return
        rows, segments = self._encoder.token_weight.shape[0], self._encoder.segments
        rest = [item.before for item in sequences if item.before is not None]
        _refuse_ids([*(item.ids for item in sequences), *rest], rows, "token")
        _refuse_ids([item.type_ids for item in sequences if item.type_ids is not None], max(1, segments), "segment")
        longest = max(item.tokens + (0 if item.before is None else len(item.before)) for item in sequences)
        if longest > self._encoder.max_positions:
            limit = self._encoder.max_positions
            raise InvalidInput(f"the model's tokenizer makes a sequence of {longest} tokens; its encoder takes {limit}")

    @torch.inference_mode()
    def forward(self, head: Head, sequences: Many[Sequence], between: Between = nothing_between) -> list[Output]:
        """Runs sequences of any number of jobs for the same head, packed in one batch: one output each, in their order.

        `between` is called on a CPU only: an accelerator computes asynchronously, after the host has launched all layers.
        """
        # Adjacent sequences of one adapter share a product, and those of equal length a kernel call on CPU.
        order = sorted(range(len(sequences)), key=lambda i: (sequences[i].adapter, sequences[i].tokens, sequences[i].seen))
        with self._computing:
            if self._arena is not None:
                self._arena.wait()
            called = between if self._device.type == "cpu" else nothing_between
            rows = self._run(head.split("+"), [sequences[i] for i in order], called)
        outputs = dict(zip(order, rows, strict=True))
        return [outputs[i] for i in range(len(sequences))]

    def finish(self, prepared: Prepared, outputs: Many[Output]) -> Result:
        """Turns the outputs of `prepared.sequences` into the job's result; thread-safe."""
        return self._processor.finish(prepared, outputs)

    def add_adapter(self, name: str, directory: Path) -> int:
        """Loads a LoRA adapter, for sequences that name it; returns its bytes on the device. Any thread, also during a forward.

        Raises ModelBroken with the file and the key or tensor at fault.
        """
        return self._adapters.add(name, directory)

    def remove_adapter(self, name: str) -> None:
        """Unloads an adapter, if it is loaded. Any thread; not while sequences that name it are waiting."""
        self._adapters.remove(name)

    def _run(self, names: Many[str], sequences: Many[Sequence], between: Between) -> list[Output]:
        shared = _shared(sequences)
        packed = [*shared.values(), *sequences]
        number = {key: place for place, key in enumerate(shared)}
        places = [None if item.before is None else number[item.adapter, item.before.tobytes()] for item in packed]
        batch = Packed.of(
            [item.ids for item in packed],
            [item.type_ids for item in packed],
            self._device,
            seen=[item.seen for item in packed],
            before=places,
        )
        heads = [self._heads[name] for name in names]
        with self._adapters.bound([item.adapter for item in packed], batch.lengths):
            hidden = self._encoder.forward(batch, heads[0].rows if len(heads) == 1 else None, between)
        # All heads are launched first: the first copy to the host synchronises with the device.
        results = [head.forward(hidden, batch, packed) for head in heads]
        outputs = [self._outputs(head, result, packed)[len(shared) :] for head, result in zip(heads, results, strict=True)]
        return outputs[0] if len(outputs) == 1 else list(zip(*outputs, strict=True))

    @staticmethod
    def _outputs(head: TextHead, result: tuple[torch.Tensor, ...], packed: Many[Sequence]) -> list[Output]:
        result = head.compact(result) if isinstance(head, Compacts) else result
        return head.split(tuple(tensor.cpu().numpy() for tensor in result), packed)

    def gather(self) -> None:
        """Moves all tensors into one buffer, on the device and in host memory. Once, before the first forward."""
        self._arena = Arena([self._encoder, *self._heads.values()], self._device)
        self._arena.stow()
        self._arena.bring()
        self.bytes = max(self._arena.bytes, self.card.memory_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy of its weights in host memory; 0: there is none."""
        return 0 if self._arena is None else self._arena.host_bytes

    def drop_host_copy(self) -> None:
        """Frees the copy in host memory and keeps none from now on."""
        if self._arena is not None:
            self._arena.drop_host_copy()

    def park(self) -> ParkedModel[TextModel]:
        """Moves the model to host memory and unloads its adapters. No forward may be in progress, or start before `resume`."""
        for name in self._adapters.directories():
            self._adapters.remove(name)
        if self._arena is None:
            return ParkedModel(self, self.bytes, None)
        self._arena.stow()
        return ParkedModel(self, self._arena.bytes, self._arena)

    def probe(self) -> float:
        """Bytes of activations per token of a batch on the device, measured with a tiny forward."""
        heads = list(self._heads.values())
        with self._computing, copying(self._device):
            return activation_bytes_per_token(self._encoder, heads, tensors_of(self._encoder, *heads), self._device)

    def widened(self) -> TextModel | None:
        """The same checkpoint loaded anew, in float32 on the CPU; None if this one computes in float32. Raises as `load`."""
        if self._widen is None:
            return None
        wide = self._widen()
        wide._adapters.follow(self._adapters)
        return wide


def _refuse_ids(found: Many[NDArray[np.int32]], most: int, what: str) -> None:
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < most:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise InvalidInput(f"the model's tokenizer makes the {what} {wrong} of a text, but its encoder has {most} {what}s")


def _broken_tokenizer(problem: str) -> ModelBroken:
    return ModelBroken(f"tokenizer.json: cannot be used: {problem}")


def _cannot_tokenise(problem: str) -> InvalidInput:
    return InvalidInput(f"the model's tokenizer fails for such a text: {problem}")


def encoder_config(directory: Path, card: Card) -> Mapping[str, object]:
    """The encoder's own configuration: a file, or an object within it."""
    config = need_config(directory, str(Path(card.encoder_folder) / card.encoder_file))
    for key in card.encoder_keys:
        config = config.part(key)
    return config.values


def _shared(sequences: Many[Sequence]) -> dict[tuple[str, bytes], Sequence]:
    """The shared prefixes as sequences of their own, each once per adapter: the jobs of a split request share a prefix."""
    found = [(item.adapter, item.before) for item in sequences if item.before is not None]
    return {(adapter, before.tobytes()): Sequence(before, adapter=adapter) for adapter, before in found}

"""A text model: `prepare` (threads) -> `forward` (the device thread) -> `finish` (threads), three calls that overlap."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from libs.catalog.card import Card
from libs.catalog.detect import read_card
from libs.catalog.files import need_config
from libs.catalog.overrides import Overrides
from services.worker.models.encoder import TextEncoder, resident_bytes
from services.worker.models.heads.head import Compacts, TextHead
from services.worker.models.kinds import kind_of
from services.worker.models.kinds.kind import Built, Parts
from services.worker.models.packed import Packed
from services.worker.models.registry import build_encoder
from services.worker.models.results import Result
from services.worker.models.weights import TensorFile
from services.worker.models.work import Head, Output, Prepared, Sequence, Work

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TextModel:
    """`card`; `bytes`: of weights on the device, or more if the card sets more aside; `max_tokens`: the longest sequence."""

    def __init__(self, card: Card, encoder: TextEncoder, built: Built, device: torch.device) -> None:
        self.card = card
        modules = [head for head in built.heads.values() if isinstance(head, nn.Module)]
        self.bytes = max(encoder.bytes + sum(resident_bytes(head) for head in modules), card.memory_bytes)
        self.max_tokens = card.max_tokens
        self._encoder, self._heads, self._processor, self._device = encoder, built.heads, built.processor, device

    @classmethod
    def load(
        cls, directory: Path, model_id: str, device: torch.device, dtype: torch.dtype, said: Overrides | None = None
    ) -> TextModel:
        """Reads a checkpoint directory; the encoder computes in `dtype` unless the card has one, the head in float32.

        `said`: what the catalog says of the model. Raises ModelBroken with the file and the key or tensor at fault.
        """
        card = read_card(directory, model_id, said)
        kind = kind_of(card)
        own, rest = TensorFile.open(directory / card.encoder_folder).split(card.encoder_prefix)
        config = encoder_config(directory, card)
        encoder, state = build_encoder(
            config, own, dtype=_DTYPES.get(card.dtype, dtype), device=device, head_tables=kind.head_table(card)
        )
        card = replace(card, max_tokens=min(card.max_tokens, encoder.max_positions))
        return cls(card, encoder, kind.build(Parts(card, directory, encoder, state, rest, device)), device)

    def prepare(self, work: Work) -> Prepared:
        """Tokenises a job; thread-safe. Raises TaskNotSupported, InputTooLong or InvalidInput with the field's path in the job."""
        return self._processor.prepare(work)

    @torch.inference_mode()
    def forward(self, head: Head, sequences: Many[Sequence]) -> list[Output]:
        """Runs sequences of any number of jobs that want the same head, packed in one batch: one output each, in their order."""
        # Neighbours of equal length share a kernel call on CPU.
        order = sorted(range(len(sequences)), key=lambda i: (sequences[i].tokens, sequences[i].seen))
        rows = self._run(head.split("+"), [sequences[i] for i in order])
        outputs = dict(zip(order, rows, strict=True))
        return [outputs[i] for i in range(len(sequences))]

    def finish(self, prepared: Prepared, outputs: Many[Output]) -> Result:
        """Turns the outputs of `prepared.sequences` into the job's answer; thread-safe."""
        return self._processor.finish(prepared, outputs)

    def _run(self, names: Many[str], sequences: Many[Sequence]) -> list[Output]:
        shared = _shared(sequences)
        packed = [*shared.values(), *sequences]
        number = {key: place for place, key in enumerate(shared)}
        batch = Packed.of(
            [item.ids for item in packed],
            [item.type_ids for item in packed],
            self._device,
            seen=[item.seen for item in packed],
            before=[None if item.before is None else number[item.before.tobytes()] for item in packed],
        )
        heads = [self._heads[name] for name in names]
        hidden = self._encoder.forward(batch, rows=heads[0].rows if len(heads) == 1 else None)
        # All launches first: the first copy waits for the device.
        results = [head.forward(hidden, batch, packed) for head in heads]
        outputs = [self._outputs(head, result, packed)[len(shared) :] for head, result in zip(heads, results, strict=True)]
        return outputs[0] if len(outputs) == 1 else list(zip(*outputs, strict=True))

    @staticmethod
    def _outputs(head: TextHead, result: tuple[torch.Tensor, ...], packed: Many[Sequence]) -> list[Output]:
        result = head.compact(result) if isinstance(head, Compacts) else result
        return head.split(tuple(tensor.cpu().numpy() for tensor in result), packed)


def encoder_config(directory: Path, card: Card) -> Mapping[str, object]:
    """The encoder's own configuration: a file, or an object within it."""
    config = need_config(directory, str(Path(card.encoder_folder) / card.encoder_file))
    for key in card.encoder_keys:
        config = config.part(key)
    return config.values


def _shared(sequences: Many[Sequence]) -> dict[bytes, Sequence]:
    """What stands before sequences, each once, as sequences of their own: also the jobs of a split request share it."""
    return {item.before.tobytes(): Sequence(item.before) for item in sequences if item.before is not None}

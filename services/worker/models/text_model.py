"""A text model: `prepare` (threads) -> `forward` (the device thread) -> `finish` (threads), three calls that overlap."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from libs.catalog.card import Card
from libs.catalog.detect import entity_kind, read_card
from libs.catalog.files import need_config
from services.worker.models.encoder import TextEncoder, resident_bytes
from services.worker.models.heads.build import AnyHead, build_head, head_table
from services.worker.models.heads.looking import forward_looking
from services.worker.models.packed import Packed
from services.worker.models.processing import answers
from services.worker.models.processing.entities import find_entities
from services.worker.models.processing.late import LateFrame
from services.worker.models.processing.prepare import Preparer
from services.worker.models.processing.text import TextProcessor, load_tokenizer, special_token
from services.worker.models.registry import build_encoder
from services.worker.models.results import Entity, Extraction, ExtractResult, LabelScore, Result, ScoreResult
from services.worker.models.weights import TensorFile
from services.worker.models.work import ClassifyWork, EncodeWork, EntitiesWork, Head, Prepared, ScoreWork, Sequence, Work

Output = NDArray[np.float32]


class TextModel:
    """`card`; `bytes`: weights on the device; `max_tokens`: the longest sequence, special tokens included."""

    def __init__(self, card: Card, encoder: TextEncoder, head: AnyHead, preparer: Preparer, device: torch.device) -> None:
        self.card = card
        self.bytes = encoder.bytes + resident_bytes(head)
        self.max_tokens = card.max_tokens
        self._encoder, self._head, self._preparer, self._device = encoder, head, preparer, device

    @classmethod
    def load(cls, directory: Path, model_id: str, device: torch.device, dtype: torch.dtype) -> TextModel:
        """Reads a checkpoint directory; the encoder computes in `dtype`, the head in float32.

        Raises ModelBroken with the file and the key or tensor at fault.
        """
        card = read_card(directory, model_id)
        root = directory / card.encoder_folder
        config = need_config(root, "config.json")
        encoder, state = build_encoder(
            config.values, TensorFile.open(root), dtype=dtype, device=device, head_tables=head_table(card)
        )
        card = replace(card, max_tokens=min(card.max_tokens, encoder.max_positions))
        head = build_head(card, directory, state, encoder.hidden_size, device)
        return cls(card, encoder, head, _preparer(card, root, segments=config.number("type_vocab_size") > 1), device)

    def prepare(self, work: Work) -> Prepared:
        """Tokenises a job; thread-safe. Raises TaskNotSupported, InputTooLong or InvalidInput with the field's path in the job."""
        return self._preparer.prepare(work)

    @torch.inference_mode()
    def forward(self, head: Head, sequences: Many[Sequence]) -> list[Output]:
        """Runs sequences of any number of jobs that want the same head, packed in one batch.

        One float32 array each, in the given order: dense [dimensions], multi_vector [tokens, dimensions], logits [labels],
        token_logits [tokens, labels].
        """
        # Neighbours of equal length share a kernel call on CPU.
        order = sorted(range(len(sequences)), key=lambda i: sequences[i].tokens)
        plain = [i for i in order if not sequences[i].seen]
        looking = [i for i in order if sequences[i].seen]
        outputs: dict[int, Output] = {}
        for places in filter(None, (plain, looking)):
            rows = self._run(head, [sequences[i] for i in places])
            outputs.update(zip(places, rows, strict=True))
        return [outputs[i] for i in range(len(sequences))]

    def _run(self, head: Head, sequences: Many[Sequence]) -> list[Output]:
        """One batch; its sequences all look at the whole of themselves, or none does."""
        batch = Packed.of([item.ids for item in sequences], [item.type_ids for item in sequences], self._device)
        if sequences[0].seen:
            hidden = forward_looking(self._encoder, batch, [item.seen for item in sequences])
        else:
            hidden = self._encoder.forward(batch, rows=self._head.rows(batch))
        out: Output = self._head(hidden, batch, [item.skip for item in sequences]).cpu().numpy()
        per_token = head in ("multi_vector", "token_logits")
        return np.split(out, np.cumsum(batch.lengths)[:-1]) if per_token else list(out)

    def finish(self, prepared: Prepared, outputs: Many[Output]) -> Result:
        """Turns the outputs of `prepared.sequences` into the job's answer; thread-safe."""
        work = prepared.work
        if isinstance(work, EncodeWork):
            if prepared.head == "dense":
                return answers.dense_result(work, self.card, outputs)
            return answers.multi_vector_result(work, self.card, _kept(prepared, outputs))
        if isinstance(work, ScoreWork):
            return ScoreResult(self._scores(work, prepared, outputs))
        if isinstance(work, EntitiesWork):
            return ExtractResult([self._entities(work, prepared, outputs, i) for i in range(len(work.texts))])
        return ExtractResult([Extraction(labels=labels) for labels in self._labels(work, outputs)])

    def _scores(self, work: ScoreWork, prepared: Prepared, outputs: Many[Output]) -> Output:
        if prepared.head == "logits":
            return answers.pair_scores(np.stack(outputs), self.card, work.scale)
        if prepared.head == "dense":
            return answers.cosine_scores(outputs[0], np.stack(outputs[1:]), work.scale)
        rows = _kept(prepared, outputs)
        return answers.maxsim_scores(rows[0], rows[1:], self.card)

    def _entities(self, work: EntitiesWork, prepared: Prepared, outputs: Many[Output], number: int) -> Extraction:
        found = find_entities(work.texts[number], outputs[number], prepared.spans[number], self.card.classes, work.aggregation)
        return Extraction(entities=tuple(item for item in found if _wanted(item, work)))

    def _labels(self, work: ClassifyWork, outputs: Many[Output]) -> list[tuple[LabelScore, ...]]:
        if self.card.classes:
            return [answers.class_labels(work, self.card, output) for output in outputs]
        texts = len(work.texts)
        prompts = np.stack(outputs[texts:])
        return [answers.near_labels(work, output, prompts) for output in outputs[:texts]]


def _preparer(card: Card, root: Path, *, segments: bool) -> Preparer:
    tokenizer = load_tokenizer(root, lowercase=card.lowercase)
    text = TextProcessor(tokenizer, limit=card.max_tokens, segments=segments, unknown=special_token(root, "unk_token"))
    if card.late is None:
        return Preparer(card, text, None)
    fill = special_token(root, "mask_token") or special_token(root, "eos_token")
    return Preparer(card, text, LateFrame(card.late, text, fill))


def _kept(prepared: Prepared, outputs: Many[Output]) -> list[Output]:
    """The token vectors that count."""
    return [row if mask is None else row[mask] for row, mask in zip(outputs, prepared.kept, strict=True)]


def _wanted(entity: Entity, work: EntitiesWork) -> bool:
    enough = work.threshold is None or entity.score >= work.threshold
    return enough and (not work.labels or entity_kind(entity.label) in work.labels)

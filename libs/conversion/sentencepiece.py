"""Reads a SentencePiece model: a message of google/sentencepiece's sentencepiece_model.proto, of
which few fields matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from libs.conversion.archive import CheckpointRefused

UNIGRAM: Final = 1
BPE: Final = 2
"""Values of TrainerSpec.ModelType."""
CONTROL: Final = 3
USER_DEFINED: Final = 4
"""Values of SentencePiece.Type."""

_MAX_CHARSMAP_BYTES: Final = 4 << 20
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_MESSAGES: Final = {
    "Piece": ((1, "piece", "STRING", ""), (2, "score", "FLOAT", ""), (3, "type", "INT32", "1")),
    "Trainer": (
        (3, "model_type", "INT32", "1"), (35, "byte_fallback", "BOOL", "false"),
        (40, "unk_id", "INT32", "0"),
        (45, "unk_piece", "STRING", "<unk>"),
    ),
    "Normalizer": ((2, "precompiled_charsmap", "BYTES", ""),),
}  # fmt: skip
"""Number, name, type and default of each field that is read."""


@dataclass(frozen=True, slots=True)
class VocabularyPiece:
    """A piece of the vocabulary.

    Attributes:
        kind: NORMAL is 1; see CONTROL and USER_DEFINED.
    """

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """A model.

    Attributes:
        charsmap: Its normalization rules as `Precompiled` takes them; empty: none.
    """

    pieces: Sequence[VocabularyPiece]
    model_type: int
    unk_id: int
    unk_piece: str
    charsmap: bytes


def read_pieces(data: bytes) -> Pieces:
    """Read a SentencePiece model. Raises CheckpointRefused for bytes that are not one."""
    model = _model()()
    try:
        model.ParseFromString(data)
    except message.DecodeError as error:
        raise CheckpointRefused(f"is not a SentencePiece model: {error}") from None
    if not model.pieces:
        raise CheckpointRefused("is not a SentencePiece model: it has no pieces")
    if len(charsmap := model.normalizer.precompiled_charsmap) > _MAX_CHARSMAP_BYTES:
        raise CheckpointRefused(
            f"has normalization rules of {len(charsmap):,} bytes; at most "
            f"{_MAX_CHARSMAP_BYTES:,} are converted"
        )
    pieces = [VocabularyPiece(piece.piece, piece.score, piece.type) for piece in model.pieces]
    trainer = model.trainer
    return Pieces(pieces, trainer.model_type, trainer.unk_id, trainer.unk_piece, charsmap)


@cache
def _model() -> Any:
    """Return the message class. Fields that are not declared are skipped by protobuf."""
    file = descriptor_pb2.FileDescriptorProto(
        name="shoal/conversion/sentencepiece.proto", package="shoal.conversion", syntax="proto2"
    )
    for name, columns in _MESSAGES.items():
        made = file.message_type.add(name=name)
        for number, field, kind, default in columns:
            _add(made, number, field, getattr(_FIELD, f"TYPE_{kind}"), default)
    made = file.message_type.add(name="Model")
    for number, field, kind in (
        (1, "pieces", "Piece"),
        (2, "trainer", "Trainer"),
        (3, "normalizer", "Normalizer"),
    ):
        _add(
            made,
            number,
            field,
            _FIELD.TYPE_MESSAGE,
            "",
            f".shoal.conversion.{kind}",
            is_list=number == 1,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shoal.conversion.Model"))


def _add(
    made: Any,
    number: int,
    name: str,
    kind: int,
    default: str,
    type_name: str = "",
    *,
    is_list: bool = False,
) -> None:
    label = _FIELD.LABEL_REPEATED if is_list else _FIELD.LABEL_OPTIONAL
    field = made.field.add(name=name, number=number, type=kind, label=label)
    if default:
        field.default_value = default
    if type_name:
        field.type_name = type_name

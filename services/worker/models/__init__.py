"""Text models: `TextModel.load` a directory, then `prepare` (threads), `forward` (the device thread), `finish` (threads).

Everything below runs with nothing but torch, safetensors, tokenizers and numpy.
"""

from services.worker.models.results import (
    EncodeResult,
    Entity,
    Extraction,
    ExtractResult,
    LabelScore,
    RaggedRows,
    Result,
    ScoreResult,
    Stored,
)
from services.worker.models.text_model import Output, TextModel
from services.worker.models.work import (
    Aggregation,
    ClassifyWork,
    DataType,
    EncodeWork,
    EntitiesWork,
    Head,
    Prepared,
    Representation,
    Role,
    Scale,
    ScoreWork,
    Sequence,
    Truncation,
    Work,
)

__all__ = [
    "Aggregation",
    "ClassifyWork",
    "DataType",
    "EncodeResult",
    "EncodeWork",
    "EntitiesWork",
    "Entity",
    "ExtractResult",
    "Extraction",
    "Head",
    "LabelScore",
    "Output",
    "Prepared",
    "RaggedRows",
    "Representation",
    "Result",
    "Role",
    "Scale",
    "ScoreResult",
    "ScoreWork",
    "Sequence",
    "Stored",
    "TextModel",
    "Truncation",
    "Work",
]

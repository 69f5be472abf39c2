"""Models as a library: `load_model`, then `prepare` (threads), `forward` (the device thread), `finish` (threads).

`model.py` is the interface of a model, `work.py` its requests, `results.py` its results; `packed_model.py` implements it with
trunks (`trunk.py`: an encoder and its heads). This folder and `layers/`, the packed encoder, are shared by all kinds of models;
`text/` holds what only models of texts need. Everything depends on torch, safetensors, tokenizers and numpy only, on no service.
"""

from libs.models.model import Model, Parked
from libs.models.packed_model import PackedModel
from libs.models.results import (
    EncodeResult,
    Entity,
    Extraction,
    ExtractResult,
    LabelScore,
    RaggedRows,
    Relation,
    Result,
    ScoreResult,
    SparseRows,
    Stored,
)
from libs.models.text.loading import load_model
from libs.models.work import (
    Aggregation,
    Between,
    ClassifyWork,
    DataType,
    EncodeWork,
    EntitiesWork,
    Given,
    GoOn,
    Head,
    InputRows,
    InputSequence,
    Output,
    Prepared,
    RelationsWork,
    Representation,
    Role,
    Scale,
    ScoreWork,
    SparseRow,
    Truncation,
    Work,
    is_finite,
    nothing_between,
)

__all__ = [
    "Aggregation",
    "Between",
    "ClassifyWork",
    "DataType",
    "EncodeResult",
    "EncodeWork",
    "EntitiesWork",
    "Entity",
    "ExtractResult",
    "Extraction",
    "Given",
    "GoOn",
    "Head",
    "InputRows",
    "InputSequence",
    "LabelScore",
    "Model",
    "Output",
    "PackedModel",
    "Parked",
    "Prepared",
    "RaggedRows",
    "Relation",
    "RelationsWork",
    "Representation",
    "Result",
    "Role",
    "Scale",
    "ScoreResult",
    "ScoreWork",
    "SparseRow",
    "SparseRows",
    "Stored",
    "Truncation",
    "Work",
    "is_finite",
    "load_model",
    "nothing_between",
]

"""Models as a library: `load_model`, then `prepare` (threads), `forward` (the device thread) and
`finish` (threads).

`README.md` draws its parts. `interface/` has the protocol of a model, its requests and its results;
`runtime/` implements it with backbones (an encoder and its heads) over `layers/`; `text/` is for
text models and `images/` for image models. The package depends on torch, safetensors, tokenizers
and numpy, and `images/` on Pillow too; nothing depends on a service.
"""

from libs.models.interface.model import Model, Parked
from libs.models.interface.results import (
    EncodeResult,
    ExtractResult,
    RaggedRows,
    Result,
    ScoreResult,
    SparseRows,
    StoredArray,
)
from libs.models.interface.sequences import (
    GENERATE,
    Forwarded,
    GeneratedIds,
    Head,
    InputRows,
    InputSequence,
    Output,
    Prepared,
    SparseRow,
    Unfinished,
    YieldPoint,
    collect_outputs,
    is_finite,
    never_yield,
)
from libs.models.interface.work import (
    Aggregation,
    CancelCheck,
    ClassifyWork,
    DataType,
    EncodeWork,
    EntitiesWork,
    Given,
    Part,
    Parts,
    RegionsWork,
    RelationsWork,
    Representation,
    Role,
    Scale,
    ScoreWork,
    StructureWork,
    Truncation,
    Work,
    with_truncation,
)
from libs.models.loading import load_model, load_served_model
from libs.models.runtime.packed_model import PackedModel

__all__ = [
    "GENERATE",
    "Aggregation",
    "CancelCheck",
    "ClassifyWork",
    "DataType",
    "EncodeResult",
    "EncodeWork",
    "EntitiesWork",
    "ExtractResult",
    "Forwarded",
    "GeneratedIds",
    "Given",
    "Head",
    "InputRows",
    "InputSequence",
    "Model",
    "Output",
    "PackedModel",
    "Parked",
    "Part",
    "Parts",
    "Prepared",
    "RaggedRows",
    "RegionsWork",
    "RelationsWork",
    "Representation",
    "Result",
    "Role",
    "Scale",
    "ScoreResult",
    "ScoreWork",
    "SparseRow",
    "SparseRows",
    "StoredArray",
    "StructureWork",
    "Truncation",
    "Unfinished",
    "Work",
    "YieldPoint",
    "collect_outputs",
    "is_finite",
    "load_model",
    "load_served_model",
    "never_yield",
    "with_truncation",
]

"""What is known of a model from its files alone: the Card that workers report and that a PackedModel is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Task = Literal["encode", "score", "entities", "classify", "relations"]
Representation = Literal["dense", "sparse", "multi_vector"]
Kind = Literal[
    "dense", "sparse", "multi_vector", "hybrid", "sequence_labels", "token_labels", "gliner", "glirel", "gliclass", "yes_no"
]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["identity", "sigmoid", "softmax", "tanh", "relu", "gelu", "silu"]
SparsePooling = Literal["max", "sum"]
SpladeActivation = Literal["log1p_relu", "log1p_relu_twice"]
Problem = Literal["single_label", "multi_label", "regression"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Scoring = Literal["", "classifier", "cosine", "maxsim", "mean_maxsim", "dot", "sparse_cosine", "hybrid", "yes_no"]

MOST_LABELS: Final = 10_000
MOST_LABEL_CHARACTERS: Final = 1 << 19
"""Of all of them. A card with all of them is in each heartbeat."""
MOST_PROMPTS: Final = 1_000
MOST_PROMPT_CHARACTERS: Final = 1 << 16
"""Of all of them, their names included, which are in each heartbeat."""


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer of modules.json: its folder in the checkpoint, and what is done to its answer.

    An empty folder is the `linear.weight` that Stanford's ColBERT keeps beside the encoder's tensors.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation
    residual: bool = False


@dataclass(frozen=True, slots=True)
class StaticQueries:
    """Queries without a forward: each token of a query has a fixed weight.

    `folder`: where the tokenizer lies. `file`: the weights, safetensors with the one tensor `weight` or a JSON object by token.
    `default`: also what is encoded in no role.
    """

    folder: str
    file: str
    default: bool = False


@dataclass(frozen=True, slots=True)
class Sparse:
    """A weight for each of `columns` vocabulary entries, which may be more than the tokenizer has.

    `pooling` and `activation`: how SPLADE turns the masked language model's logits into weights. `strongest`: how many weights of a
    text are kept, 0: all.
    """

    columns: int
    pooling: SparsePooling = "max"
    activation: SpladeActivation = "log1p_relu"
    strongest: int = 0
    queries: StaticQueries | None = None


@dataclass(frozen=True, slots=True)
class Expansion:
    """How a late-interaction query is lengthened: up to `length` tokens with `token` (empty: the mask token).

    `fixed`: longer queries are cut to `length`. `attend`: the other tokens see the added ones.
    """

    length: int
    attend: bool
    fixed: bool
    token: str = ""


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """What a model that gives one vector a token does to queries and documents. Lengths in tokens; 0: the model's own limit."""

    query_tokens: int = 0
    document_tokens: int = 0
    expansion: Expansion | None = None
    skip_words: tuple[str, ...] = ()  # tokens whose vectors are dropped
    skip_roles: tuple[str, ...] = ("document",)  # where they are dropped
    markers: tuple[str, ...] = ()  # beginnings of prompts that must stay one token
    leading: int = 0  # tokens at the beginning whose vectors are dropped


@dataclass(frozen=True, slots=True)
class Card:
    """A model as its checkpoint describes it. `max_tokens` counts special tokens; dimensions are 0 for vectors it lacks."""

    model: str
    revision: str  # the one asked for, else a digest of configuration and tensor headers
    family: str  # config.json's model_type, such as "bert"
    kind: Kind
    tasks: tuple[Task, ...]
    representations: tuple[Representation, ...]
    max_tokens: int
    dimensions: int = 0
    multi_vector_dimensions: int = 0
    labels: tuple[str, ...] = ()  # of a model with a fixed label set; entity labels without B- and I-
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""  # a key of prompts, or empty
    encoder_folder: str = ""  # where config.json, the tokenizer and the encoder's tensors lie, from the checkpoint's root
    encoder_file: str = "config.json"  # there: what describes the encoder
    encoder_keys: tuple[str, ...] = ()  # within that file: the keys that lead to it
    encoder_prefix: str = ""  # of the encoder's tensors, before the family's own; all others are the head's
    lowercase: bool = False  # sentence-transformers' do_lower_case, on top of the tokenizer's own normaliser
    pooling: tuple[PoolingMode, ...] = ()  # concatenated in this order
    pool_prompt: bool = True  # False: the prompt's tokens are left out of pooling
    modules: tuple[DenseModule, ...] = ()
    normalize: bool = False
    late: LateInteraction | None = None
    sparse: Sparse | None = None
    classes: tuple[str, ...] = ()  # config.json's id2label, one for each logit
    problem: Problem = "single_label"
    scoring: Scoring = ""
    positive: int = 0  # the logit that says "relevant" or "entailed"
    contradiction: int | None = None  # the logit that says so, of a model that classifies by hypotheses
    score_activation: Activation = "identity"  # of a classifier's own scale
    answers: tuple[int | str, ...] = ()  # of a reranker: the token that says yes and, for most, the one that says no; id or text
    tied: bool = False  # its language model's head is the token table
    template: str = ""  # Jinja, by which a query and a document become one text
    template_values: Mapping[str, object] = field(default_factory=dict)  # that the template sees besides messages
    message_parts: bool = False  # the template takes a message's content as a list of typed parts, not as a text
    given_entities: bool = False  # relations are looked for between entities that the request names
    notes: tuple[str, ...] = ()  # what the checkpoint could do and does not here, and what to do about it
    # What no file of a checkpoint says, only the catalog.
    dtype: Dtype = "auto"  # of the encoder; auto: as the worker is set
    pools: tuple[str, ...] = ()  # where it should run, best first; empty: anywhere
    pinned: bool = False  # never evicted once loaded
    memory_bytes: int = 0  # set aside for it if its weights take less

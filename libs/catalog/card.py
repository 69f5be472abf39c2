"""What is known of a model from its files alone: the Card that workers report and that a TextModel is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Task = Literal["encode", "score", "entities", "classify", "relations"]
Representation = Literal["dense", "sparse", "multi_vector"]
Kind = Literal["dense", "multi_vector", "sequence_labels", "token_labels"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["identity", "sigmoid", "softmax", "tanh", "relu", "gelu", "silu"]
Problem = Literal["single_label", "multi_label", "regression"]
Scoring = Literal["", "classifier", "cosine", "maxsim", "mean_maxsim"]


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
    classes: tuple[str, ...] = ()  # config.json's id2label, one for each logit
    problem: Problem = "single_label"
    scoring: Scoring = ""
    positive: int = 0  # the logit that says "relevant" or "entailed"
    score_activation: Activation = "identity"  # of a classifier's own scale

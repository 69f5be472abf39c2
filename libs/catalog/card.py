"""The Card: a model's description from its files, which workers report and from which a PackedModel
is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Task = Literal[
    "encode", "score", "entities", "classify", "relations", "regions", "text", "structure"
]
Representation = Literal["dense", "sparse", "multi_vector"]
Input = Literal["text", "image"]
PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
Activation = Literal["identity", "sigmoid", "softmax", "tanh", "relu", "gelu", "silu"]
SparsePooling = Literal["max", "sum"]
SpladeActivation = Literal["log1p_relu", "log1p_relu_twice"]
Problem = Literal["single_label", "multi_label", "regression"]
Truncation = Literal["end", "start"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Scoring = Literal[
    "",
    "classifier",
    "cosine",
    "maxsim",
    "mean_maxsim",
    "dot",
    "euclidean",
    "manhattan",
    "sparse_cosine",
    "hybrid",
    "yes_no",
]

MAX_LABELS: Final = 10_000
MAX_LABEL_CHARACTERS: Final = 1 << 19
"""Maximum length of all labels of a model together: each heartbeat carries the card with all its
labels.
"""
MAX_PROMPTS: Final = 1_000
MAX_PROMPT_CHARACTERS: Final = 1 << 16
"""Maximum length of all prompts of a model together, with their names, which each heartbeat
carries.
"""


DOCUMENT_PROMPTS: Final = ("document", "passage", "corpus")
"""Names that checkpoints give to a document's prompt. The first of them that exists counts, as in
sentence-transformers.
"""


def kept_prompts(prompts: Mapping[str, str]) -> dict[str, str]:
    """Return the prompts that change an input, or that keep another one from being used.

    An empty prompt is the same as none, except for one that precedes another name of a document's
    prompt: `document: ""` next to `passage: "passage: "` means that documents have no prompt.
    """
    documents = [name for name in DOCUMENT_PROMPTS if name in prompts]
    shadows = documents[0] if documents and any(prompts[name] for name in documents) else None
    return {name: text for name, text in prompts.items() if text or name == shadows}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer of modules.json and the activation after it.

    An empty folder means the `linear.weight` that Stanford's ColBERT keeps among the encoder's
    tensors.

    Attributes:
        folder: The folder of its files, relative to the checkpoint's root.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: Activation
    residual: bool = False


@dataclass(frozen=True, slots=True)
class StaticQueries:
    """Sparse query vectors without a forward pass: each vocabulary token has a fixed weight.

    Attributes:
        folder: The folder of the tokenizer.
        file: The file of the weights: safetensors with the tensor `weight`, a JSON object by token,
            or the checkpoint's tensors from which they are computed (V-SPLADE).
        default: Whether inputs without a role are encoded as queries.
    """

    folder: str
    file: str
    default: bool = False


@dataclass(frozen=True, slots=True)
class SparseOutput:
    """Sparse vectors: a weight for each of `columns` vocabulary entries, which may be more than the
    tokenizer has.

    Attributes:
        pooling, activation: How SPLADE turns the masked language model's logits into weights.
        strongest: Number of largest weights of a text to keep; 0: all.
        queries: Weights for queries that need no forward pass; None if queries need one.
    """

    columns: int
    pooling: SparsePooling = "max"
    activation: SpladeActivation = "log1p_relu"
    strongest: int = 0
    queries: StaticQueries | None = None


@dataclass(frozen=True, slots=True)
class Expansion:
    """Query expansion of late interaction: a query is filled up to `length` tokens with `token`
    (empty: the mask token).

    Attributes:
        fixed: Whether longer queries are truncated to `length`.
        attend: Whether the query's tokens attend to the added ones.
    """

    length: int
    attend: bool
    fixed: bool
    token: str = ""


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """The encoding of queries and documents with one vector per token. Lengths in tokens; 0: the
    model's limit.
    """

    query_tokens: int = 0
    document_tokens: int = 0
    expansion: Expansion | None = None
    skip_words: tuple[str, ...] = ()  # the vectors of these tokens are dropped
    skip_roles: tuple[str, ...] = ("document",)  # the roles in which they are dropped
    markers: tuple[str, ...] = ()  # beginnings of prompts that must be tokenised as one token
    leading: int = 0  # number of leading vectors to drop


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The conversion of images to tokens; routers price images by it. Lengths in pixels.

    Attributes:
        height, width: The size to which every image is resized; 0: it depends on the image's size.
        short_side: The short side to which images are resized with their proportions; 0: not used.
        patch: The side of the square that becomes one token.
        extra_tokens: Tokens of an image in addition to its patches.
        max_tokens: Maximum tokens of one image.
        long_side: Maximum long side, for which the short one is reduced; 0: not limited.
        maps: Feature maps of an image, each with half the positions a side of the previous one,
            rounded up; 0: one map, rounded down.
        text_tokens: Tokens of every text, of a model that pads texts; 0: texts are not padded.
    """

    height: int
    width: int
    short_side: int
    patch: int
    extra_tokens: int
    max_tokens: int
    long_side: int = 0
    maps: int = 0
    text_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """A model as its checkpoint and the catalog describe it.

    `max_tokens` includes special tokens, and is that of texts where the model takes these and
    images; the dimensions of a representation that the model lacks are 0.
    """

    model: str
    revision: (
        str  # as the id or the folder names it, else a digest of configuration and tensor headers
    )
    family: str  # config.json's model_type, such as "bert"
    kind: str  # what follows the encoder: a name of libs/kinds/registry.py
    tasks: tuple[Task, ...]
    representations: tuple[Representation, ...]
    max_tokens: int
    dimensions: int = 0
    multi_vector_dimensions: int = 0
    labels: tuple[
        str, ...
    ] = ()  # of a model with a fixed label set; entity labels without B- and I-
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""  # a key of prompts, or empty
    own_adapters: tuple[
        str, ...
    ] = ()  # LoRA adapters within the checkpoint, one for each of its tasks, by name
    role_adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # those of roles; an empty role is none
    encoder_folder: str = (
        ""  # of config.json, the tokenizer and the encoder's tensors, from the checkpoint's root
    )
    encoder_file: str = "config.json"  # the encoder's configuration, in that folder
    encoder_keys: tuple[str, ...] = ()  # the path of keys to it within that file
    # of the encoder's tensors, before the family's own prefix; all other tensors are the head's
    encoder_prefix: str = ""
    truncation: Truncation = (
        "end"  # what long texts lose unless a request says: tokenizer_config.json's truncation_side
    )
    lowercase: bool = (
        False  # sentence-transformers' do_lower_case, on top of the tokenizer's own normaliser
    )
    pooling: tuple[PoolingMode, ...] = ()  # concatenated in this order
    pool_prompt: bool = True  # False: pooling excludes the prompt's tokens
    modules: tuple[DenseModule, ...] = ()
    normalize: bool = False
    queries: Card | None = (
        None  # of the encoder for queries, where it is another one than that for documents
    )
    query_default: bool = (
        False  # Texts without a role are queries, where queries have a separate encoder.
    )
    late: LateInteraction | None = None
    sparse: SparseOutput | None = None
    classes: tuple[str, ...] = ()  # the name of each logit: config.json's id2label
    problem: Problem = "single_label"
    scoring: Scoring = ""
    positive: int = 0  # index of the logit for "relevant" or "entailment"
    contradiction: int | None = (
        None  # index of the logit for "contradiction", of a model that classifies by entailment
    )
    score_activation: Activation = (
        "identity"  # applied to a logit where scores on the model's own scale are wanted
    )
    answers: tuple[
        int | str, ...
    ] = ()  # of a yes/no reranker: the tokens for yes and, for most, no; id or text
    tied: bool = False  # the language model's head shares its weights with the token table
    template: str = ""  # chat template in Jinja that renders a query and a document as one text
    template_values: Mapping[str, object] = field(
        default_factory=dict
    )  # variables of the template in addition to the messages
    message_parts: bool = (
        False  # the template expects a message's content as a list of typed parts, not as a text
    )
    inputs: tuple[Input, ...] = ("text",)  # what parts of items it takes
    images: ImageSize | None = None  # known once the model was loaded
    given_entities: bool = False  # relations are extracted between entities that the request gives
    created_unix_seconds: int = 0  # when the newest of its files was written; 0: unknown
    notes: tuple[
        str, ...
    ] = ()  # parts of the checkpoint that are not served, and how to change that
    # Set by the catalog only; no file of a checkpoint has these.
    dtype: Dtype = "auto"  # of the encoder; auto: the worker's setting; int8: on CPUs
    pools: tuple[str, ...] = ()  # pools that should run it, best first; empty: any
    pinned: bool = False  # never evicted once loaded
    memory_bytes: int = 0  # reserved for it if its weights take less

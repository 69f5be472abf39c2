"""Logits of a text, a pair or a token, by the classification head of the checkpoint's architecture.

Most architectures have one dense layer before the classifier, followed by LayerNorm where `norm`
names one (transformers' *ForSequenceClassification). They differ in pooling, names and activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from libs.catalog.card import Activation
from libs.errors import ModelBroken
from libs.kernels.pooling.pooled import mean
from libs.kernels.rows.norms import layer_norm
from libs.models.interface.head import Array, split_rows
from libs.models.interface.packed import Packed, Rows
from libs.models.interface.sequences import InputSequence, Output
from libs.models.layers import activations
from libs.models.layers.spec import Config
from libs.models.text.heads import linear
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.weights import HeadRule

Pooling = Literal["first", "last", "mean", "late"]
"""The classified state. "late" classifies every token and averages the logits."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of the layers in the checkpoint (stems after the family's prefix; empty if absent),
    activation and pooling.
    """

    classifier: str
    dense: str = ""
    function: Activation = "identity"
    """The activation of `dense`, unless `function_key` of config.json names another."""
    function_key: str = ""
    norm: str = ""
    eps_key: str = ""
    """The key of LayerNorm's epsilon."""
    pooling: Pooling = "first"
    """The classified state, unless `pooling_key` names another."""
    pooling_key: str = ""
    divisor_key: str = ""
    """The key of the number that divides logits."""


_BERT = LayerNames("classifier", dense="pooler.dense", function="tanh")
_ROBERTA = LayerNames("classifier.out_proj", dense="classifier.dense", function="tanh")
_DEBERTA = LayerNames(
    "classifier", dense="pooler.dense", function="gelu", function_key="pooler_hidden_act"
)
_SEQ2SEQ = LayerNames(
    "classification_head.out_proj",
    dense="classification_head.dense",
    function="tanh",
    pooling="last",
)
LANGUAGE_MODEL = LayerNames("score", pooling="last")
"""Decoders classify their last token that is not `pad_token_id`, as transformers does
(`PaddingTrimmer`).
"""

_NEMOTRON = LayerNames("score", pooling="mean", pooling_key="pooling", divisor_key="temperature")
"""NVIDIA's bidirectional Llama (llama-nemotron-rerank), classified as in its own code."""

LAYOUTS: dict[str, LayerNames] = {
    "albert": LayerNames("classifier", dense="pooler", function="tanh"),
    "bart": _SEQ2SEQ,
    "bert": _BERT,
    "distilbert": LayerNames("classifier", dense="pre_classifier", function="relu"),
    "electra": LayerNames("classifier.out_proj", dense="classifier.dense", function="gelu"),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "longformer": _ROBERTA,
    "modernbert": LayerNames(
        "classifier",
        dense="head.dense",
        function_key="classifier_activation",
        norm="head.norm",
        eps_key="norm_eps",
        pooling_key="classifier_pooling",
    ),
    "eurobert": LayerNames(
        "classifier",
        dense="dense",
        function="gelu",
        pooling_key="classifier_pooling",
        pooling="late",
    ),
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "nomic_bert": _BERT,
    "new": _BERT,
    "gte": _BERT,
    "jina_embeddings_v3": _ROBERTA,
    "gemma": LANGUAGE_MODEL,
    "gemma2": LANGUAGE_MODEL,
    "gemma3_text": LANGUAGE_MODEL,
    "llama": LANGUAGE_MODEL,
    "llama_bidirec": _NEMOTRON,
    "mistral": LANGUAGE_MODEL,
    "phi3": LANGUAGE_MODEL,
    "qwen2": LANGUAGE_MODEL,
    "qwen3": LANGUAGE_MODEL,
    "t5": _SEQ2SEQ,
    "mt5": _SEQ2SEQ,
}
# Families with a token classifier like their sequence classifier; in others it is one layer
_OF_TOKENS = ("modernbert",)
# Families with a token classifier of one layer with this name
_SCORE_OF_TOKENS = ("openai_privacy_filter",)


class Classifier(nn.Module):
    """Map states [rows, hidden] to logits [rows, labels] float32."""

    def __init__(
        self,
        layout: LayerNames,
        config: Config,
        state: Mapping[str, Tensor],
        hidden: int,
        labels: int,
        file: str,
    ) -> None:
        """Build the classifier. Raises ModelBroken for a tensor that is missing or has another
        shape."""
        super().__init__()
        check_shape(state, "classifier.weight", (labels, hidden), file)
        self.dense: HeadLinear | None = None
        self.norm_weight: Tensor | None = None
        self.norm_bias: Tensor | None = None
        if layout.dense:
            check_shape(state, "dense.weight", (hidden, hidden), file)
            self.dense = HeadLinear(state, "dense", "identity")
        if layout.norm:
            check_shape(state, "norm.weight", (hidden,), file)
            self.norm_weight = nn.Parameter(state["norm.weight"], requires_grad=False)
            self.norm_bias = (
                nn.Parameter(state["norm.bias"], requires_grad=False)
                if "norm.bias" in state
                else None
            )
        self.out = HeadLinear(state, "classifier", "identity")
        self._eps = config.number(layout.eps_key, 1e-5) if layout.eps_key else 0.0
        self._function = _function(layout, config)
        self._divisor = config.positive(layout.divisor_key, 1.0) if layout.divisor_key else 1.0

    def forward(self, states: Tensor) -> Tensor:
        x = states.float()
        if self.dense is not None:
            x = self._function(self.dense.forward(x))
        if self.norm_weight is not None:
            x = layer_norm(x, self.norm_weight, self.norm_bias, self._eps)
        return self.out.forward(x) / self._divisor


class LabelsHead(nn.Module):
    """Map hidden states to [sequences, labels] float32."""

    def __init__(self, classifier: Classifier, pooling: Pooling) -> None:
        super().__init__()
        self.classifier = classifier
        self._pooling = pooling

    @property
    def rows(self) -> Rows | None:
        return self._pooling if self._pooling in ("first", "last") else None

    def forward(
        self, hidden: Tensor, batch: Packed, sequences: Sequence[InputSequence]
    ) -> tuple[Tensor, ...]:
        if self._pooling == "late":
            return (mean(self.classifier.forward(hidden), batch.cu_seqlens),)
        states = mean(hidden, batch.cu_seqlens) if self._pooling == "mean" else hidden
        return (self.classifier.forward(states),)

    def split(self, arrays: tuple[Array, ...], sequences: Sequence[InputSequence]) -> list[Output]:
        return split_rows(arrays[0])


def text_layout(family: str) -> LayerNames:
    """Return a family's layout. Raises ModelBroken for a family with an unknown classifier of
    texts."""
    if family not in LAYOUTS:
        raise ModelBroken(
            "config.json: `architectures`: sequence classification is not supported for the "
            f"model_type {family!r}"
        )
    return LAYOUTS[family]


def token_layout(family: str) -> LayerNames:
    if family in _SCORE_OF_TOKENS or LAYOUTS.get(family) in (LANGUAGE_MODEL, _NEMOTRON):
        return LayerNames("score")
    return LAYOUTS[family] if family in _OF_TOKENS else LayerNames("classifier")


def tensor_table(layout: LayerNames) -> dict[str, HeadRule]:
    """Return the head's table of tensor names."""
    stems = {"classifier": layout.classifier, "dense": layout.dense, "norm": layout.norm}
    return {stem: ours for ours, stem in stems.items() if stem}


def select_pooling(layout: LayerNames, config: Config) -> Pooling:
    """Return the pooling that config.json names, otherwise the layout's. Raises ModelBroken for an
    unknown value.
    """
    if not layout.pooling_key:
        return layout.pooling
    if not config.has(layout.pooling_key):
        return layout.pooling
    names: dict[str, Pooling] = {
        "cls": "first",
        "bos": "first",
        "mean": "mean",
        "avg": "mean",
        "last": "last",
        "late": "late",
    }
    name = config.text(layout.pooling_key)
    if name not in names:
        raise config.unsupported(layout.pooling_key, f"supported are {', '.join(names)}")
    return names[name]


def _function(layout: LayerNames, config: Config) -> Callable[[Tensor], Tensor]:
    if layout.function_key:
        return activations.FUNCTIONS[config.activation(layout.function_key)]
    return linear.FUNCTIONS[layout.function]

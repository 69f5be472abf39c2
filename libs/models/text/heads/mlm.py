"""The masked language model's head. SPLADE pools the decoder's logits to a text's weights.

It has a linear layer, its activation and LayerNorm, then the decoder, which most models tie to
their token embeddings (transformers' *ForMaskedLM; each architecture has its own names for the same
three).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from libs.errors import ModelBroken
from libs.kernels.rows.norms import layer_norm
from libs.models.layers.activations import FUNCTIONS
from libs.models.layers.spec import Config
from libs.models.text.heads.linear import HeadLinear, check_shape
from libs.models.weights import HeadRule, Maybe


@dataclass(frozen=True, slots=True)
class MlmLayout:
    """The names of the head's layers: stems after the family's prefix."""

    dense: str
    norm: str
    decoder: str
    bias: str = ""
    """The stem of a decoder bias stored outside the decoder; empty if there is none."""
    function: str = ""
    """config.json's key of the activation; empty for exact GELU."""
    eps: str = "layer_norm_eps"
    """config.json's key of LayerNorm's epsilon."""
    default_eps: float = 1e-12
    biased: str = ""
    """config.json's key that says whether the decoder has a bias."""


_ROBERTA = MlmLayout("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", bias="lm_head.bias")
_GTE = replace(_ROBERTA, norm="lm_head.norm", bias="", function="hidden_act")
MLM_LAYOUTS: dict[str, MlmLayout] = {
    "albert": MlmLayout(
        "predictions.dense",
        "predictions.LayerNorm",
        "predictions.decoder",
        bias="predictions.bias",
        function="hidden_act",
    ),
    "bert": MlmLayout(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        bias="cls.predictions.bias",
        function="hidden_act",
    ),
    "electra": MlmLayout(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
    ),
    "distilbert": MlmLayout(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", function="activation", eps=""
    ),
    "roberta": _ROBERTA,
    "roberta-prelayernorm": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": _ROBERTA,
    "longformer": _ROBERTA,
    "modernbert": MlmLayout(
        "head.dense",
        "head.norm",
        "decoder",
        function="classifier_activation",
        eps="norm_eps",
        default_eps=1e-5,
        biased="decoder_bias",
    ),
    "jina_embeddings_v3": _ROBERTA,
    "new": _GTE,
    "gte": _GTE,
}


def mlm_table(family: str) -> dict[str, HeadRule]:
    """Return the head's table of tensor names. Raises ModelBroken for a family with an unknown
    head."""
    layout = _layout(family)
    table: dict[str, HeadRule] = {
        layout.dense: "dense",
        layout.norm: "norm",
        layout.decoder: Maybe("decoder"),
    }
    return table | ({layout.bias: Maybe("bias")} if layout.bias else {})


class MlmTransform(nn.Module):
    """Map token states [tokens, hidden] to the decoder's input, [tokens, embedding size]
    float32."""

    def __init__(
        self,
        family: str,
        config: Config,
        state: Mapping[str, Tensor],
        hidden: int,
        size: int,
        file: str,
    ) -> None:
        super().__init__()
        layout = _layout(family)
        check_shape(state, "dense.weight", (size, hidden), file)
        check_shape(state, "norm.weight", (size,), file)
        self.dense = HeadLinear(state, "dense", "identity")
        self.weight = nn.Parameter(state["norm.weight"], requires_grad=False)
        self.bias = (
            nn.Parameter(state["norm.bias"], requires_grad=False) if "norm.bias" in state else None
        )
        self._eps = (
            config.number(layout.eps, layout.default_eps) if layout.eps else layout.default_eps
        )
        self._function = FUNCTIONS[
            config.activation(layout.function) if layout.function else "gelu"
        ]

    def forward(self, hidden: Tensor) -> Tensor:
        return layer_norm(
            self._function(self.dense.forward(hidden.float())), self.weight, self.bias, self._eps
        )


def decoder_weight(state: Mapping[str, Tensor], config: Config, table: Tensor, file: str) -> Tensor:
    """Return [vocabulary, embedding size] in the table's type; the table itself for a tied decoder.

    As in transformers 5, a stored decoder that differs from the table is not tied, whatever
    config.json says.
    """
    if "decoder.weight" not in state:
        if not config.flag("tie_word_embeddings", True):
            raise ModelBroken(
                f"{file}: the decoder's weight is missing, and `tie_word_embeddings` in "
                "config.json is false"
            )
        return table
    check_shape(state, "decoder.weight", tuple(table.shape), file)
    own = state["decoder.weight"].to(table.dtype)
    return table if torch.equal(own, table) else own


def decoder_bias(
    family: str, state: Mapping[str, Tensor], config: Config, columns: int, file: str
) -> Tensor | None:
    """Return [vocabulary] float32, or None if the architecture has no bias."""
    layout = _layout(family)
    name = next((name for name in ("decoder.bias", "bias") if name in state), "")
    if not name and layout.biased and not config.flag(layout.biased, True):
        return None
    check_shape(state, name or "decoder.bias", (columns,), file)
    return state[name]


def _layout(family: str) -> MlmLayout:
    if family not in MLM_LAYOUTS:
        raise ModelBroken(
            "config.json: `architectures`: masked language models are not supported for the "
            f"model_type {family!r}"
        )
    return MLM_LAYOUTS[family]

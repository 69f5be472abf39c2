"""Families that exist only as code on the hub: their config.json and tensors as published, and a
plain forward for comparison.

The forwards compute one sequence at a time from the papers' formulas, without any of our code: Jina
BERT v2 (arXiv 2310.19923, slopes as in ALiBi's reference code), its variant with normalised queries
and keys, Nomic's mixture of experts (arXiv 2502.07972), and flash-attn's BERT layout of
XLM-RoBERTa.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
Values = dict[str, object]
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class HubFamily:
    """`forward(state, config, ids, types)`: hidden states [tokens, hidden] of one sequence; ids and
    types int64 [tokens].
    """

    config: Callable[[int, int, int], Values]  # of hidden, heads, layers
    shapes: Callable[[Values], Shapes]
    forward: Callable[[State, Values, Tensor, Tensor], Tensor]
    prefix: str = ""


def write_hub(
    family: HubFamily,
    directory: Path,
    config: Values,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> State:
    """A checkpoint with random weights (without a tokenizer), and the weights under names without
    prefix.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(*shape, generator=generator) * 0.2
        for name, shape in family.shapes(config).items()
    }
    for name, tensor in state.items():
        if tensor.dim() == 1 and name.endswith(".weight"):
            tensor += 1.0
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {family.prefix + name: tensor.to(dtype) for name, tensor in state.items()},
        directory / "model.safetensors",
    )
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def _number(config: Values, key: str) -> int:
    return cast(int, config[key])


def _linear(x: Tensor, state: State, stem: str) -> Tensor:
    return F.linear(x, state[f"{stem}.weight"], state.get(f"{stem}.bias"))


def _norm(x: Tensor, state: State, stem: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[f"{stem}.weight"], state[f"{stem}.bias"], eps)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attend: [tokens, heads, size] each to [tokens, heads * size]."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def _rotated(x: Tensor, base: float, turned: int) -> Tensor:
    """Rotate elements i and i + turned / 2 of each head as a complex number by position *
    base^(-2i / turned).
    """
    half = turned // 2
    frequencies = base ** (-torch.arange(half).double() * 2 / turned)
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    numbers = (
        torch.complex(x[..., :half].double(), x[..., half:turned].double())
        * torch.polar(torch.ones(()).double(), angles)[:, None]
    )
    return torch.cat((numbers.real, numbers.imag, x[..., turned:].double()), -1).to(x.dtype)


def _pair(stem: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.weight": (outputs, inputs), f"{stem}.bias": (outputs,)}


def _norms(*stems: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.{part}": (size,) for stem in stems for part in ("weight", "bias")}


# Jina BERT v2


def _jina_config(hidden: int, heads: int, layers: int) -> Values:
    return {
        "architectures": ["JinaBertModel"],
        "auto_map": {
            "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig"
        },
        "model_type": "bert",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 128,
        "model_max_length": 128,
        "type_vocab_size": 2,
        "vocab_size": 320,
    }


def _jina_code_config(hidden: int, heads: int, layers: int) -> Values:
    code = "jinaai/jina-bert-v2-qk-post-norm--configuration_bert.JinaBertConfig"
    return _jina_config(hidden, heads, layers) | {"auto_map": {"AutoConfig": code}}


def _jina_common(config: Values) -> dict[str, tuple[int, ...]]:
    hidden, vocabulary = _number(config, "hidden_size"), _number(config, "vocab_size")
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocabulary, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
    }
    shapes |= _norms("embeddings.LayerNorm", size=hidden) | _pair("pooler.dense", hidden, hidden)
    for i in range(_number(config, "num_hidden_layers")):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _pair(f"encoder.layer.{i}.attention.{name}", hidden, hidden)
        shapes |= _norms(f"encoder.layer.{i}.attention.output.LayerNorm", size=hidden)
    return shapes


def _jina_shapes(config: Values) -> Shapes:
    shapes, hidden, ffn = (
        _jina_common(config),
        _number(config, "hidden_size"),
        _number(config, "intermediate_size"),
    )
    for i in range(_number(config, "num_hidden_layers")):
        mlp = f"encoder.layer.{i}.mlp"
        shapes |= {f"{mlp}.gated_layers.weight": (2 * ffn, hidden)} | _pair(
            f"{mlp}.wo", hidden, ffn
        )
        shapes |= _norms(f"{mlp}.layernorm", size=hidden)
    return shapes


def _jina_code_shapes(config: Values) -> Shapes:
    shapes, hidden, ffn = (
        _jina_common(config),
        _number(config, "hidden_size"),
        _number(config, "intermediate_size"),
    )
    for i in range(_number(config, "num_hidden_layers")):
        layer = f"encoder.layer.{i}"
        shapes |= {f"{layer}.mlp.up_gated_layer.weight": (2 * ffn, hidden)} | _pair(
            f"{layer}.mlp.down_layer", hidden, ffn
        )
        shapes |= _norms(f"{layer}.layer_norm_1", f"{layer}.layer_norm_2", size=hidden)
        shapes |= _norms(
            f"{layer}.attention.self.layer_norm_q",
            f"{layer}.attention.self.layer_norm_k",
            size=hidden,
        )
    return shapes


def _slopes(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        start = 2.0 ** -(2.0 ** -(math.log2(heads) - 3))
        return [start ** (number + 1) for number in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return _slopes(below) + _slopes(2 * below)[0::2][: heads - below]


def _alibi(tokens: int, heads: int, dtype: torch.dtype) -> Tensor:
    places = torch.arange(tokens)
    return (-torch.tensor(_slopes(heads))[:, None, None] * (places - places[:, None]).abs()).to(
        dtype
    )


def _jina_embedded(state: State, ids: Tensor, types: Tensor) -> Tensor:
    x = (
        state["embeddings.word_embeddings.weight"][ids]
        + state["embeddings.token_type_embeddings.weight"][types]
    )
    return _norm(x, state, "embeddings.LayerNorm", 1e-12)


def _jina(state: State, config: Values, ids: Tensor, types: Tensor) -> Tensor:
    heads = _number(config, "num_attention_heads")
    x = _jina_embedded(state, ids, types)
    activation = F.relu if config["feed_forward_type"] == "reglu" else F.gelu
    for i in range(_number(config, "num_hidden_layers")):
        attention, mlp = f"encoder.layer.{i}.attention", f"encoder.layer.{i}.mlp"
        q, k, v = (
            _linear(x, state, f"{attention}.self.{n}").unflatten(-1, (heads, -1))
            for n in ("query", "key", "value")
        )
        mixed = _attend(q, k, v, _alibi(len(x), heads, x.dtype))
        x = _norm(
            _linear(mixed, state, f"{attention}.output.dense") + x,
            state,
            f"{attention}.output.LayerNorm",
            1e-12,
        )
        gate, up = _linear(x, state, f"{mlp}.gated_layers").chunk(2, -1)
        x = _norm(
            _linear(activation(gate) * up, state, f"{mlp}.wo") + x, state, f"{mlp}.layernorm", 1e-12
        )
    return x


def _jina_code(state: State, config: Values, ids: Tensor, types: Tensor) -> Tensor:
    heads = _number(config, "num_attention_heads")
    x = _jina_embedded(state, ids, types)
    for i in range(_number(config, "num_hidden_layers")):
        layer = f"encoder.layer.{i}"
        own = f"{layer}.attention.self"
        q = _norm(_linear(x, state, f"{own}.query"), state, f"{own}.layer_norm_q", 1e-12)
        k = _norm(_linear(x, state, f"{own}.key"), state, f"{own}.layer_norm_k", 1e-12)
        q, k, v = (
            part.unflatten(-1, (heads, -1)) for part in (q, k, _linear(x, state, f"{own}.value"))
        )
        mixed = _linear(
            _attend(q, k, v, _alibi(len(x), heads, x.dtype)),
            state,
            f"{layer}.attention.output.dense",
        )
        attended = _norm(mixed + x, state, f"{layer}.attention.output.LayerNorm", 1e-12)
        x = _norm(x + attended, state, f"{layer}.layer_norm_1", 1e-12)
        up, gate = _linear(x, state, f"{layer}.mlp.up_gated_layer").chunk(2, -1)
        x = _norm(
            x + _linear(up * F.gelu(gate), state, f"{layer}.mlp.down_layer"),
            state,
            f"{layer}.layer_norm_2",
            1e-12,
        )
    return x


# Nomic BERT with experts


def _nomic_config(hidden: int, heads: int, layers: int) -> Values:
    """A head of 11 rotates its first 8 elements; nomic-embed-text-v2-moe's fraction is 1."""
    return {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "gelu",
        "causal": False,
        "layer_norm_epsilon": 1e-5,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "qkv_proj_bias": True,
        "moe_every_n_layers": 2,
        "moe_normalize_expert_weights": False,
        "moe_top_k": 2,
        "num_experts": 8,
        "num_shared_experts": 0,
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": 2 * hidden,
        "n_layer": layers,
        "n_positions": 128,
        "parallel_block": False,
        "prenorm": False,
        "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0 if hidden // heads % 2 == 0 else 0.75,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 1,
        "use_rms_norm": False,
        "vocab_size": 320,
    }


def _nomic_shapes(config: Values) -> Shapes:
    hidden, inner, experts = (_number(config, key) for key in ("n_embd", "n_inner", "num_experts"))
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (_number(config, "vocab_size"), hidden),
        "embeddings.token_type_embeddings.weight": (1, hidden),
    }
    shapes |= _norms("emb_ln", size=hidden)
    for i in range(_number(config, "n_layer")):
        layer = f"encoder.layers.{i}"
        shapes |= _pair(f"{layer}.attn.Wqkv", 3 * hidden, hidden) | _pair(
            f"{layer}.attn.out_proj", hidden, hidden
        )
        shapes |= _norms(f"{layer}.norm1", f"{layer}.norm2", size=hidden)
        if i % 2 == 0:
            shapes |= _pair(f"{layer}.mlp.fc1", inner, hidden) | _pair(
                f"{layer}.mlp.fc2", hidden, inner
            )
            continue
        shapes |= {
            f"{layer}.mlp.experts.mlp.{name}": (experts * inner, hidden) for name in ("w1", "w2")
        }
        shapes |= {
            f"{layer}.mlp.experts.bias": (hidden,),
            f"{layer}.mlp.router.layer.weight": (experts, hidden),
        }
    return shapes


def _nomic(state: State, config: Values, ids: Tensor, types: Tensor) -> Tensor:
    heads = _number(config, "n_head")
    turned = int(_number(config, "n_embd") // heads * cast(float, config["rotary_emb_fraction"]))
    x = (
        state["embeddings.word_embeddings.weight"][ids]
        + state["embeddings.token_type_embeddings.weight"][0]
    )
    x = _norm(x, state, "emb_ln", 1e-5)
    for i in range(_number(config, "n_layer")):
        layer = f"encoder.layers.{i}"
        q, k, v = _linear(x, state, f"{layer}.attn.Wqkv").unflatten(-1, (3, heads, -1)).unbind(1)
        mixed = _attend(_rotated(q, 10000.0, turned), _rotated(k, 10000.0, turned), v)
        x = _norm(
            _linear(mixed, state, f"{layer}.attn.out_proj") + x, state, f"{layer}.norm1", 1e-5
        )
        if i % 2 == 0:
            answer = _linear(
                F.gelu(_linear(x, state, f"{layer}.mlp.fc1")), state, f"{layer}.mlp.fc2"
            )
        else:
            answer = torch.stack([_experts(token, state, config, f"{layer}.mlp") for token in x])
        x = _norm(answer + x, state, f"{layer}.norm2", 1e-5)
    return x


def _experts(x: Tensor, state: State, config: Values, stem: str) -> Tensor:
    """Send one token [hidden] through its experts."""
    shares = F.linear(x, state[f"{stem}.router.layer.weight"]).float().softmax(-1)
    w1, w2 = (
        state[f"{stem}.experts.mlp.{name}"].chunk(_number(config, "num_experts"))
        for name in ("w1", "w2")
    )
    total = state[f"{stem}.experts.bias"].clone()
    for number in shares.topk(_number(config, "moe_top_k")).indices.tolist():
        total += shares[number].to(x.dtype) * (F.gelu(w1[number] @ x) @ w2[number])
    return total


# XLM-RoBERTa in flash-attn's layout


def _flash_config(hidden: int, heads: int, layers: int) -> Values:
    return {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"},
        "model_type": "xlm-roberta",
        "use_flash_attn": True,
        "position_embedding_type": "absolute",
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 130,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "vocab_size": 320,
        "id2label": {"0": "LABEL_0"},
    }


def _flash_shapes(config: Values) -> Shapes:
    hidden, ffn = _number(config, "hidden_size"), _number(config, "intermediate_size")
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (_number(config, "vocab_size"), hidden),
        "embeddings.position_embeddings.weight": (
            _number(config, "max_position_embeddings"),
            hidden,
        ),
        "embeddings.token_type_embeddings.weight": (1, hidden),
    }
    shapes |= _norms("emb_ln", size=hidden)
    for i in range(_number(config, "num_hidden_layers")):
        layer = f"encoder.layers.{i}"
        shapes |= _pair(f"{layer}.mixer.Wqkv", 3 * hidden, hidden) | _pair(
            f"{layer}.mixer.out_proj", hidden, hidden
        )
        shapes |= _pair(f"{layer}.mlp.fc1", ffn, hidden) | _pair(f"{layer}.mlp.fc2", hidden, ffn)
        shapes |= _norms(f"{layer}.norm1", f"{layer}.norm2", size=hidden)
    return shapes


def _flash(state: State, config: Values, ids: Tensor, types: Tensor) -> Tensor:
    # The padding token is 1, and positions count from the one after it.
    places = torch.arange(len(ids)) + 2
    x = (
        state["embeddings.word_embeddings.weight"][ids]
        + state["embeddings.position_embeddings.weight"][places]
    )
    x = _norm(x + state["embeddings.token_type_embeddings.weight"][0], state, "emb_ln", 1e-5)
    for i in range(_number(config, "num_hidden_layers")):
        layer = f"encoder.layers.{i}"
        qkv = _linear(x, state, f"{layer}.mixer.Wqkv").unflatten(
            -1, (3, _number(config, "num_attention_heads"), -1)
        )
        q, k, v = qkv.unbind(1)
        x = _norm(
            _linear(_attend(q, k, v), state, f"{layer}.mixer.out_proj") + x,
            state,
            f"{layer}.norm1",
            1e-5,
        )
        inner = F.gelu(_linear(x, state, f"{layer}.mlp.fc1"))
        x = _norm(_linear(inner, state, f"{layer}.mlp.fc2") + x, state, f"{layer}.norm2", 1e-5)
    return x


HUB: dict[str, HubFamily] = {
    "jina": HubFamily(_jina_config, _jina_shapes, _jina),
    "jina-code": HubFamily(_jina_code_config, _jina_code_shapes, _jina_code),
    "nomic-moe": HubFamily(_nomic_config, _nomic_shapes, _nomic),
    "xlmr-flash": HubFamily(_flash_config, _flash_shapes, _flash, prefix="roberta."),
}

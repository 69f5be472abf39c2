"""Random checkpoints of jina-embeddings-v3 and -v5 in the published layout, and references in plain
torch.

`FakeJinaV3` replaces the published code (jinaai/xlm-roberta-flash-implementation): it computes the
same from tensors under their published names, with each task's adapter merged into the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tests.parity.adapters import write_random_adapter
from tests.parity.checkpoints import random_model, write_checkpoint, write_tokenizer

Vectors = npt.NDArray[np.float32]

TASKS: Final = (
    "retrieval.query",
    "retrieval.passage",
    "separation",
    "classification",
    "text-matching",
)
INSTRUCTIONS: Final = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
    "separation": "",
    "classification": "",
    "text-matching": "",
}
HIDDEN: Final = 64
HEADS: Final = 4
LAYERS: Final = 2
FFN: Final = 96
RANK: Final = 4
POSITIONS: Final = 258
_BASE: Final = 20_000.0
_EPS: Final = 1e-5
_PARAMETRIZED: Final = "{}.parametrizations.weight.{}"

V5_TASKS: Final = ("retrieval", "text-matching", "clustering", "classification")
V5_PROMPTS: Final = {"query": "Query: ", "document": "Document: "}


@dataclass(frozen=True)
class FakeJinaV3:
    """The published model's forward. `tensors` are by their names in the file."""

    directory: Path
    tensors: Mapping[str, Tensor]

    def encode(self, texts: Sequence[str], task: str = "", prompt: str | None = None) -> Vectors:
        """Return the unit vector of each text, computed one at a time. An empty `task` uses the
        plain weights; a `prompt` of None is the task's.
        """
        tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        before = INSTRUCTIONS.get(task, "") if prompt is None else prompt
        return np.stack([self._vector(tokenizer.encode(before + text).ids, task) for text in texts])

    @torch.inference_mode()
    def _vector(self, ids: list[int], task: str) -> Vectors:
        x = F.embedding(torch.tensor(ids), self._table("embeddings.word_embeddings", task))
        x = x + self._table("embeddings.token_type_embeddings", task)[0]
        x = self._norm(x, "emb_ln")
        for number in range(LAYERS):
            x = self._layer(x, f"encoder.layers.{number}", task)
        return cast("Vectors", F.normalize(x.mean(0), dim=0).numpy())

    def _layer(self, x: Tensor, layer: str, task: str) -> Tensor:
        q, k, v = self._linear(x, f"{layer}.mixer.Wqkv", task).view(len(x), 3, HEADS, -1).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) * q.shape[-1] ** -0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), HIDDEN)
        x = self._norm(x + self._linear(mixed, f"{layer}.mixer.out_proj", task), f"{layer}.norm1")
        wide = F.gelu(self._linear(x, f"{layer}.mlp.fc1", task))
        return self._norm(x + self._linear(wide, f"{layer}.mlp.fc2", task), f"{layer}.norm2")

    def _linear(self, x: Tensor, name: str, task: str) -> Tensor:
        original, a, b = self._parts(name)
        weight = (
            original if not task else original + b[TASKS.index(task)] @ a[TASKS.index(task)] / RANK
        )
        return F.linear(x, weight, self.tensors[f"roberta.{name}.bias"])

    def _table(self, name: str, task: str) -> Tensor:
        original, a, b = self._parts(name)
        return (
            original if not task else original + a[TASKS.index(task)] @ b[TASKS.index(task)] / RANK
        )

    def _parts(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        stored = [
            _PARAMETRIZED.format(f"roberta.{name}", part)
            for part in ("original", "0.lora_A", "0.lora_B")
        ]
        original, a, b = (self.tensors[one].float() for one in stored)
        return original, a, b

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.tensors[f"roberta.{name}.weight"], self.tensors[f"roberta.{name}.bias"]
        return F.layer_norm(x, (HIDDEN,), weight, bias, _EPS)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on the whole head, by halves: [tokens, heads, size]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * _BASE ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def write_jina_v3(
    directory: Path, *, seed: int = 0, changes: Mapping[str, object] | None = None
) -> FakeJinaV3:
    """Write a small jina-embeddings-v3 in the published form. `changes` overrides keys of
    config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer("jina_embeddings_v3", directory, positions=POSITIONS)
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    tensors = _v3_tensors(vocabulary, seed)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", _v3_config(vocabulary) | dict(changes or {}))
    modules = [
        {
            "idx": 0,
            "name": "transformer",
            "path": "",
            "type": "custom_st.Transformer",
            "kwargs": ["task"],
        },
        {
            "idx": 1,
            "name": "pooler",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {
            "idx": 2,
            "name": "normalizer",
            "path": "2_Normalize",
            "type": "sentence_transformers.models.Normalize",
        },
    ]
    _write(directory / "modules.json", modules)
    _write(
        directory / "1_Pooling/config.json",
        {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
    )
    _write(
        directory / "config_sentence_transformers.json",
        {"prompts": INSTRUCTIONS, "similarity_fn_name": "cosine"},
    )
    (directory / "custom_st.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    return FakeJinaV3(directory, tensors)


def _v3_config(vocabulary: int) -> dict[str, object]:
    code = "jinaai/xlm-roberta-flash-implementation--"
    return {
        "architectures": ["XLMRobertaLoRA"],
        "auto_map": {
            "AutoConfig": f"{code}configuration_xlm_roberta.XLMRobertaFlashConfig",
            "AutoModel": f"{code}modeling_lora.XLMRobertaLoRA",
        },
        "model_type": "xlm-roberta",
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": FFN,
        "hidden_act": "gelu",
        "max_position_embeddings": POSITIONS,
        "position_embedding_type": "rotary",
        "rotary_emb_base": _BASE,
        "type_vocab_size": 1,
        "layer_norm_eps": _EPS,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "use_flash_attn": True,
        "load_trained_adapters": True,
        "lora_adaptations": list(TASKS),
        "lora_alpha": 1,
        "lora_dropout_p": 0.0,
        "lora_main_params_trainable": False,
        "lora_rank": RANK,
        "matryoshka_dimensions": [16, 32, HIDDEN],
        "task_instructions": INSTRUCTIONS,
        "truncate_dim": None,
    }


def _v3_tensors(vocabulary: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    found: dict[str, Tensor] = {}

    def add(name: str, shape: tuple[int, int], a: tuple[int, ...], b: tuple[int, ...]) -> None:
        for part, size in (("original", shape), ("0.lora_A", a), ("0.lora_B", b)):
            found[_PARAMETRIZED.format(f"roberta.{name}", part)] = drawn(*size)

    def add_linear(name: str, inputs: int, outputs: int) -> None:
        add(name, (outputs, inputs), (len(TASKS), RANK, inputs), (len(TASKS), outputs, RANK))
        found[f"roberta.{name}.bias"] = drawn(outputs)

    def add_norm(name: str) -> None:
        found[f"roberta.{name}.weight"], found[f"roberta.{name}.bias"] = (
            1 + drawn(HIDDEN),
            drawn(HIDDEN),
        )

    for name, rows in (("word_embeddings", vocabulary), ("token_type_embeddings", 1)):
        add(
            f"embeddings.{name}",
            (rows, HIDDEN),
            (len(TASKS), rows, RANK),
            (len(TASKS), RANK, HIDDEN),
        )
    add_norm("emb_ln")
    for number in range(LAYERS):
        layer = f"encoder.layers.{number}"
        add_linear(f"{layer}.mixer.Wqkv", HIDDEN, 3 * HIDDEN)
        add_linear(f"{layer}.mixer.out_proj", HIDDEN, HIDDEN)
        add_linear(f"{layer}.mlp.fc1", HIDDEN, FFN)
        add_linear(f"{layer}.mlp.fc2", FFN, HIDDEN)
        add_norm(f"{layer}.norm1")
        add_norm(f"{layer}.norm2")
    add_linear("pooler.dense", HIDDEN, HIDDEN)
    return found


@dataclass(frozen=True)
class FakeJinaV5:
    """Compute jina-embeddings-v5-text as published: the last token's state of the task's model,
    scaled to length 1.
    """

    directory: Path
    merged: Mapping[str, transformers.PreTrainedModel]

    @torch.inference_mode()
    def encode(self, texts: Sequence[str], task: str, prompt: str) -> Vectors:
        tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        rows = []
        for text in texts:
            ids = torch.tensor([tokenizer.encode(prompt + text).ids])
            rows.append(
                F.normalize(
                    self.merged[task](input_ids=ids).last_hidden_state[0, -1], dim=0
                ).numpy()
            )
        return np.stack(rows)


def write_jina_v5(directory: Path, *, is_nano: bool = False) -> FakeJinaV5:
    """Write a small jina-embeddings-v5-text-small or -nano in the published form. The latter is a
    EuroBERT.
    """
    kind: Any = "eurobert" if is_nano else "qwen3"
    write_checkpoint(kind, directory)
    config = json.loads((directory / "config.json").read_text())
    code = "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"
    own: dict[str, object] = {
        "architectures": ["JinaEmbeddingsV5Model"],
        "auto_map": {"AutoModel": code},
    }
    own |= {"model_type": "jina_embeddings_v5", "task_names": list(V5_TASKS)} | (
        {"is_decoder": False} if is_nano else {}
    )
    _write(directory / "config.json", config | own)
    module = {
        "idx": 0,
        "name": "transformer",
        "path": "",
        "type": "custom_st.Transformer",
        "kwargs": ["task", "truncate_dim"],
    }
    _write(directory / "modules.json", [module])
    top = {"prompts": V5_PROMPTS, "default_prompt_name": "document", "similarity_fn_name": "cosine"}
    _write(directory / "config_sentence_transformers.json", top)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    merged = {
        task: write_random_adapter(
            kind,
            directory / "adapters" / task,
            seed=number,
            r=4,
            lora_alpha=4,
            target_modules=targets,
        )
        for number, task in enumerate(V5_TASKS)
    }
    return FakeJinaV5(directory, merged | {"": random_model(kind)})


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2))

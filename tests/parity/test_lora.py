"""LoRA adapters against PEFT: a batch of mixed adapters equals each merged model alone.

References are merged by PEFT (`merge_and_unload`) and run by transformers, one sequence at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from libs.catalog.checkpoint import adapter as lora
from libs.errors import ModelBroken
from libs.models import InputSequence, PackedModel, load_model
from libs.models.runtime.loaded import adapter_config
from libs.models.text.families.bert import deberta
from tests.parity.adapters import write_adapter, write_random_adapter
from tests.parity.checkpoints import Head, Kind, random_model, write_checkpoint

LENGTHS = (1, 6, 6, 17, 40)
CPU = torch.device("cpu")
Vectors = list[npt.NDArray[np.float32]]

QWEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Eight of different ranks and layers: single slots of a fused projection, several, all; and the
# settings of the scale.
BERT_ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 8, "target_modules": ["query", "key", "value", "attention.output.dense"]},
    {"r": 4, "target_modules": ["query", "value"], "lora_alpha": 16},
    {"r": 16, "target_modules": ["key"], "use_rslora": True},
    {"r": 2, "target_modules": ["intermediate.dense", "output.dense"]},
    {"r": 1, "target_modules": "all-linear"},
    {"r": 5, "target_modules": r".*layer\.1\..*(query|dense)"},
    {
        "r": 3,
        "target_modules": ["query", "dense"],
        "rank_pattern": {"query": 7, "0.output.dense": 2},
        "alpha_pattern": {"dense": 5},
    },
    {"r": 8, "target_modules": ["value"], "layers_to_transform": [1]},
)
QWEN_ADAPTERS: tuple[dict[str, Any], ...] = (
    {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 16},
    {"r": 16, "target_modules": ["up_proj"], "use_rslora": True},
    {"r": 2, "target_modules": ["gate_proj", "down_proj"]},
    {"r": 3, "target_modules": list(QWEN)},
    {"r": 5, "target_modules": r"layers\.1\..*_proj"},
    {"r": 6, "target_modules": list(QWEN), "rank_pattern": {r"layers\.\d+\.mlp\..*_proj": 2}},
    {"r": 8, "target_modules": ["k_proj"], "exclude_modules": ["layers.0.self_attn.k_proj"]},
)  # fmt: skip
# Families with other fused weights, names and layers: Wqkv and Wi whole, GeGLU's halves, four
# norms, scores by distance.
OTHERS: tuple[Kind, ...] = (
    "modernbert",
    "gemma3_text",
    "t5",
    "mt5",
    "gte",
    "nomic_bert",
    "jina_embeddings_v3",
    "electra",
    "mpnet",
    "distilbert",
    "longformer",
    "deberta",
    "deberta-v2",
)


@dataclass(frozen=True)
class Adapted:
    """A model with adapters, and PEFT's merged models by adapter; the plain one has an empty
    name."""

    model: PackedModel
    merged: Mapping[str, transformers.PreTrainedModel]

    def batch(self, lengths: Sequence[int] = LENGTHS) -> list[InputSequence]:
        """Return every sequence once for each adapter and once without one, in a mixed order."""
        rng = np.random.default_rng(0)
        sequences = [
            InputSequence(rng.integers(5, 300, length, dtype=np.int32)) for length in lengths
        ]
        both = [replace(sequence, adapter=name) for sequence in sequences for name in self.merged]
        return [both[place] for place in rng.permutation(len(both))]

    def forward(self, batch: list[InputSequence], head: str = "dense") -> Vectors:
        return cast("Vectors", self.model.forward(head, batch))

    def wanted(self, batch: list[InputSequence]) -> Vectors:
        return [mean(self.merged[one.adapter], one) for one in batch]


@torch.inference_mode()
def mean(model: transformers.PreTrainedModel, sequence: InputSequence) -> npt.NDArray[np.float32]:
    hidden = model(input_ids=torch.from_numpy(sequence.ids)[None].long()).last_hidden_state
    return cast("npt.NDArray[np.float32]", hidden[0].float().mean(0).numpy())


def worst(got: Vectors, wanted: Vectors) -> float:
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, wanted, strict=True)
    )


def adapted(
    root: Path, kind: Kind, adapters: Sequence[dict[str, Any]], dtype: torch.dtype = torch.float32
) -> Adapted:
    if not (root / "base").exists():
        write_checkpoint(kind, root / "base")
    model = load_model(root / "base", "org/base", CPU, dtype)
    merged = {"": random_model(kind)}
    for number, settings in enumerate(adapters):
        name = f"org/adapter-{number}"
        merged[name] = write_random_adapter(kind, root / name, seed=number, **settings)
        assert model.add_adapter(name, root / name) > 0
    return Adapted(model, merged)


@pytest.mark.parametrize(("kind", "adapters"), [("bert", BERT_ADAPTERS), ("qwen3", QWEN_ADAPTERS)])
def test_eight_adapters_in_one_batch_equal_the_merged_models(
    kind: Kind, adapters: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    a = adapted(tmp_path, kind, adapters)
    batch = a.batch()
    got, wanted = a.forward(batch), a.wanted(batch)
    assert worst(got, wanted) <= 1e-5
    # The adapters have effects, and different ones.
    first = [
        vector for one, vector in zip(batch, wanted, strict=True) if len(one.ids) == LENGTHS[-1]
    ]
    assert min(worst([x], [y]) for i, x in enumerate(first) for y in first[:i]) > 0.01
    # The same among others as alone; sequences without adapters equal those of a batch without.
    alone = [a.forward([one])[0] for one in batch]
    assert worst(got, alone) <= 1e-6
    plain = [(one, vector) for one, vector in zip(batch, got, strict=True) if not one.adapter]
    assert worst([vector for _, vector in plain], a.forward([one for one, _ in plain])) <= 1e-6


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_every_linear_layer_equal_the_merged_model(kind: Kind, tmp_path: Path) -> None:
    a = adapted(
        tmp_path,
        kind,
        ({"r": 3, "target_modules": "all-linear"}, {"r": 2, "target_modules": "all-linear"}),
    )
    batch = a.batch()
    assert worst(a.forward(batch), a.wanted(batch)) <= 1e-5


def test_adapters_of_distance_projections_equal_the_merged_model(tmp_path: Path) -> None:
    """Without share_att_key, DeBERTa's first form, pos_key_proj and pos_query_proj are also
    linear layers.
    """
    config = {"share_att_key": False}
    base = write_checkpoint("deberta-v2", tmp_path / "base", config=config)
    model = load_model(base, "org/base", CPU, torch.float32)
    plain = random_model("deberta-v2", config=config)
    merged = write_adapter(
        random_model("deberta-v2", config=config),
        tmp_path / "a",
        seed=1,
        r=4,
        target_modules="all-linear",
    )
    assert any("pos_key_proj" in name for name in load_file(tmp_path / "a" / lora.WEIGHTS))
    model.add_adapter("a", tmp_path / "a")
    a = Adapted(model, {"": plain, "a": merged})
    batch = a.batch()
    assert worst(a.forward(batch), a.wanted(batch)) <= 1e-5


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled, for the accelerator alone"
)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_accelerator_kernel_uses_adapters_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is interpreted: each sequence has its adapter's distances, as in the computation
    by runs."""
    pytest.importorskip("triton")
    a = adapted(
        tmp_path,
        "deberta-v2",
        ({"r": 3, "target_modules": "all-linear"}, {"r": 2, "target_modules": "all-linear"}),
    )
    batch = a.batch((1, 6, 35))
    wanted = a.forward(batch)
    monkeypatch.setattr(deberta, "has_triton", lambda x: True)
    assert worst(a.forward(batch), wanted) <= 1e-5


@pytest.mark.parametrize(("kind", "adapters"), [("bert", BERT_ADAPTERS), ("qwen3", QWEN_ADAPTERS)])
def test_bfloat16_is_as_good_as_the_merged_model_in_bfloat16(
    kind: Kind, adapters: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    a = adapted(tmp_path, kind, adapters[:4], torch.bfloat16)
    batch = a.batch()
    exact = a.wanted(batch)
    own = Adapted(
        a.model, {name: model.to(torch.bfloat16) for name, model in a.merged.items()}
    ).wanted(batch)
    assert worst(a.forward(batch), exact) < 3 * worst(own, exact)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_single_row_of_a_sequence_is_adapted(kind: Kind, tmp_path: Path) -> None:
    """Pooling the first or last token skips most of the last layer. Its linear layers then see one
    row of each sequence.
    """
    a = adapted(
        tmp_path,
        kind,
        ({"r": 4, "target_modules": "all-linear"}, {"r": 2, "target_modules": "all-linear"}),
    )
    pooling = tmp_path / "base" / "1_Pooling"
    pooling.mkdir()
    mode = {"bert": "cls_token", "qwen3": "lasttoken"}[kind]
    (pooling / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, f"pooling_mode_{mode}": True})
    )
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for number, (path, name) in enumerate(modules)
    ]
    (tmp_path / "base" / "modules.json").write_text(json.dumps(listed))
    model = load_model(tmp_path / "base", "org/base", CPU, torch.float32)
    for name in filter(None, a.merged):
        model.add_adapter(name, tmp_path / name)
    place = 0 if kind == "bert" else -1
    batch = a.batch((1, 1, 9, 9, 30))
    with torch.inference_mode():
        wanted = [
            a.merged[one.adapter](input_ids=torch.from_numpy(one.ids)[None].long())
            .last_hidden_state[0, place]
            .numpy()
            for one in batch
        ]
    assert worst(cast("Vectors", model.forward("dense", batch)), wanted) <= 1e-5


def test_batch_without_adapters_is_unchanged_bit_for_bit(tmp_path: Path) -> None:
    a = adapted(tmp_path, "bert", BERT_ADAPTERS[:2])
    batch = [one for one in a.batch() if not one.adapter]
    never = load_model(tmp_path / "base", "org/base", CPU, torch.float32)
    for got, wanted in zip(a.forward(batch), never.forward("dense", batch), strict=True):
        np.testing.assert_array_equal(got, cast("npt.NDArray[np.float32]", wanted))


@pytest.mark.parametrize("has_adapters", [False, True])
def test_preempting_forward_uses_its_own_adapters(has_adapters: bool, tmp_path: Path) -> None:
    a = adapted(tmp_path, "bert", BERT_ADAPTERS[:3])
    batch = a.batch()
    other = [one for one in batch if bool(one.adapter) is has_adapters][::-2]
    within: list[Vectors] = []
    got = cast("Vectors", a.model.forward("dense", batch, lambda: within.append(a.forward(other))))
    assert len(within) == 2
    assert worst(got, a.wanted(batch)) <= 1e-5
    for vectors in within:
        assert worst(vectors, a.wanted(other)) <= 1e-5


def test_removed_adapter_is_refused(tmp_path: Path) -> None:
    a = adapted(tmp_path, "bert", BERT_ADAPTERS[:2])
    batch = a.batch()
    a.model.remove_adapter("org/adapter-0")
    with pytest.raises(KeyError, match="org/adapter-0"):
        a.forward(batch)
    rest = [one for one in batch if one.adapter != "org/adapter-0"]
    assert worst(a.forward(rest), a.wanted(rest)) <= 1e-5


def test_prefixes_of_heads_and_adapters_are_accepted(tmp_path: Path) -> None:
    """PEFT on a classifier writes `bert.`; on a bare encoder nothing; before a save an adapter's
    name is part of each name.
    """
    a = adapted(tmp_path, "bert", BERT_ADAPTERS[:1])
    tensors = load_file(tmp_path / "org/adapter-0" / lora.WEIGHTS)
    names: tuple[Callable[[str], str], ...] = (
        lambda name: name.replace("base_model.model.", "base_model.model.bert."),
        lambda name: name.replace("base_model.model.", ""),
        lambda name: name.replace(".weight", ".my-adapter.weight"),
    )
    for number, renamed in enumerate(names):
        directory = tmp_path / f"renamed-{number}"
        shutil.copytree(tmp_path / "org/adapter-0", directory)
        save_file(
            {renamed(name): tensor for name, tensor in tensors.items()}, directory / lora.WEIGHTS
        )
        a.model.add_adapter("renamed", directory)
        batch = [one for one in a.batch() if one.adapter]
        got = a.forward([replace(one, adapter="renamed") for one in batch])
        assert worst(got, a.wanted(batch)) <= 1e-5


def test_reranker_shares_its_query_within_an_adapter_only(tmp_path: Path) -> None:
    """A prefix of several sequences is computed once for each adapter."""
    a = adapted(tmp_path, "qwen3", QWEN_ADAPTERS[:2])
    rng = np.random.default_rng(1)
    before = rng.integers(5, 300, 9, dtype=np.int32)
    tails = [rng.integers(5, 300, length, dtype=np.int32) for length in (4, 7)]
    whole = [
        InputSequence(np.concatenate([before, tail]), skip=9, adapter=name)
        for tail in tails
        for name in a.merged
    ]
    shared = [
        InputSequence(tail, before=before, adapter=name) for tail in tails for name in a.merged
    ]
    with torch.inference_mode():
        hidden = [
            a.merged[one.adapter](
                input_ids=torch.from_numpy(one.ids)[None].long()
            ).last_hidden_state[0, 9:]
            for one in whole
        ]
    assert worst(a.forward(shared), [one.mean(0).numpy() for one in hidden]) <= 1e-5


def test_fp32_fallback_has_the_adapters(tmp_path: Path) -> None:
    """The encoder that repeats a forward with non-finite results also has adapters added after it
    was built.
    """
    a = adapted(tmp_path, "bert", BERT_ADAPTERS[:1], torch.bfloat16)
    twin = a.model.load_fp32_fallback()
    assert twin is not None
    merged = write_random_adapter("bert", tmp_path / "late", seed=9, r=2, target_modules=["query"])
    a.model.add_adapter("org/late", tmp_path / "late")
    wide = Adapted(twin, {**a.merged, "org/late": merged})
    batch = wide.batch()
    assert worst(wide.forward(batch), wide.wanted(batch)) <= 1e-5


def test_loaded_adapter_has_its_reported_size(tmp_path: Path) -> None:
    write_checkpoint("bert", tmp_path / "base")
    model = load_model(tmp_path / "base", "org/base", CPU, torch.float32)
    write_random_adapter(
        "bert", tmp_path / "a", seed=0, r=4, target_modules=["attention.output.dense"]
    )
    assert (
        model.add_adapter("a", tmp_path / "a") == 2 * 2 * 4 * 64 * 4
    )  # layers, factors, rank, hidden, bytes


# Refusals


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return load_model(
        write_checkpoint("bert", tmp_path_factory.mktemp("base")), "org/base", CPU, torch.float32
    )


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    write_random_adapter("bert", tmp_path, seed=0, r=4, target_modules=["query", "value"])
    return tmp_path


def change(directory: Path, **keys: object) -> None:
    config = json.loads((directory / lora.FILE).read_text())
    (directory / lora.FILE).write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("modules_to_save", ["classifier"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", None),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.w1"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("use_rslora", "yes"),
        ("target_modules", [1]),
        ("rank_pattern", {"(?=a)": 4}),
        ("rank_pattern", {"x" * 201: 4}),
        ("rank_pattern", {"query": 0}),
        ("alpha_pattern", {"(": 4}),
        ("some_new_idea", {"x": 1}),
    ],
)
def test_unsupported_configurations_are_refused(
    base: PackedModel, sound: Path, key: str, value: object
) -> None:
    change(sound, **{key: value})
    with pytest.raises(ModelBroken, match=f"adapter_config.json.*`{key}`"):
        base.add_adapter("a", sound)


def test_every_key_of_peft_is_known() -> None:
    """A key of the installed PEFT that is in none of the lists could change the computation."""
    written = set(LoraConfig().to_dict())
    assert (
        written - adapter_config.REFUSED.keys() - adapter_config.IGNORED - adapter_config.READ
        == set()
    )


def test_missing_pickled_and_damaged_files_are_refused(base: PackedModel, sound: Path) -> None:
    weights = sound / lora.WEIGHTS
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(ModelBroken, match=r"adapter_model\.safetensors: no such file"):
        base.add_adapter("a", sound)
    (sound / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelBroken, match=r"adapter_model\.bin: torch checkpoints are pickles"):
        base.add_adapter("a", sound)
    weights.write_bytes(content[:100])
    with pytest.raises(ModelBroken, match=r"adapter_model\.safetensors: truncated"):
        base.add_adapter("a", sound)
    (sound / lora.FILE).unlink()
    with pytest.raises(ModelBroken, match=r"adapter_config\.json: missing"):
        base.add_adapter("a", sound)


QUERY = "base_model.model.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        (f"{QUERY}.lora_A.weight", (5, 64), r"has shape \[5, 64\].*need \[4, 64\]"),
        (f"{QUERY}.lora_B.weight", (63, 4), r"has shape \[63, 4\].*need \[64, 4\]"),
        (f"{QUERY}s.lora_A.weight", (4, 64), "has no partner lora_B"),
        (f"{QUERY}.lora_B.bias", (64,), "is not supported"),
        (f"{QUERY}.lora_magnitude_vector", (64,), "has a magnitude, but `use_dora`"),
        (
            "base_model.model.embeddings.word_embeddings.lora_embedding_A",
            (4, 400),
            "adapts an embedding",
        ),
        ("base_model.model.classifier.weight", (2, 64), "was trained as a whole"),
    ],
)
def test_mismatched_tensor_is_named(
    base: PackedModel, sound: Path, name: str, shape: tuple[int, ...], problem: str
) -> None:
    tensors = load_file(sound / lora.WEIGHTS)
    save_file(tensors | {name: torch.zeros(shape)}, sound / lora.WEIGHTS)
    with pytest.raises(ModelBroken, match=f"adapter_model.safetensors: tensor '{name}' {problem}"):
        base.add_adapter("a", sound)


def test_duplicate_tensor_is_refused(base: PackedModel, sound: Path) -> None:
    tensors = load_file(sound / lora.WEIGHTS)
    save_file(tensors | {f"{QUERY}.lora_A.other.weight": torch.zeros(4, 64)}, sound / lora.WEIGHTS)
    with pytest.raises(
        ModelBroken, match=r"adapter_model.safetensors: tensor '.*query.lora_A.*' is a duplicate"
    ):
        base.add_adapter("a", sound)


@pytest.mark.parametrize(
    ("module", "sizes", "problem"),
    [
        (
            "encoder.layer.7.attention.self.query",
            (64, 64),
            "adapts a layer that is not a linear layer of this model",
        ),
        ("encoder.layer.0.attention.self.quarry", (64, 64), "is unknown to this family of models"),
        (
            "encoder.layer.0.output.LayerNorm",
            (64, 64),
            "adapts a layer that is not a linear layer of this model",
        ),
    ],
)
def test_unknown_module_is_named(
    base: PackedModel, sound: Path, module: str, sizes: tuple[int, int], problem: str
) -> None:
    name = f"base_model.model.{module}"
    tensors = {
        f"{name}.lora_A.weight": torch.zeros(4, sizes[0]),
        f"{name}.lora_B.weight": torch.zeros(sizes[1], 4),
    }
    save_file(load_file(sound / lora.WEIGHTS) | tensors, sound / lora.WEIGHTS)
    change(sound, target_modules=["query", "value", "quarry", "LayerNorm"])
    with pytest.raises(ModelBroken, match=f"tensor '{name}.lora_A.weight' {problem}"):
        base.add_adapter("a", sound)


def test_module_outside_the_configuration_is_refused(base: PackedModel, sound: Path) -> None:
    change(sound, target_modules=["query"])
    with pytest.raises(
        ModelBroken, match=r"`target_modules` does not name the module of tensor .*value"
    ):
        base.add_adapter("a", sound)


@pytest.mark.parametrize(
    ("head", "refused"),
    [("sequence_classification", "classifier"), ("token_classification", "classifier")],
)
def test_heads_layer_is_refused_where_the_head_is_served(
    head: Head, refused: str, sound: Path, base: PackedModel
) -> None:
    """The same tensors are dropped, as the base model's are, if the model is served without that
    head."""
    directory = write_checkpoint("bert", sound / "ranker", head=head, labels=("a", "b"))
    model = load_model(directory, "org/ranker", CPU, torch.float32)
    name = f"base_model.model.{refused}"
    tensors = {
        f"{name}.lora_A.weight": torch.zeros(4, 64),
        f"{name}.lora_B.weight": torch.zeros(2, 4),
    }
    save_file(load_file(sound / lora.WEIGHTS) | tensors, sound / lora.WEIGHTS)
    change(sound, target_modules=["query", "value", refused])
    with pytest.raises(
        ModelBroken, match=f"tensor '{name}.lora_A.weight' belongs to the model's head"
    ):
        model.add_adapter("a", sound)
    assert base.add_adapter("a", sound) > 0
    base.remove_adapter("a")

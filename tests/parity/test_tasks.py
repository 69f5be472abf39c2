"""Checkpoints with LoRA adapters for tasks: jina-embeddings-v3 and -v5, against their published
code's arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from libs.catalog.detect import read_card
from libs.errors import ModelBroken
from libs.models import EncodeWork, PackedModel, ScoreResult, ScoreWork, load_model
from libs.models.interface.sequences import Prepared
from libs.models.interface.work import ClassifyWork, Role, Work
from tests.parity.checkpoints import write_checkpoint
from tests.parity.jina_models import (
    INSTRUCTIONS,
    TASKS,
    V5_PROMPTS,
    V5_TASKS,
    FakeJinaV3,
    FakeJinaV5,
    Vectors,
    write_jina_v3,
    write_jina_v5,
)

CPU = torch.device("cpu")
TEXTS = [
    "a boat",
    "many small boats in one harbour",
    "shoal: a large number of fish that swim together, and no two alike",
]


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> FakeJinaV3:
    return write_jina_v3(tmp_path_factory.mktemp("v3"))


@pytest.fixture(scope="module")
def model(v3: FakeJinaV3) -> PackedModel:
    return load(v3.directory)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PackedModel:
    return load_model(directory, "org/jina", CPU, dtype)


def encoded(model: PackedModel, work: Work) -> Vectors:
    prepared = model.prepare(work)
    return dense(model, prepared)


def dense(model: PackedModel, prepared: Prepared) -> Vectors:
    result = model.finish(prepared, model.forward_all(prepared))
    values = getattr(result, "dense", None)
    assert values is not None
    return np.asarray(values.values if hasattr(values, "values") else values, np.float32)


def worst(got: Vectors, wanted: Vectors) -> float:
    return float(np.abs(got - wanted).max())


@pytest.mark.parametrize("task", TASKS)
def test_each_task_equals_its_merged_weights_and_prompt(
    task: str, v3: FakeJinaV3, model: PackedModel
) -> None:
    assert worst(encoded(model, EncodeWork(TEXTS, adapter=task)), v3.encode(TEXTS, task)) <= 1e-5


def test_without_a_task_the_plain_weights_serve_without_a_prompt(
    v3: FakeJinaV3, model: PackedModel
) -> None:
    assert worst(encoded(model, EncodeWork(TEXTS)), v3.encode(TEXTS)) <= 1e-5


def test_tasks_differ_from_each_other(v3: FakeJinaV3) -> None:
    vectors = [v3.encode(TEXTS, task, prompt="") for task in ("", *TASKS)]
    assert min(worst(a, b) for number, a in enumerate(vectors) for b in vectors[:number]) > 0.01


@pytest.mark.parametrize(
    ("role", "task"), [("query", "retrieval.query"), ("document", "retrieval.passage")]
)
def test_role_chooses_its_task(role: Role, task: str, v3: FakeJinaV3, model: PackedModel) -> None:
    assert worst(encoded(model, EncodeWork(TEXTS, role=role)), v3.encode(TEXTS, task)) <= 1e-5


def test_named_task_counts_more_than_the_role(v3: FakeJinaV3, model: PackedModel) -> None:
    got = encoded(model, EncodeWork(TEXTS, role="query", adapter="separation"))
    assert worst(got, v3.encode(TEXTS, "separation")) <= 1e-5


def test_instruction_replaces_the_prompt_and_not_the_adapter(
    v3: FakeJinaV3, model: PackedModel
) -> None:
    got = encoded(model, EncodeWork(TEXTS, role="query", instruction="Find: "))
    assert worst(got, v3.encode(TEXTS, "retrieval.query", prompt="Find: ")) <= 1e-5


def test_fewer_dimensions_are_the_first_ones_scaled_to_length_1(
    v3: FakeJinaV3, model: PackedModel
) -> None:
    wanted = v3.encode(TEXTS, "text-matching")[:, :16]
    wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    assert (
        worst(encoded(model, EncodeWork(TEXTS, adapter="text-matching", dimensions=16)), wanted)
        <= 1e-5
    )


def test_tasks_mixed_in_one_batch_equal_each_alone(v3: FakeJinaV3, model: PackedModel) -> None:
    works = [EncodeWork(TEXTS, adapter=task) for task in ("", *TASKS)]
    sequences = [sequence for work in works for sequence in model.prepare(work).sequences]
    order = np.random.default_rng(0).permutation(len(sequences))
    outputs = model.forward("dense", [sequences[place] for place in order])
    mixed = np.empty((len(sequences), 64), np.float32)
    for place, output in zip(order, outputs, strict=True):
        assert isinstance(output, np.ndarray)
        mixed[place] = output / np.linalg.norm(output)
    alone = np.concatenate([encoded(model, work) for work in works])
    assert worst(mixed, alone) <= 1e-6
    wanted = np.concatenate([v3.encode(TEXTS, task) for task in ("", *TASKS)])
    assert worst(mixed, wanted) <= 1e-5


def test_score_takes_the_tasks_of_query_and_documents(v3: FakeJinaV3, model: PackedModel) -> None:
    prepared = model.prepare(ScoreWork(TEXTS[0], TEXTS[1:]))
    assert [one.adapter for one in prepared.sequences] == [
        "retrieval.query",
        "retrieval.passage",
        "retrieval.passage",
    ]
    result = model.finish(prepared, model.forward_all(prepared))
    assert isinstance(result, ScoreResult)
    wanted = v3.encode(TEXTS[1:], "retrieval.passage") @ v3.encode(TEXTS[:1], "retrieval.query")[0]
    assert worst(np.asarray(result.scores), wanted) <= 1e-5


def test_classify_takes_the_named_task(model: PackedModel) -> None:
    prepared = model.prepare(ClassifyWork(TEXTS, labels=("sea", "land"), adapter="classification"))
    assert {one.adapter for one in prepared.sequences} == {"classification"}


def test_bfloat16_is_near_the_reference(v3: FakeJinaV3) -> None:
    model = load(v3.directory, torch.bfloat16)
    for task in ("", *TASKS):
        assert (
            worst(encoded(model, EncodeWork(TEXTS, adapter=task)), v3.encode(TEXTS, task)) <= 0.02
        )


def test_fp32_fallback_has_the_tasks(v3: FakeJinaV3) -> None:
    wide = load(v3.directory, torch.bfloat16).load_fp32_fallback()
    assert wide is not None
    assert (
        worst(
            encoded(wide, EncodeWork(TEXTS, adapter="separation")), v3.encode(TEXTS, "separation")
        )
        <= 1e-5
    )


def test_tasks_stay_while_the_model_is_parked(v3: FakeJinaV3) -> None:
    model = load(v3.directory).park().resume()
    assert (
        worst(
            encoded(model, EncodeWork(TEXTS, adapter="separation")), v3.encode(TEXTS, "separation")
        )
        <= 1e-5
    )


def test_factors_count_as_the_models_bytes(v3: FakeJinaV3, tmp_path: Path) -> None:
    tensors = v3.tensors
    factors = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if ".lora_" in name and "pooler" not in name
    )
    plain = write_plain(v3, tmp_path)
    assert load(v3.directory).bytes - load(plain).bytes == pytest.approx(factors)


def write_plain(v3: FakeJinaV3, directory: Path) -> Path:
    """The same model without its adapters but with their names in config.json, as in merged
    copies."""
    for file in v3.directory.rglob("*.json"):
        target = directory / file.relative_to(v3.directory)
        target.parent.mkdir(exist_ok=True)
        target.write_text(file.read_text())
    plain = {
        name.replace(".parametrizations.weight.original", ".weight"): tensor
        for name, tensor in v3.tensors.items()
        if ".lora_" not in name
    }
    save_file(plain, directory / "model.safetensors")
    return directory


def test_merged_copy_is_served_without_tasks(v3: FakeJinaV3, tmp_path: Path) -> None:
    plain = load(write_plain(v3, tmp_path))
    assert (plain.card.own_adapters, plain.card.role_adapters) == ((), {})
    assert worst(encoded(plain, EncodeWork(TEXTS, role="query")), v3.encode(TEXTS)) <= 1e-5


def test_card_names_tasks_roles_and_prompts(v3: FakeJinaV3) -> None:
    card = read_card(v3.directory, "org/jina")
    assert card.own_adapters == TASKS
    assert card.role_adapters == {"query": "retrieval.query", "document": "retrieval.passage"}
    assert card.prompts == {name: text for name, text in INSTRUCTIONS.items() if text}
    assert (card.kind, card.pooling, card.normalize, card.dimensions) == (
        "dense",
        ("mean",),
        True,
        64,
    )


def test_prompts_are_config_jsons_where_no_other_file_has_them(tmp_path: Path) -> None:
    v3 = write_jina_v3(tmp_path)
    (tmp_path / "config_sentence_transformers.json").unlink()
    assert read_card(v3.directory, "org/jina").prompts == {
        name: text for name, text in INSTRUCTIONS.items() if text
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_rank": 3}, "lora_A' has shape"),
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_alpha": "one"}, "lora_alpha"),
        ({"lora_adaptations": ["a", "a"]}, "each once"),
        ({"task_instructions": {"separation": ["a"]}}, "separation"),
        ({"lora_adaptations": ["../a"]}, "plain name"),
        ({"lora_adaptations": list(TASKS[:4])}, "config.json needs"),
    ],
)
def test_config_that_does_not_fit_is_refused_with_key_or_tensor(
    changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    v3 = write_jina_v3(tmp_path, changes=changes)
    with pytest.raises(ModelBroken, match=problem):
        load(v3.directory)


def test_code_of_another_checkpoint_stays_refused(tmp_path: Path) -> None:
    v3 = write_jina_v3(tmp_path, changes={"lora_adaptations": None})
    with pytest.raises(ModelBroken, match="never run"):
        load(v3.directory)


@pytest.mark.parametrize("missing", ["0.lora_A", "0.lora_B"])
def test_factor_without_its_partner_is_refused(missing: str, tmp_path: Path) -> None:
    v3 = write_jina_v3(tmp_path)
    file = tmp_path / "model.safetensors"
    name = f"roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.{missing}"
    save_file(
        {stored: tensor for stored, tensor in load_file(file).items() if stored != name}, file
    )
    with pytest.raises(ModelBroken, match=r"mlp\.fc1"):
        load(v3.directory)


def test_v4_is_refused_with_an_alternative(tmp_path: Path) -> None:
    v3 = write_jina_v3(
        tmp_path, changes={"architectures": ["JinaEmbeddingsV4Model"], "model_type": "qwen2_5_vl"}
    )
    with pytest.raises(ModelBroken, match=r"architectures.*jina-embeddings-v5-text-small.*colqwen"):
        load(v3.directory)


def test_listwise_reranker_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    directory = write_checkpoint("qwen3", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"architectures": ["JinaForRanking"]})
    )
    with pytest.raises(ModelBroken, match=r"all documents .*Use jinaai/jina-reranker-m0"):
        load(directory)


@pytest.fixture(scope="module", params=[False, True], ids=["small", "nano"])
def v5(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FakeJinaV5:
    return write_jina_v5(tmp_path_factory.mktemp("v5"), is_nano=request.param)


@pytest.mark.parametrize("task", V5_TASKS)
@pytest.mark.parametrize("role", ["", "query", "document"])
def test_v5_takes_its_prompt_by_role_and_its_weights_by_task(
    task: str, role: Role, v5: FakeJinaV5
) -> None:
    model = load(v5.directory)
    wanted = v5.encode(TEXTS, task, V5_PROMPTS[role or "document"])
    assert worst(encoded(model, EncodeWork(TEXTS, role=role, adapter=task)), wanted) <= 1e-5


def test_v5_retrieves_unless_a_task_is_named(v5: FakeJinaV5) -> None:
    model = load(v5.directory)
    assert model.card.own_adapters == V5_TASKS
    for role, prompt in V5_PROMPTS.items():
        wanted = v5.encode(TEXTS, "retrieval", prompt)
        assert (
            worst(
                encoded(model, EncodeWork(TEXTS, role="query" if role == "query" else "document")),
                wanted,
            )
            <= 1e-5
        )


def test_v5_without_one_of_its_adapters_is_refused(tmp_path: Path) -> None:
    v5 = write_jina_v5(tmp_path)
    (tmp_path / "adapters/clustering/adapter_model.safetensors").unlink()
    with pytest.raises(ModelBroken, match="adapters/clustering"):
        load(v5.directory)

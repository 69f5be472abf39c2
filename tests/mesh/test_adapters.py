"""LoRA adapters through the whole mesh: many over one base model, mixed requests, missing and
broken adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import shoal
import shoal.errors
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.adapters import write_random_adapter
from tests.parity.checkpoints import SentenceFiles, random_model, write_checkpoint
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

BASE = "org/base"
ADAPTERS = [f"adapters/{number}" for number in range(8)]
NONE = ""
KEPT = 3
"""Adapters loaded at the same time, fewer than exist."""
TEXTS = [
    "a boat",
    "many small boats in one harbour",
    "shoal: a large number of fish that swim together",
]

Numbers = npt.NDArray[np.float32]
Reference = Callable[[str], Numbers]
"""Returns the vectors of TEXTS with an adapter."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def reference(shelf: Path) -> Reference:
    """Write a base model and its adapters, one of them broken. Return vectors of PEFT's merged
    models.
    """
    write_checkpoint("bert", shelf / BASE, sentence=SentenceFiles())
    merged = {NONE: random_model("bert")}
    for number, name in enumerate(ADAPTERS):
        targets = ["query", "dense", "value", "key"][: 1 + number % 4]
        merged[name] = write_random_adapter(
            "bert", shelf / name, seed=number, r=1 + number, target_modules=targets
        )
    write_random_adapter("bert", shelf / "adapters/broken", seed=0, r=4, target_modules=["query"])
    weights = shelf / "adapters/broken/adapter_model.safetensors"
    save_file(
        {name.replace("layer.1", "layer.5"): tensor for name, tensor in load_file(weights).items()},
        weights,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(shelf / BASE)

    def vectors(adapter: str) -> Numbers:
        batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
        with torch.inference_mode():
            hidden = merged[adapter](**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return cast(
            "Numbers", torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
        )

    return vectors


@pytest.fixture(scope="module")
def client(
    shelf: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[shoal.Client]:
    directory, environment = tmp_path_factory.mktemp("mesh"), {"SHOAL_ADAPTERS": str(KEPT)}
    with (
        Cluster(directory, models=str(shelf), environment=environment) as cluster,
        shoal.Client(cluster.address) as connected,
    ):
        yield connected


def error(client: shoal.Client, reference: Reference, adapter: str) -> float:
    got = client.encode(BASE, TEXTS, adapter=adapter, timeout=60).dense
    assert got is not None
    return float(np.abs(got - reference(adapter)).max())


def worst_at_once(client: shoal.Client, reference: Reference, names: list[str]) -> float:
    """Return the largest error of concurrent requests, one per name."""
    with ThreadPoolExecutor(len(names)) as pool:
        return max(pool.map(lambda name: error(client, reference, name), names))


def test_adapters_and_the_plain_model_are_served_concurrently(
    client: shoal.Client, reference: Reference
) -> None:
    assert min(np.abs(reference(name) - reference(NONE)).max() for name in ADAPTERS) > 1e-3
    loaded = ADAPTERS[:KEPT]
    assert worst_at_once(client, reference, [NONE, *loaded] * 6) <= 1e-5

    def places() -> list[list[str]]:
        return [
            sorted(place.adapters)
            for model in client.models.list()
            if model.model == BASE
            for place in model.places
        ]

    wait_until(lambda: places() == [loaded], 60, "the report")


def test_more_adapters_than_fit_are_served(client: shoal.Client, reference: Reference) -> None:
    assert worst_at_once(client, reference, [NONE, *ADAPTERS] * 2) <= 1e-5


def test_adapters_are_not_models(client: shoal.Client) -> None:
    assert [model.model for model in client.models.list()] == [BASE]


def test_unknown_adapter_is_not_found(client: shoal.Client, reference: Reference) -> None:
    with pytest.raises(shoal.errors.ModelNotFound, match="adapters/unknown") as raised:
        client.encode(BASE, TEXTS, adapter="adapters/unknown", timeout=60)
    assert raised.value.field == "adapter"
    assert error(client, reference, NONE) <= 1e-5


def test_broken_adapter_error_names_the_tensor_and_its_model_keeps_serving(
    client: shoal.Client, reference: Reference
) -> None:
    with pytest.raises(
        shoal.errors.ModelBroken,
        match=r"adapter_model\.safetensors: tensor .*layer\.5.*query.*lora_",
    ):
        client.encode(BASE, TEXTS, adapter="adapters/broken", timeout=60)
    assert error(client, reference, NONE) <= 1e-5
    assert error(client, reference, ADAPTERS[0]) <= 1e-5

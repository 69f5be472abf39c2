"""Every family, from a directory without specific code, through the mesh, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import shoal
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder
from transformers.models.lfm2 import modeling_lfm2

from tests.mesh.conftest import CLASSES, KINDS, LABELS, RANKED, TAGGED, head_config, hub_config
from tests.parity.checkpoints import Head, random_model
from tests.parity.recipes import RECIPES
from tests.parity.reference_hub import HUB, write_hub
from tests.parity.test_static import TEXTS as STATIC_TEXTS
from tests.parity.test_static import model2vec_vectors
from tests.support.texts import texts

TEXTS = texts(12, shortest=1, longest=30, seed=3)
BOUND = 1e-5
Aggregation = Literal["none", "simple", "first", "average", "max"]


def relative_error(ours: NDArray[np.number], theirs: NDArray[np.floating]) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def limit_of(client: shoal.Client, name: str) -> int:
    card = client.models.load(name).card
    assert card is not None
    return card.max_tokens


@lru_cache
def reference(kind: str, head: Head, labels: tuple[str, ...] = ("LABEL_0",)) -> Any:
    """Load transformers' model with the checkpoint's weights."""
    return random_model(
        kind, head=head, labels=labels, config={} if head == "base" else head_config(kind)
    )


def encoded(kind: str, directory: Path, *texts: str, limit: int) -> Mapping[str, torch.Tensor]:
    """Return the model's inputs. A tokenizer may offer token types to a model without them."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    fields = tokenizer(
        *texts,
        truncation="only_second" if len(texts) == 2 else True,
        max_length=limit,
        return_tensors="pt",
    )
    return {
        name: tensor
        for name, tensor in fields.items()
        if name != "token_type_ids" or RECIPES[kind].segmented
    }


@torch.inference_mode()
def hidden_states(kind: str, directory: Path, text: str, limit: int) -> torch.Tensor:
    """Return transformers' hidden states, [tokens, hidden]."""
    return torch.as_tensor(
        reference(kind, "base")(**encoded(kind, directory, text, limit=limit)).last_hidden_state[0]
    )


@torch.inference_mode()
def logits(
    kind: str, directory: Path, labels: tuple[str, ...], *texts: str, limit: int
) -> NDArray[np.float32]:
    model = reference(kind, "sequence_classification", labels)
    return np.asarray(
        model(**encoded(kind, directory, *texts, limit=limit)).logits[0].numpy(), dtype=np.float32
    )


@pytest.mark.parametrize("kind", KINDS)
def test_pooled_vectors(kind: str, client: shoal.Client, checkpoints: Path) -> None:
    name = f"random/{kind}-embed"
    limit = limit_of(client, name)
    ours = client.encode(name, TEXTS).dense
    assert ours is not None
    rows = [
        torch.nn.functional.normalize(
            hidden_states(kind, checkpoints / name, text, limit).mean(0), dim=0
        )
        for text in TEXTS
    ]
    assert relative_error(ours, torch.stack(rows).numpy()) <= BOUND


def test_static_embedder(client: shoal.Client, checkpoints: Path) -> None:
    read = [
        text for text in STATIC_TEXTS if text
    ]  # an item without text is refused before it reaches a worker
    ours = client.encode("random/model2vec-embed", read).dense
    assert ours is not None
    assert (
        relative_error(ours, model2vec_vectors(checkpoints / "random" / "model2vec-embed", read))
        <= BOUND
    )


def test_late_interaction_of_short_convolutions(
    client: shoal.Client, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyLate's layout. Convolutions read the tokens that expand a query, as in training."""
    name = "random/lfm2-colbert"
    theirs = MultiVectorEncoder(str(checkpoints / name), device="cpu")
    monkeypatch.setattr(modeling_lfm2, "apply_mask_to_padding_states", lambda states, _: states)
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS)
    found = (client.encode(name, TEXTS, role="query"), client.encode(name, TEXTS, role="document"))
    for ours, each in zip(found, (queries, documents), strict=True):
        assert ours.multi_vector is not None
        assert len(ours.multi_vector) == len(TEXTS)
        values = np.asarray(ours.multi_vector.values)
        assert relative_error(values, torch.cat(list(each)).numpy()) <= BOUND
    wanted = theirs.similarity(queries[:1], documents)[0].numpy()
    assert relative_error(client.score(name, TEXTS[0], TEXTS).scores, wanted) <= BOUND


@pytest.mark.parametrize("name", HUB)
def test_pooled_vectors_of_hub_families(
    name: str, client: shoal.Client, checkpoints: Path, tmp_path: Path
) -> None:
    """The reference is the forward pass in reference_hub.py."""
    directory = checkpoints / "random" / f"{name}-embed"
    state = write_hub(HUB[name], tmp_path, hub_config(name))
    ours = client.encode(f"random/{name}-embed", TEXTS).dense
    assert ours is not None
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    rows = []
    for text in TEXTS:
        ids = torch.tensor(tokenizer(text, truncation=True, max_length=64)["input_ids"])
        hidden = HUB[name].forward(state, hub_config(name), ids, torch.zeros_like(ids))
        rows.append(torch.nn.functional.normalize(hidden.mean(0), dim=0))
    assert relative_error(ours, torch.stack(rows).numpy()) <= BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_role_prepends_the_models_prompt(kind: str, client: shoal.Client) -> None:
    name = f"random/{kind}-embed"
    asked, spelled = (
        client.encode(name, TEXTS, role="query").dense,
        client.encode(name, [f"find: {text}" for text in TEXTS]).dense,
    )
    assert asked is not None
    assert spelled is not None
    np.testing.assert_allclose(asked, spelled, atol=1e-6)


@pytest.mark.parametrize("kind", RANKED)
def test_cross_encoder_logits(kind: str, client: shoal.Client, checkpoints: Path) -> None:
    name = f"random/{kind}-rank"
    ours = client.score(name, TEXTS[0], TEXTS[1:], scale="logit").scores
    limit = limit_of(client, name)
    theirs = np.stack(
        [
            logits(kind, checkpoints / name, ("LABEL_0",), TEXTS[0], text, limit=limit)[0]
            for text in TEXTS[1:]
        ]
    )
    assert relative_error(ours, theirs) <= BOUND


@pytest.mark.parametrize("kind", RANKED)
def test_label_probabilities(kind: str, client: shoal.Client, checkpoints: Path) -> None:
    name = f"random/{kind}-classes"
    answers = client.classify(name, TEXTS)
    limit = limit_of(client, name)
    for answer, text in zip(answers.results, TEXTS, strict=True):
        theirs = (
            torch.from_numpy(logits(kind, checkpoints / name, CLASSES, text, limit=limit))
            .softmax(0)
            .numpy()
        )
        ours = {label.label: label.score for label in answer.labels}
        assert relative_error(np.array([ours[label] for label in CLASSES]), theirs) <= BOUND


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", TAGGED)
def test_entities(
    kind: str, aggregation: Aggregation, client: shoal.Client, checkpoints: Path
) -> None:
    name = f"random/{kind}-entities"
    directory = checkpoints / name
    pipeline = transformers.pipeline(
        "token-classification",
        model=reference(kind, "token_classification", LABELS),
        tokenizer=transformers.AutoTokenizer.from_pretrained(directory),
        aggregation_strategy=aggregation,
    )
    answers = client.entities(name, TEXTS, aggregation=aggregation, flat=False)
    for answer, text in zip(answers.results, TEXTS, strict=True):
        theirs: list[object] = [
            (found["start"], found["end"], found.get("entity_group", found.get("entity")))
            for found in pipeline(text)
        ]
        assert [(found.start, found.end, found.label) for found in answer.entities] == theirs
        assert all(found.text == text[found.start : found.end] for found in answer.entities)

"""Fifty models of all families on one worker, used concurrently for encode, score and extract. Each
answers as it does alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shoal
import torch
from numpy.typing import NDArray
from torch import Tensor

from libs.catalog.card import Card, Task
from libs.catalog.detect import read_card
from libs.models import (
    ClassifyWork,
    EncodeResult,
    EncodeWork,
    EntitiesWork,
    ExtractResult,
    Output,
    PackedModel,
    Result,
    ScoreResult,
    ScoreWork,
    Work,
    load_model,
    with_truncation,
)
from libs.models.layers.experts import Experts, GatedExperts
from services.worker.machine.disk import listing
from services.worker.settings import Shelf
from tests.mesh.test_families import relative_error
from tests.models.restoring import restore
from tests.parity.recipes import RECIPES
from tests.parity.reference_hub import HUB
from tests.support.cluster import Cluster
from tests.support.texts import texts
from tests.support.waiting import wait_until

REQUESTS = 300
MIN_ROUTING_MARGIN = 1e-5
"""Smallest difference between the router's logits (of size 1) of a token's last chosen and first
unchosen expert at which rounding in float32 cannot exchange the two.
"""
MAX_TIES = 3
"""Maximum number of requests with a token below this margin. One of the fixed texts has 7.6e-7."""
TEXTS = tuple(
    text for text in texts(400, shortest=1, longest=15, seed=50) if len(text) <= 100
)  # a token has at least a character, and the smallest model reads 128


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    task: Task
    texts: tuple[str, ...]


@pytest.fixture(scope="module")
def cards(checkpoints: Path) -> dict[str, Card]:
    """Return the cards of at least fifty models of all families."""
    cards = {
        model: read_card(directory, model)
        for model, directory in listing((Shelf(checkpoints),)).items()
    }
    assert len(cards) >= 50
    assert set(RECIPES) <= {card.family for card in cards.values()}
    assert {f"random/{name}-embed" for name in HUB} <= cards.keys()
    return cards


def requests(cards: dict[str, Card]) -> list[Request]:
    """Request every task of every model, the rest at random, in random order."""
    drawn = random.Random(50)
    wanted = [
        (model, task) for model, card in cards.items() for task in card.tasks if task != "relations"
    ]
    wanted += [drawn.choice(wanted) for _ in range(REQUESTS - len(wanted))]
    drawn.shuffle(wanted)
    return [
        Request(model, task, tuple(drawn.choices(TEXTS, k=drawn.randint(2, 6))))
        for model, task in wanted
    ]


def labels_of(card: Card) -> tuple[str, ...]:
    return () if card.labels else ("law", "software", "weather")


def numbers(request: Request, card: Card, client: shoal.Client) -> NDArray[np.float32]:
    """Return the answer's numbers in one row."""
    if request.task == "encode":
        answer = client.encode(request.model, list(request.texts), role="document")
        if "sparse" in answer.representations:
            return np.asarray(answer.sparse.data, dtype=np.float32)
        return np.ravel(
            answer.multi_vector.values if "multi_vector" in answer.representations else answer.dense
        )
    if request.task == "score":
        return np.asarray(
            client.score(request.model, request.texts[0], list(request.texts[1:])).scores
        )
    if request.task == "classify":
        found = client.classify(request.model, list(request.texts), labels_of(card))
        return np.array(
            [
                score
                for item in found.results
                for _, score in sorted((one.label, one.score) for one in item.labels)
            ]
        )
    entities = client.entities(request.model, list(request.texts), labels_of(card)).results
    return np.array(
        [
            part
            for item in entities
            for one in item.entities
            for part in (one.start, one.end, one.score)
        ]
    )


@pytest.fixture
def routing_margins(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which each mixture of experts computed in this process adds the smallest
    margin of its tokens.

    A mixture of experts is not continuous. Where two experts of a token tie, the last bit of a
    product decides between them, and the text gets another vector.
    """
    margins: list[float] = []
    for kind in (Experts, GatedExperts):

        def whole(
            experts: Any, x: Tensor, compute: Callable[[Any, Tensor], Tensor] = kind.whole
        ) -> Tensor:
            ranked = experts.router.forward(x).topk(experts._used + 1, dim=-1).values
            margins.append(float((ranked[:, -2] - ranked[:, -1]).min()))
            return compute(experts, x)

        monkeypatch.setattr(kind, "whole", whole)
    return margins


def build_work(request: Request, card: Card) -> Work:
    items = list(request.texts)
    if request.task == "encode":
        return EncodeWork(items, role="document", truncation="default")
    if request.task == "score":
        return ScoreWork(items[0], items[1:], truncation="default")
    kind = ClassifyWork if request.task == "classify" else EntitiesWork
    return kind(items, labels_of(card), truncation="default")


def alone(model: PackedModel, request: Request) -> NDArray[np.float32]:
    """Compute the same in this process, alone in its batch."""
    prepared = model.prepare(with_truncation(build_work(request, model.card), model.card))
    outputs: dict[int, Output] = {}
    for (
        head,
        indices,
    ) in prepared.groups().items():  # queries and documents may have separate encoders
        found = model.forward(head, [prepared.sequences[index] for index in indices])
        outputs |= dict(zip(indices, found, strict=True))
    return flat(model.finish(prepared, [outputs[index] for index in range(len(outputs))]))


def flat(result: Result) -> NDArray[np.float32]:
    match result:
        case EncodeResult():
            stored = result.dense or (result.multi_vector or result.sparse).values  # type: ignore[union-attr]
            return np.ravel(restore(stored))
        case ScoreResult():
            return result.scores
        case ExtractResult():
            labels = [
                score
                for item in result.items
                for _, score in sorted((one.label, one.score) for one in item.labels)
            ]
            entities = [
                part
                for item in result.items
                for one in item.entities
                for part in (one.start, one.end, one.score)
            ]
            return np.array(labels + entities)
        case _:
            raise TypeError(f"no model of these answers with a {type(result).__name__}")


def test_fifty_models_on_one_worker_answer_as_alone(
    mesh: Cluster, cards: dict[str, Card], checkpoints: Path, routing_margins: list[float]
) -> None:
    asked = requests(cards)
    with shoal.Client(
        mesh.address, timeout=600.0
    ) as client:  # correct answers matter, not fast ones
        with ThreadPoolExecutor(24) as pool:
            answers = list(
                pool.map(lambda request: numbers(request, cards[request.model], client), asked)
            )

        def resident() -> int:
            return sum(model.state == "resident" for model in client.models.list())

        wait_until(lambda: resident() >= 50, 60, "fifty models to be reported")
    assert len(answers) == REQUESTS
    models = {
        model: load_model(checkpoints / model, model, torch.device("cpu"), torch.float32)
        for model in cards
    }
    ties = []
    for request, answer in zip(asked, answers, strict=True):
        routing_margins.clear()
        wanted = alone(models[request.model], request)
        assert answer.shape == wanted.shape, request
        if min(routing_margins, default=1.0) < MIN_ROUTING_MARGIN:
            ties.append(request)
        elif wanted.size:
            # A score near 0 is a difference of larger numbers and has their error: 0.0208 once
            # differed by 3.3e-7.
            apart = np.abs(answer - wanted).max()
            assert relative_error(answer, wanted) <= 1e-5 or (
                request.task == "score" and apart <= 1e-6
            ), request
    assert len(ties) <= MAX_TIES, ties
    assert mesh.processes["worker-0"].poll() is None

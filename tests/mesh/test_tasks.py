"""jina-embeddings-v3 as published, through the whole mesh: its tasks by gRPC and by HTTP, mixed and
unknown ones.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import shoal
import shoal.errors

from services.edge.app import running
from services.edge.settings import Settings
from tests.edge.parts import Http
from tests.parity.jina_models import TASKS, FakeJinaV3, write_jina_v3
from tests.support.cluster import Cluster
from tests.support.waiting import wait_until

MODEL = "jinaai/jina-embeddings-v3"
TEXTS = [
    "a boat",
    "many small boats in one harbour",
    "shoal: a large number of fish that swim together",
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def v3(shelf: Path) -> FakeJinaV3:
    return write_jina_v3(shelf / MODEL)


@pytest.fixture(scope="module")
def cluster(
    shelf: Path, v3: FakeJinaV3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("mesh")
    with Cluster(
        directory, models=str(shelf), environment={"SHOAL_ADAPTERS": "1"}
    ) as running_cluster:
        yield running_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[shoal.Client]:
    with shoal.Client(cluster.address) as connected:
        yield connected


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[Http]:
    settings = Settings(
        edge_id="edge",
        address="127.0.0.1:0",
        routers=tuple(cluster.addresses),
        deadline_seconds=60.0,
    )
    async with running(settings) as address:
        yield Http(address)


def worst(found: Any, wanted: Any) -> float:
    return float(np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max())


def test_roles_and_named_tasks_are_served_concurrently(
    client: shoal.Client, v3: FakeJinaV3
) -> None:
    def error(named: tuple[Literal["query", "document"] | None, str]) -> float:
        role, task = named
        wanted = v3.encode(
            TEXTS,
            {"query": "retrieval.query", "document": "retrieval.passage"}.get(role or "", task),
        )
        got = client.encode(MODEL, TEXTS, role=role, adapter=task, timeout=60).dense
        return worst(got, wanted)

    asked: list[tuple[Literal["query", "document"] | None, str]] = [
        (None, ""),
        ("query", ""),
        ("document", ""),
    ]
    asked = [*asked, *((None, task) for task in TASKS)] * 4
    with ThreadPoolExecutor(len(asked)) as pool:
        assert max(pool.map(error, asked)) <= 1e-5


def test_score_is_the_cosine_of_query_and_passages(client: shoal.Client, v3: FakeJinaV3) -> None:
    got = client.score(MODEL, TEXTS[0], TEXTS[1:], timeout=60).scores
    assert (
        worst(
            got,
            v3.encode(TEXTS[1:], "retrieval.passage") @ v3.encode(TEXTS[:1], "retrieval.query")[0],
        )
        <= 1e-5
    )


def test_unknown_task_is_refused_with_the_models_tasks(
    client: shoal.Client, v3: FakeJinaV3
) -> None:
    with pytest.raises(
        shoal.errors.InvalidInput,
        match=r"'summary'; it has retrieval\.query, .*text-matching",
    ) as raised:
        client.encode(MODEL, TEXTS, adapter="summary", timeout=30)
    assert raised.value.field == "adapter"
    assert worst(client.encode(MODEL, TEXTS, timeout=30).dense, v3.encode(TEXTS)) <= 1e-5


def test_tasks_in_use_are_listed_as_adapters(client: shoal.Client) -> None:
    client.encode(MODEL, TEXTS, adapter="separation", timeout=60)
    wait_until(lambda: "separation" in client.models.list()[0].places[0].adapters, 60, "the report")


@pytest.mark.parametrize("task", TASKS)
async def test_http_selects_by_jina_task(task: str, http: Http, v3: FakeJinaV3) -> None:
    reply = await http.post(
        "/v1/embeddings", {"model": MODEL, "input": TEXTS, "task": task, "dimensions": 32}
    )
    wanted = v3.encode(TEXTS, task)[:, :32]
    wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    assert worst([entry["embedding"] for entry in reply.json["data"]], wanted) <= 1e-5


async def test_http_refuses_an_unknown_task_and_names_the_field(http: Http) -> None:
    reply = await http.post("/v1/embeddings", {"model": MODEL, "input": TEXTS, "task": "summary"})
    assert (reply.status, reply.json["error"]["param"]) == (400, "task")
    assert "text-matching" in reply.json["error"]["message"]

"""The examples, shortened, against one mesh: each runs, and is no worse than when it was written.

The floors are what was measured on 2026-11-23 with the bundled model, less 0.02 for other CPUs; those of the pages, which change, less
0.06. A floor is never lowered because a change made an example worse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import networkx
import pytest

from examples import common, graph, rag, taxonomy
from examples.common import Advice
from services.local.settings import MINILM, packaged_minilm
from tests.parity.gliner_models import make_reference
from tests.support.cluster import Cluster

GLINER = "random/gliner"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A mesh with MiniLM and a random GLiNER, whose entities mean nothing."""
    models = tmp_path_factory.mktemp("models")
    reference = make_reference(models / "random" / "gliner", {"span_mode": "markerV0"})
    entries = f"{MINILM}={packaged_minilm()}:{GLINER}={reference.directory}"
    with Cluster(tmp_path_factory.mktemp("mesh"), models=entries, dtype="auto") as cluster:
        yield cluster.address


@pytest.fixture
def run(endpoint: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs an example with options; its JSON."""

    def one(example: Any, *options: str) -> Any:
        assert example.main(["--endpoint", endpoint, "--json", *options]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return one


def test_taxonomy(run: Any) -> None:
    found = run(taxonomy, "--categories", "1500", "--limit", "60", "--candidates", "10")
    assert (found["categories"], found["items"]) == (1500, 60)
    alone, reranked, classified = found["stages"]
    print(found)
    assert alone["accuracy_1"] >= 1


def test_graph(run: Any, tmp_path: Path) -> None:
    found = run(graph, "--limit", "120", "--output", str(tmp_path / "made" / "graph"), "--query", "France")
    print(found)
    assert found["how"].startswith("No extractor")
    drawn = networkx.read_graphml(tmp_path / "made" / "graph.graphml", force_multigraph=True)
    assert (len(drawn), drawn.number_of_edges()) == (found["entities"], found["relations"])
    assert found["query"][0]["relation"] == drawn.get_edge_data(found["query"][0]["head"], found["query"][0]["tail"])[0]["relation"]
    page = (tmp_path / "made" / "graph.html").read_text()
    assert not re.findall(r"(?:src|href)=|https?://|@import|/\*GRAPH\*/", page)
    assert found["quality"]["kind_accuracy"] >= 1


def test_rag(run: Any) -> None:
    found = run(rag, "--limit", "12", "--candidates", "10")
    print(found)
    assert found["stages"]["dense"]["ndcg_10"] >= 1

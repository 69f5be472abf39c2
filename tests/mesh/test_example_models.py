"""The examples with models of other kinds: random ones, so only the flow is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import graph, rag, taxonomy
from tests.mesh.conftest import RANKED, TAGGED
from tests.support.cluster import Cluster

RANKER = f"random/{RANKED[0]}-rank"
TAGGER = f"random/{TAGGED[0]}-entities"


def run(mesh: Cluster, capsys: pytest.CaptureFixture[str], example: Any, *options: str) -> Any:
    assert example.main(["--endpoint", mesh.address, "--json", *options]) == 0, (
        capsys.readouterr().err
    )
    return json.loads(capsys.readouterr().out)


def test_extractor(mesh: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = (
        "--extractor",
        TAGGER,
        "--labels",
        "PER,ORG",
        "--threshold",
        "0",
        "--limit",
        "20",
        "--output",
        str(tmp_path / "graph"),
    )
    found = run(mesh, capsys, graph, *options)
    assert found["how"].startswith(f"Entities extracted by {TAGGER}")
    assert found["entities"] > 0
    assert (tmp_path / "graph.html").exists()


def test_reranker(mesh: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(mesh, capsys, rag, "--pages", "docs/adapters.md", "--reranker", RANKER)
    assert found["questions"] == 3
    assert found["stages"]["dense"]["ndcg_10"] > found["stages"]["reranked"]["ndcg_10"]
    found = run(
        mesh,
        capsys,
        taxonomy,
        "--categories",
        "100",
        "--limit",
        "10",
        "--candidates",
        "5",
        "--reranker",
        RANKER,
    )
    assert found["items"] == 10

"""The examples, shortened, against one mesh: each runs, and is no worse than when it was written.

Floors are the results of 2026-11-23 with the bundled model, less 0.04: a CPU without bfloat16
gives other last digits, and one item of 40 is 0.025. The pages change, so those of rag have 0.08.
Whoever changes an example or a page keeps them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx
import pytest

from examples import chunks, graph, migration, rag, taxonomy
from examples.common import DATA, MINILM, Advice
from services.local.settings import free_port, packaged_minilm
from tests.support.cluster import Cluster

PAGES = ("docs/api.md", "docs/adapters.md", "docs/quickstart.md", "docs/runbooks.md")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cut = tmp_path_factory.mktemp("cut")
    migration.write_cut_model(cut)
    models = f"{MINILM}={packaged_minilm()}:{migration.CUT_MODEL}={cut}"
    with Cluster(tmp_path_factory.mktemp("mesh"), models=models, dtype="auto") as cluster:
        yield cluster.address


@pytest.fixture
def run(endpoint: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example with options and return its standard output."""

    def one(example: Any, *options: str) -> Any:
        assert example.main(["--endpoint", endpoint, *options]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return one


def test_taxonomy(run: Any) -> None:
    found = json.loads(
        run(taxonomy, "--categories", "1000", "--limit", "40", "--candidates", "8", "--json")
    )
    assert (found["categories"], found["items"]) == (1000, 40)
    alone, reranked, classified = found["stages"]
    assert alone["accuracy_1"] >= 0.21
    assert reranked["accuracy_1"] >= 0.26
    assert classified["accuracy_1"] >= 0.285
    assert classified["branch"] >= 0.76


def test_graph(run: Any, tmp_path: Path) -> None:
    options = ("--limit", "100", "--output", str(tmp_path / "made" / "graph"), "--query", "France")
    found = json.loads(run(graph, *options, "--json"))
    assert found["how"].startswith("No extractor")
    drawn = networkx.read_graphml(tmp_path / "made" / "graph.graphml", force_multigraph=True)
    assert (len(drawn), drawn.number_of_edges()) == (found["entities"], found["relations"])
    best = found["query"][0]
    assert "France" in (best["head"], best["tail"])
    assert drawn.get_edge_data(best["head"], best["tail"])[0]["relation"] == best["relation"]
    page = (tmp_path / "made" / "graph.html").read_text()
    assert best["text"] in page
    assert not re.findall(r"(?:src|href)=|https?://|@import|/\*GRAPH\*/", page)
    quality = found["quality"]
    assert quality["kind_accuracy"] >= 0.737
    assert quality["is_in_precision"] >= 0.717
    assert quality["is_in_recall"] >= 0.664


def test_migration(run: Any) -> None:
    options = ("--to", migration.CUT_MODEL, "--pages", PAGES[1], "--limit", "10")
    found = json.loads(run(migration, *options, "--json"))
    assert found["errors"] == []
    assert min(found["answers"].values()) >= 2 * migration.ANSWERS
    assert set(found["answers"]) == {MINILM, migration.CUT_MODEL}
    assert 0 < found["overlap_10"] < 1


def test_rag(run: Any) -> None:
    found = json.loads(run(rag, "--pages", *PAGES, "--candidates", "10", "--json"))
    assert found["questions"] >= 18
    quality = {stage: one["ndcg_10"] for stage, one in found["stages"].items()}
    assert quality["sparse"] >= 0.805
    assert quality["dense"] >= 0.789
    assert list(quality) == list(rag.STAGES)
    assert quality["late"] >= 0.6
    assert quality["hybrid"] >= 0.796
    assert quality["reranked"] >= 0.849


def test_chunks(run: Any) -> None:
    found = json.loads(run(chunks, "--pages", *PAGES, "--json"))
    assert found["questions"] >= 18
    assert list(found["kinds"]) == ["cut", "plain", "late", "contextual"]
    assert found["kinds"]["cut"]["vectors"] == found["pages"] == len(PAGES)
    for kind in ("plain", "late", "contextual"):
        one = found["kinds"][kind]
        assert one["vectors"] > 10 * len(PAGES)
        assert one["sections_ndcg_10"] >= 0.5, kind


def test_sections_of_a_chunk_are_ordered_by_their_parts() -> None:
    page = chunks.read_page("docs/a.md", DATA, "# A\n\none\n## B\n```\n# c\n```\n# C\nend")
    assert (page.title, page.headings, page.starts) == ("A", ("A", "B", "C"), (0, 9, 26))
    assert page.sections(0, 9) == ["docs/a.md > A"]
    assert page.sections(7, 26) == ["docs/a.md > B", "docs/a.md > A"]
    assert page.sections(0, len(page.text)) == [f"docs/a.md > {name}" for name in "BAC"]
    assert chunks.page_gains({"a > x": 1, "a > y": 2, "b > z": 1}) == {"a": 2, "b": 1}


def test_readable_output(run: Any, tmp_path: Path) -> None:
    said = run(rag, "--pages", "docs/runbooks.md", "--ask", "no scheduler is the leader")
    assert "ShoalNoLeader" in said
    said = run(graph, "--limit", "20", "--output", str(tmp_path / "graph"))
    assert "No extractor" in said
    assert "against WordNet" in said
    said = run(taxonomy, "--categories", "100", "--limit", "5", "--candidates", "5")
    assert "embedding alone" in said


def test_documents_of_ones_own(run: Any, tmp_path: Path) -> None:
    text = (
        "The ship carried Ada Lovelace to London.\n\nIn 1843 it was Ada Lovelace </script> who "
        "wrote to Charles Babbage.\x01"
    )
    (tmp_path / "letters.txt").write_text(text)
    options = (
        "--documents",
        str(tmp_path),
        "--labels",
        "person,city",
        "--relations",
        "went to,wrote to",
    )
    found = json.loads(
        run(
            graph,
            *options,
            "--output",
            str(tmp_path / "graph"),
            "--query",
            "Ada Lovelace",
            "--json",
        )
    )
    assert found["documents"] == 2
    assert found["quality"] == {}
    assert {edge["relation"] for edge in found["query"]} <= {"went to", "wrote to"}
    assert (tmp_path / "graph.html").read_text().count("</script>") == 1
    assert set(networkx.read_graphml(tmp_path / "graph.graphml")) >= {"Ada Lovelace", "London"}


def fails(capsys: pytest.CaptureFixture[str], example: Any, *options: str) -> str:
    assert example.main(options) == 1
    return " ".join(capsys.readouterr().err.split())


def test_errors_name_the_remedy(
    endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = ("--endpoint", endpoint)
    assert "`shoal up` starts one" in fails(
        capsys, taxonomy, "--endpoint", f"127.0.0.1:{free_port()}"
    )
    assert "SHOAL_MODELS=" in fails(
        capsys, taxonomy, *here, "--categories", "100", "--limit", "5", "--reranker", "no/such"
    )
    assert "docs/models.md" in fails(capsys, graph, *here, "--limit", "5", "--extractor", MINILM)
    assert "has no 'Atlantis'" in fails(
        capsys, graph, *here, "--limit", "9", "--output", str(tmp_path / "g"), "--query", "Atlantis"
    )
    assert "has no *.txt or *.md" in fails(
        capsys, graph, *here, "--documents", str(tmp_path / "none")
    )
    assert "--pages" in fails(capsys, rag, *here, "--pages", "docs/none-*.md")


def test_store_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rag.PACKAGES, "lancedb", ("no_such_module", "lancedb"))
    assert "pip install lancedb" in fails(capsys, rag, "--store", "lancedb")


def test_every_question_names_a_section(tmp_path: Path) -> None:
    library = rag.passages(rag.PAGES)
    assert len(rag.questions(DATA / "questions.tsv", library, 1_000)) >= 40
    (tmp_path / "questions.tsv").write_text("Where?\tdocs/api.md > Nowhere\t\n")
    with pytest.raises(
        Advice, match=r"questions\.tsv:1: section 'docs/api.md > Nowhere' does not exist"
    ):
        rag.questions(tmp_path / "questions.tsv", library, 1_000)


@pytest.mark.parametrize("example", [taxonomy, graph, rag, chunks])
def test_help(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "--endpoint" in capsys.readouterr().out

"""`shoal eval` through a mesh, with a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import shoal
from shoal.cli import main
from shoal.cli.evaluation.data import SimilarityPairs
from shoal.cli.evaluation.running import compare_pairs
from typer.testing import CliRunner

from services.local.settings import MINILM
from tests.api.test_evaluation import write_beir
from tests.support.cluster import Cluster

OTHERS = ("random/bert-embed", "random/bert-late")


def run(mesh: Cluster, *arguments: str) -> Any:
    result = CliRunner().invoke(
        main.build(), ["eval", *arguments, "--address", mesh.address, "--json"]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_real_model_finds_the_relevant_documents(mesh: Cluster, tmp_path: Path) -> None:
    (row,) = run(mesh, str(write_beir(tmp_path)), "--model", MINILM)
    assert (row["model"], row["nDCG@10"], row["recall@100"]) == (MINILM, 1.0, 1.0)
    assert row["tokens/s"] > 0
    assert row["p50 ms"] > 0
    assert row["bytes"] > 1_000_000


def test_reranker_has_a_separate_row(mesh: Cluster, tmp_path: Path) -> None:
    reranker = "random/bert-rank"
    rows = run(mesh, str(write_beir(tmp_path)), "--model", MINILM, "--reranker", reranker)
    assert [row["model"] for row in rows] == [MINILM, f"{MINILM} + {reranker}"]
    assert rows[1]["recall@100"] == 1.0
    assert rows[1]["bytes"] > rows[0]["bytes"]


def test_models_are_compared_without_labels(mesh: Cluster, tmp_path: Path) -> None:
    write_beir(tmp_path)
    (tmp_path / "qrels" / "test.tsv").unlink()
    others = [argument for name in OTHERS for argument in ("--model", name)]
    rows = run(mesh, str(tmp_path), "--without-labels", "--model", MINILM, *others)
    assert rows[0]["model"] == f"{MINILM} : {OTHERS[0]}"
    assert len(rows) == 3
    assert all(row["overlap@10"] == 1.0 and 0 < row["rank-biased overlap"] <= 1 for row in rows)


def test_scored_pairs_give_a_correlation_and_a_plot(mesh: Cluster, tmp_path: Path) -> None:
    pairs = [
        ("a cat sleeps", "a kitten naps", 4.5),
        ("a cat sleeps", "a dog barks", 2.0),
        ("a cat sleeps", "stocks fell", 0.0),
    ]
    lines = [
        json.dumps({"sentence1": one, "sentence2": two, "score": score})
        for one, two, score in pairs
    ]
    (tmp_path / "sts.jsonl").write_text("\n".join(lines))
    plot = tmp_path / "plot.svg"
    (row,) = run(mesh, str(tmp_path / "sts.jsonl"), "--model", MINILM, "--plot", str(plot))
    assert row["Spearman x 100"] == pytest.approx(100)
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "a.gif"], "must end in .png or .svg"),
        (["--without-labels"], "give two"),
    ],
)
def test_invalid_options_are_refused_before_the_run(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    command = [
        "eval",
        str(write_beir(tmp_path)),
        "--model",
        MINILM,
        *arguments,
        "--address",
        "127.0.0.1:1",
    ]
    result = CliRunner().invoke(main.build(), command)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("model", [MINILM, "random/bert-late"])
def test_sentence_of_several_pairs_is_encoded_once(
    client: shoal.Client, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    sentences = ["a cat sleeps", "a kitten naps", "stocks fell in London"]
    pairs = SimilarityPairs(
        [sentences[0], sentences[0], sentences[2]],
        [sentences[1], sentences[2], sentences[1]],
        [3.0, 0.0, 0.0],
    )
    alone = [
        compare_pairs(client, model, SimilarityPairs([one], [two], [0.0]), print).similarities[0]
        for one, two in zip(pairs.first, pairs.second, strict=True)
    ]
    sent: list[str] = []
    encode = client.encode

    def recorded(model: str, items: list[str]) -> shoal.EncodeResult:
        sent.extend(items)
        return encode(model, items)

    monkeypatch.setattr(client, "encode", recorded)
    found = compare_pairs(client, model, pairs, print)
    assert sorted(sent) == sorted(sentences)
    assert found.similarities == pytest.approx(alone, abs=1e-5)

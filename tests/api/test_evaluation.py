"""The numbers and files of `shoal eval`, against scikit-learn, SciPy and values computed by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from scipy.stats import spearmanr
from shoal.cli.evaluation import data, metrics
from sklearn.metrics import ndcg_score

KEYS = [f"d{number}" for number in range(30)]


@pytest.mark.parametrize("seed", range(5))
def test_ndcg_is_that_of_scikit_learn(seed: int) -> None:
    random = np.random.default_rng(seed)
    grades, scores = random.integers(0, 5, len(KEYS)), random.permutation(len(KEYS)).astype(float)
    ranking = [KEYS[place] for place in np.argsort(-scores)]
    found = metrics.ndcg(ranking, dict(zip(KEYS, map(int, grades), strict=True)), 10)
    assert found == pytest.approx(ndcg_score([grades], [scores], k=10))


def test_ndcg_counts_negative_grades_as_zero_and_documents_that_were_not_found() -> None:
    assert metrics.ndcg(["a", "b"], {"a": -1, "b": 2, "c": 1}, 10) == pytest.approx(
        (2 / np.log2(3)) / (2 + 1 / np.log2(3))
    )
    assert metrics.ndcg([], {"a": 1}, 10) == 0


def test_recall_is_the_share_of_relevant_documents_within_the_depth() -> None:
    assert metrics.recall(["a", "x", "b", "c"], {"a": 1, "b": 2, "c": 1, "d": 1, "x": 0}, 3) == 0.5


def test_overlap_ignores_the_order() -> None:
    assert metrics.overlap(["a", "b", "c"], ["c", "a", "x"], 3) == pytest.approx(2 / 3)
    assert metrics.overlap(["a"], ["a"], 10) == 1


def test_rank_biased_overlap_is_the_value_computed_by_hand() -> None:
    # Agreements at ranks 1, 2 and 3: 0/1, 2/2, 2/3.
    by_hand = 2 / 3 * 0.9**3 + 0.1 / 0.9 * (0 * 0.9 + 1 * 0.9**2 + 2 / 3 * 0.9**3)
    assert metrics.rank_biased_overlap(["a", "b", "c"], ["b", "a", "x"], 3) == pytest.approx(
        by_hand
    )
    assert metrics.rank_biased_overlap(KEYS, KEYS, 30) == pytest.approx(1)
    assert metrics.rank_biased_overlap(KEYS[:15], KEYS[15:], 15) == 0


def test_spearman_is_that_of_scipy_with_ties() -> None:
    random = np.random.default_rng(0)
    one, two = random.integers(0, 6, 200).astype(float), random.standard_normal(200)
    assert metrics.spearman(list(one), list(one + two)) == pytest.approx(
        spearmanr(one, one + two).statistic
    )
    assert metrics.spearman([1.0, 1.0], [1.0, 2.0]) == 0


def write_beir(folder: Path) -> Path:
    """Three documents and three queries, of which the last has no relevant document."""
    (folder / "qrels").mkdir()
    texts = {
        "1": "The cat sat on the mat.",
        "2": "Stocks fell in London.",
        "3": "A kitten sleeps on a rug.",
    }
    documents = [{"_id": key, "title": "", "text": text} for key, text in texts.items()]
    queries = [
        {"_id": "a", "text": "a sleeping cat"},
        {"_id": "b", "text": "share prices"},
        {"_id": "c", "text": "rain"},
    ]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)) + "\n\n")
    (folder / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\na\t3\t2\na\t1\t1\nb\t2\t1\nc\t1\t0\n"
    )
    return folder


def test_beir_files_are_read_without_queries_that_have_no_relevant_document(tmp_path: Path) -> None:
    found = data.read_retrieval(write_beir(tmp_path), "test", with_labels=True)
    assert found.documents["1"] == "The cat sat on the mat."
    assert list(found.queries) == ["a", "b"]
    assert found.judgements["a"] == {"3": 2, "1": 1}
    assert list(data.read_retrieval(tmp_path, "test", with_labels=False).queries) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("corpus.jsonl", '{"text": "no id"}', "line 1 has no `_id`"),
        ("corpus.jsonl", '{"_id": "1"}\n{"_id": "1"}', "line 2 has no `_id`"),
        ("queries.jsonl", "[1]", "line 1 is not a JSON object"),
        ("queries.jsonl", "{", "line 1 is not JSON"),
        ("qrels/test.tsv", "a\t1\tx\na", "line 1 is not query-id"),
        ("qrels/test.tsv", "z\t1\t1", "no query with a relevant document"),
    ],
)
def test_files_that_are_not_in_beirs_layout_are_refused_by_line(
    file: str, text: str, named: str, tmp_path: Path
) -> None:
    (write_beir(tmp_path) / file).write_text(text)
    with pytest.raises(typer.BadParameter, match=named):
        data.read_retrieval(tmp_path, "test", with_labels=True)


def test_line_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_LINE_CHARACTERS", 20)
    with pytest.raises(typer.BadParameter, match="a line has more than 20 characters"):
        data.read_retrieval(write_beir(tmp_path), "test", with_labels=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sts.csv", '"a, b",c,2.5\nd,e,0\n'),
        ("sts.tsv", "sentence1\tsentence2\tscore\na, b\tc\t2.5\nd\te\t0\n"),
        (
            "sts.jsonl",
            (
                '{"sentence1": "a, b", "sentence2": "c", "score": 2.5}\n{"sentence1": "d", '
                '"sentence2": "e", "score": 0}'
            ),
        ),
    ],
)
def test_scored_pairs_are_read_in_three_forms(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert data.read_pairs(tmp_path / name) == data.SimilarityPairs(
        ("a, b", "d"), ("c", "e"), (2.5, 0.0)
    )
    (tmp_path / name).write_text(text.replace("2.5", '"high"'))
    with pytest.raises(typer.BadParameter, match="pair 1 is not two sentences and a score"):
        data.read_pairs(tmp_path / name)

"""Labels of the request through the whole mesh: a natural language inference model, GLiClass and
laya.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import shoal
import transformers
from shoal.errors import InvalidInput

from tests.mesh.conftest import CLASSES
from tests.parity import test_gliclass as package
from tests.parity import test_laya as laya

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

TEXTS = ["Each licensee is addressed as you.", "Programs, GPL; warranty (none)!", "a"]


def found(answer: shoal.Extraction) -> dict[str, float]:
    return {label.label: label.score for label in answer.labels}


@pytest.mark.parametrize("multi_label", [False, True])
def test_labels_by_hypotheses(multi_label: bool, client: shoal.Client, checkpoints: Path) -> None:
    name, labels = "random/bert-classes", ["law", "the weather of tomorrow"]
    pipeline = transformers.pipeline(
        "zero-shot-classification", str(checkpoints / name), device="cpu"
    )
    theirs = cast(
        "list[dict[str, Any]]", pipeline(TEXTS, candidate_labels=labels, multi_label=multi_label)
    )
    assert {
        label for answer in client.classify(name, TEXTS).results for label in found(answer)
    } == set(CLASSES)
    ours = client.classify(name, TEXTS, labels, multi_label=multi_label)
    for answer, expected in zip(ours.results, theirs, strict=True):
        assert found(answer) == pytest.approx(
            dict(zip(expected["labels"], expected["scores"], strict=True)), rel=1e-4
        )


def test_gliclass(client: shoal.Client, checkpoints: Path) -> None:
    model, tokenizer = package.write(checkpoints / "random/gliclass", {"scorer_type": "mlp"})
    theirs = package.reference(model, tokenizer, TEXTS, multi_label=True, limit=1024)
    ours = client.classify("random/gliclass", TEXTS, package.LABELS, multi_label=True)
    for answer, expected in zip(ours.results, theirs, strict=True):
        assert found(answer) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(InvalidInput) as refused:
        client.classify("random/gliclass", TEXTS, [])
    assert refused.value.field == "classify.labels"


def test_laya(client: shoal.Client, checkpoints: Path) -> None:
    reference = laya.write(checkpoints / "random/laya")
    ours = client.classify("random/laya", TEXTS, laya.LABELS)
    for answer, text in zip(ours.results, TEXTS, strict=True):
        assert found(answer) == pytest.approx(reference.scores(text, laya.LABELS, 1.5), rel=1e-4)
    with pytest.raises(InvalidInput) as refused:
        client.classify("random/laya", TEXTS, laya.LABELS, multi_label=True)
    assert refused.value.field == "classify.multi_label"

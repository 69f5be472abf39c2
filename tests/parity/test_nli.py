"""Labels by hypotheses against transformers' zero-shot-classification pipeline, on random
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import transformers

from libs.errors import InputTooLong, InvalidInput, TaskNotSupported
from libs.models import ClassifyWork, ExtractResult, PackedModel, ScoreWork, Truncation
from tests.parity.checkpoints import Kind, write_checkpoint
from tests.parity.test_heads import TEXTS, load, run

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

LABELS = (
    "law",
    "the weather of tomorrow",
    "copying of free programs and what comes with them",
    "law",
)
ORDERS = {
    "contradiction first": ("contradiction", "entailment", "neutral"),
    "entailment first": ("ENTAILMENT", "NEUTRAL", "CONTRADICTION"),
    "two classes": ("entailment", "not_entailment"),
    "entailment last": ("contradiction", "neutral", "entailment"),
}


def nli(
    directory: Path,
    kind: Kind = "deberta-v2",
    classes: tuple[str, ...] = ORDERS["contradiction first"],
) -> PackedModel:
    return load(
        write_checkpoint(
            kind, directory, head="sequence_classification", labels=classes, positions=64
        )
    )


def labels(model: PackedModel, work: ClassifyWork) -> list[list[tuple[str, float]]]:
    result = run(model, work)[0]
    assert isinstance(result, ExtractResult)
    return [[(item.label, item.score) for item in found.labels] for found in result.items]


def check_equal(directory: Path, model: PackedModel, work: ClassifyWork, **wishes: object) -> None:
    pipeline = transformers.pipeline("zero-shot-classification", str(directory), device="cpu")
    # Equal labels cannot be distinguished, so they are compared by their scores.
    theirs = cast(
        "list[dict[str, Any]]", pipeline(work.texts, candidate_labels=list(work.labels), **wishes)
    )
    for ours, expected in zip(labels(model, work), theirs, strict=True):
        assert [name for name, _ in ours] == expected["labels"]
        assert [score for _, score in ours] == pytest.approx(expected["scores"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("classes", ORDERS.values(), ids=ORDERS.keys())
def test_labels_equal_the_pipeline(
    classes: tuple[str, ...], multi_label: bool, tmp_path: Path
) -> None:
    """One of the texts is truncated, and by more tokens for some hypotheses than for others."""
    model = nli(tmp_path, classes=classes)
    assert (
        max(item.tokens for item in model.prepare(ClassifyWork(TEXTS, LABELS)).sequences)
        == model.max_tokens
        == 64
    )
    check_equal(
        tmp_path,
        model,
        ClassifyWork(TEXTS, LABELS, multi_label=multi_label),
        multi_label=multi_label,
    )


@pytest.mark.parametrize("kind", ["bert", "roberta", "bart"])
def test_other_families_and_hypotheses_equal_the_pipeline(kind: Kind, tmp_path: Path) -> None:
    model = nli(tmp_path, kind)
    work = ClassifyWork(TEXTS, LABELS, hypothesis="It speaks of {}!")
    check_equal(tmp_path, model, work, hypothesis_template="It speaks of {}!")


def test_single_label_is_scored_against_contradiction(tmp_path: Path) -> None:
    model = nli(tmp_path)
    check_equal(tmp_path, model, ClassifyWork(TEXTS, ("law",)))
    assert all(0 < score < 1 for [(_, score)] in labels(model, ClassifyWork(TEXTS, ("law",))))


def test_labels_below_the_threshold_are_dropped(tmp_path: Path) -> None:
    model = nli(tmp_path)
    every = labels(model, ClassifyWork(TEXTS, LABELS, multi_label=True))
    kept = labels(model, ClassifyWork(TEXTS, LABELS, multi_label=True, threshold=0.5))
    assert kept == [[item for item in found if item[1] >= 0.5] for found in every]
    assert 0 < sum(map(len, kept)) < sum(map(len, every))


def test_request_without_labels_returns_the_models_classes(tmp_path: Path) -> None:
    model = nli(tmp_path)
    assert model.card.labels == ORDERS["contradiction first"]
    assert model.card.tasks == ("classify", "score")
    for found in labels(model, ClassifyWork(TEXTS)):
        assert {name for name, _ in found} == {"contradiction", "entailment", "neutral"}
        assert sum(score for _, score in found) == pytest.approx(1)


def test_tokens_count_the_text_once_for_each_label(tmp_path: Path) -> None:
    model = nli(tmp_path)
    prepared = model.prepare(ClassifyWork(["a", "a copy"], LABELS))
    assert len(prepared.sequences) == 2 * len(LABELS)
    assert prepared.tokens == sum(len(item.ids) for item in prepared.sequences)


@pytest.mark.parametrize("truncation", ["end", "start"])
def test_only_texts_are_truncated(truncation: Truncation, tmp_path: Path) -> None:
    model = nli(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tmp_path, truncation_side="right" if truncation == "end" else "left"
    )
    prepared = model.prepare(ClassifyWork(TEXTS, LABELS, truncation=truncation))
    pairs = [(text, f"This example is {label}.") for text in TEXTS for label in LABELS]
    theirs = tokenizer(
        *map(list, zip(*pairs, strict=True)), truncation="only_first", max_length=64
    )["input_ids"]
    assert [item.ids.tolist() for item in prepared.sequences] == theirs


def test_invalid_requests_are_refused_with_path(tmp_path: Path) -> None:
    model = nli(tmp_path)
    with pytest.raises(InvalidInput) as no_place:
        model.prepare(ClassifyWork(TEXTS, LABELS, hypothesis="It is law."))
    assert no_place.value.field == "classify.hypothesis"
    with pytest.raises(InputTooLong) as long_text:
        model.prepare(ClassifyWork(TEXTS, LABELS, truncation="none"))
    assert long_text.value.field == "items[3].text"
    with pytest.raises(InputTooLong) as long_label:
        model.prepare(ClassifyWork(TEXTS, ("law", "law " * 70)))
    assert long_label.value.field == "classify.labels[1]"


def test_model_with_one_logit_refuses_labels(tmp_path: Path) -> None:
    write_checkpoint("deberta-v2", tmp_path, head="sequence_classification", labels=("entailment",))
    model = load(tmp_path)
    assert model.card.contradiction is None
    regression = {"problem_type": "regression"}
    write_checkpoint(
        "bert",
        tmp_path / "regression",
        head="sequence_classification",
        labels=ORDERS["two classes"],
        config=regression,
    )
    with pytest.raises(TaskNotSupported):
        load(tmp_path / "regression").prepare(ClassifyWork(TEXTS, LABELS))
    assert len(load(tmp_path / "regression").prepare(ScoreWork("law", TEXTS)).sequences) == len(
        TEXTS
    )

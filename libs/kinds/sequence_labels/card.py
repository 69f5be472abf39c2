"""Cross-encoders and sequence classifiers, by the labels of config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from libs.catalog.card import (
    MAX_LABEL_CHARACTERS,
    MAX_LABELS,
    Activation,
    Card,
    Problem,
    Scoring,
    Task,
)
from libs.catalog.checkpoint.chat import takes_messages, with_template
from libs.catalog.checkpoint.checkpoint import Checkpoint
from libs.catalog.checkpoint.files import CheckpointConfig
from libs.catalog.checkpoint.modules import activation
from libs.kinds.kind import in_layout

_PROBLEMS: dict[str, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
_ENTAILED = "entail"
_POSITIVE_NAMES = ("positive", "relevant", "yes", "true", "1")


def read_classes(config: CheckpointConfig) -> tuple[str, ...]:
    """Return the names in id2label in the order of the logits; without names LABEL_0, LABEL_1 ...,
    as in transformers.
    """
    names = config.part("id2label").values
    if not names:
        return tuple(
            f"LABEL_{number}" for number in range(config.number("num_labels", 2, most=MAX_LABELS))
        )
    if len(names) > MAX_LABELS:
        raise config.broken(
            "id2label", f"has {len(names):,} entries; at most {MAX_LABELS:,} are served"
        )
    wanted = [str(number) for number in range(len(names))]
    if sorted(names, key=lambda key: (len(key), key)) != sorted(
        wanted, key=lambda key: (len(key), key)
    ):
        raise config.broken("id2label", f"must have the keys 0 to {len(names) - 1}")
    classes = tuple(str(names[number]) for number in wanted)
    if sum(map(len, classes)) > MAX_LABEL_CHARACTERS:
        raise config.broken(
            "id2label", f"has names of more than {MAX_LABEL_CHARACTERS:,} characters"
        )
    return classes


def sequence_labels(files: Checkpoint, card: Card) -> Card:
    """Return the card of a cross-encoder or classifier, with its chat template if pairs go through
    one.
    """
    classes, problem = read_classes(files.config), _problem(files.config)
    positive, contradiction = _positive(classes), _contradiction(classes)
    tasks: list[Task] = []
    # A regression has no probabilities, and a single class without a name is a reranker's.
    if problem != "regression" and classes != ("LABEL_0",):
        tasks.append("classify")
    if positive is not None:
        tasks.append("score")
    scoring: Scoring = "classifier" if positive is not None else ""
    card = replace(
        card,
        tasks=tuple(tasks),
        labels=classes if "classify" in tasks else (),
        classes=classes,
        problem=problem,
        scoring=scoring,
        positive=positive or 0,
        contradiction=contradiction,
        score_activation=_score_activation(files),
    )
    return with_template(files, card) if takes_messages(files) else card


def _problem(config: CheckpointConfig) -> Problem:
    name = config.text("problem_type")
    if name and name not in _PROBLEMS:
        raise config.broken(
            "problem_type", f"is {name!r}, which is not one of {', '.join(_PROBLEMS)}"
        )
    return _PROBLEMS.get(name, "single_label")


def _positive(classes: tuple[str, ...]) -> int | None:
    """Return the class for "relevant": the only one, "entailment", one with a name such as
    "positive", else the second of two.
    """
    lower = [name.lower() for name in classes]
    if len(lower) == 1:
        return 0
    named = [number for number, name in enumerate(lower) if name.startswith(_ENTAILED)]
    named += [number for number, name in enumerate(lower) if name in _POSITIVE_NAMES]
    if named:
        return named[0]
    return 1 if len(lower) == 2 else None


def _contradiction(classes: tuple[str, ...]) -> int | None:
    """Return the class opposite to "entailment", the first or else the last, as in transformers'
    ZeroShotClassificationPipeline.
    """
    entailed = next(
        (number for number, name in enumerate(classes) if name.lower().startswith(_ENTAILED)), None
    )
    if entailed is None or len(classes) < 2:
        return None
    return len(classes) - 1 if entailed == 0 else 0


def _score_activation(files: Checkpoint) -> Activation:
    """Return a cross-encoder's activation from where sentence-transformers 6, 4 and 3 store it, in
    that order; else the identity.
    """
    if files.top.text("activation_fn"):
        return activation(files.top, "activation_fn", "identity")
    if files.config.part("sentence_transformers").text("activation_fn"):
        return activation(files.config.part("sentence_transformers"), "activation_fn", "identity")
    return activation(files.config, "sbert_ce_default_activation_function", "identity")


KIND: Final = in_layout(
    "sequence_labels",
    lambda files: files.architecture.endswith("ForSequenceClassification"),
    sequence_labels,
    has_template=True,
)

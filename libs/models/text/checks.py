"""Validation of jobs that all processors share, and the paths of fields in a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from libs.catalog.card import DOCUMENT_PROMPTS, Card, Task
from libs.errors import InvalidInput, TaskNotSupported
from libs.models.interface.work import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    ModelWork,
    RegionsWork,
    RelationsWork,
    ScoreWork,
    StructureWork,
    TextWork,
    Work,
    all_parts,
)

W = TypeVar("W", bound=ModelWork)
_TASKS: dict[type[Work], Task] = {
    EncodeWork: "encode",
    ScoreWork: "score",
    EntitiesWork: "entities",
    ClassifyWork: "classify",
    RelationsWork: "relations",
    RegionsWork: "regions",
    StructureWork: "structure",
    TextWork: "text",
}
PLACE: Final = "{}"
"""The placeholder for the label in a hypothesis."""
_MAX_HYPOTHESES: Final = 8 << 20
_VERBS: dict[Task, str] = {
    "encode": "encode",
    "score": "score",
    "entities": "find entities",
    "classify": "classify",
    "relations": "find relations",
    "regions": "find regions",
    "text": "generate text",
    "structure": "extract fields of a schema",
}


def need_task(work: Work, card: Card) -> None:
    """Raise TaskNotSupported if the model does not support the task."""
    if getattr(work, "truncation", "") == "windows":
        raise TaskNotSupported(
            f"{card.model} reads no text in windows here: they are for Score and Extract with a "
            "text model; divide texts by `chunking` to encode them",
            field="truncation",
        )
    task = _TASKS[type(work)]
    if task not in card.tasks:
        tasks = ", ".join(card.tasks) or "none that is served"
        # the router's path; it checks first if it knows the card
        field = "model" if task in ("encode", "score") else task
        raise TaskNotSupported(
            f"{card.model} cannot {_VERBS[task]}; its tasks: {tasks}", field=field
        )


def refuse_parts(work: Work) -> None:
    """Raise TaskNotSupported for an item that is not one text, for models that read one text per
    item."""
    parts = all_parts(work)
    for part in parts:
        if isinstance(part.content, bytes):
            raise TaskNotSupported(
                "the model reads texts, not images, and a text that begins with "
                "data:image/…;base64, is an image",
                field=part.field,
            )
    if parts:
        raise TaskNotSupported(
            "the model reads one text per item, not several parts",
            field=parts[1].field.rpartition(".")[0],
        )


def refuse_chunks(work: Work, card: Card) -> None:
    """Raise TaskNotSupported if a model that reads images should divide texts into chunks."""
    if isinstance(work, EncodeWork) and work.chunking is not None:
        raise TaskNotSupported(
            f"{card.model} reads images: chunks are supported only by text models", field="chunking"
        )


def unsupported(work: Work, card: Card) -> TaskNotSupported:
    """Return the error for a task that the card names and its processor does not implement. The
    caller raises it.
    """
    return TaskNotSupported(f"{card.model} cannot {_VERBS[_TASKS[type(work)]]}", field="model")


def need_work(work: Work, kind: type[W], card: Card) -> W:
    """Return the work, which must be of this kind. Raises TaskNotSupported for another."""
    if not isinstance(work, kind):
        raise unsupported(work, card)
    return work


def known_labels(labels: Sequence[str], card: Card, path: str) -> None:
    """Raise InvalidInput for a label that the model does not have."""
    for number, label in enumerate(labels):
        if label not in card.labels:
            raise InvalidInput(
                f"{card.model} has no label {label!r}; its labels: {', '.join(card.labels)}",
                field=f"{path}[{number}]",
            )


def need_labels(labels: Sequence[str], card: Card, path: str) -> None:
    """Raise InvalidInput if a model without fixed labels receives no label."""
    if not labels:
        raise InvalidInput(
            f"{card.model} has no fixed labels: send at least one",
            field=path,
        )


def hypotheses(work: ClassifyWork, default: str = PLACE) -> list[str]:
    """Return one hypothesis per label: the work's or the default one, with the label filled in."""
    hypothesis = work.hypothesis or default
    if PLACE not in hypothesis:
        raise InvalidInput(
            f"the hypothesis must contain {PLACE} in place of the label",
            field="classify.hypothesis",
        )
    characters = len(hypothesis) * len(work.labels) + hypothesis.count(PLACE) * sum(
        map(len, work.labels)
    )
    if characters > _MAX_HYPOTHESES:
        message = (
            f"the hypotheses of all labels have {characters:,} characters; the maximum is "
            f"{_MAX_HYPOTHESES:,}"
        )
        raise InvalidInput(message, field="classify.hypothesis")
    return [hypothesis.replace(PLACE, label) for label in work.labels]


def select_adapter(card: Card, role: str, adapter: str) -> str:
    """Return a text's LoRA adapter: the request's, else the checkpoint's for the role; empty for
    none."""
    return adapter or card.role_adapters.get(role, "")


def select_prompt(card: Card, role: str, adapter: str = "") -> str:
    """Return the model's prompt for a role, or its default prompt without a role. A role without a
    prompt has an empty one.

    `adapter` is the request's. Where the checkpoint's own adapters have prompts, the adapter
    decides the prompt.
    """
    if any(name in card.prompts for name in card.own_adapters):
        own = adapter if adapter in card.own_adapters else select_adapter(card, role, "")
        return card.prompts.get(own, "") if own else card.prompts.get(card.default_prompt, "")
    if role == "query":
        return card.prompts.get("query", "")
    if role == "document":
        return next((card.prompts[name] for name in DOCUMENT_PROMPTS if name in card.prompts), "")
    return card.prompts.get(card.default_prompt, "")


def item_path(number: int) -> str:
    return f"items[{number}].text"


def document_path(number: int) -> str:
    return f"documents[{number}].text"


def query_path(number: int) -> str:
    return "query.text"

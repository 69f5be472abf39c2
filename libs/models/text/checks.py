"""Validation of a job that all processors share, and the paths of fields in a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from libs.catalog.card import DOCUMENT_PROMPTS, Card, Task
from libs.errors import InvalidInput, TaskNotSupported
from libs.models.work import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    RegionsWork,
    RelationsWork,
    ScoreWork,
    StructureWork,
    TextWork,
    Work,
    parts_of,
)

_TASKS: dict[type[Work], Task] = {
    EncodeWork: "encode", ScoreWork: "score", EntitiesWork: "entities", ClassifyWork: "classify", RelationsWork: "relations",
    RegionsWork: "regions", StructureWork: "structure", TextWork: "text",
}  # fmt: skip
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
    "text": "write text",
    "structure": "find what a schema describes",
}


def need_task(work: Work, card: Card) -> None:
    """Raises TaskNotSupported if the model does not support the task."""
    task = _TASKS[type(work)]
    if task not in card.tasks:
        tasks = ", ".join(card.tasks) or "nothing that is served"
        # the same path as the router's, which checks first where it knows the card
        field = "model" if task in ("encode", "score") else task
        raise TaskNotSupported(
            f"{card.model} cannot {_VERBS[task]}; it can be asked for: {tasks}", field=field
        )


def refuse_parts(work: Work) -> None:
    """Raises TaskNotSupported, for a model that reads one text an item, if an item is something
    else.
    """
    parts = parts_of(work)
    for part in parts:
        if isinstance(part.content, bytes):
            raise TaskNotSupported(
                "the model reads texts, not images, and a text that begins with data:image/…;base64, is an image",
                field=part.field,
            )
    if parts:
        raise TaskNotSupported(
            "the model reads one text an item, not several parts",
            field=parts[1].field.rpartition(".")[0],
        )


def refuse_chunks(work: Work, card: Card) -> None:
    """Raises TaskNotSupported, for a model that reads more than texts, if texts are to be
    divided.
    """
    if isinstance(work, EncodeWork) and work.chunking is not None:
        raise TaskNotSupported(
            f"{card.model} reads images: chunks are for models of texts alone", field="chunking"
        )


def unsupported(work: Work, card: Card) -> TaskNotSupported:
    """The error for a task that the card names and its processor does not implement, to be raised
    by the caller.
    """
    return TaskNotSupported(f"{card.model} cannot {_VERBS[_TASKS[type(work)]]}", field="model")


def known_labels(labels: Sequence[str], card: Card, path: str) -> None:
    """Raises InvalidInput for a label that is not among the model's own."""
    for number, label in enumerate(labels):
        if label not in card.labels:
            raise InvalidInput(
                f"{card.model} has no label {label!r}; it has {', '.join(card.labels)}",
                field=f"{path}[{number}]",
            )


def need_labels(labels: Sequence[str], card: Card, path: str) -> None:
    """Raises InvalidInput if no label is named for a model that has none of its own."""
    if not labels:
        raise InvalidInput(
            f"{card.model} has no labels of its own: name at least one to compare the items with",
            field=path,
        )


def hypotheses(work: ClassifyWork, default: str = PLACE) -> list[str]:
    """One per label: the work's hypothesis, or the default one, with the label filled in."""
    hypothesis = work.hypothesis or default
    if PLACE not in hypothesis:
        raise InvalidInput(
            f"the hypothesis must hold {PLACE}, where the label goes", field="classify.hypothesis"
        )
    characters = len(hypothesis) * len(work.labels) + hypothesis.count(PLACE) * sum(
        map(len, work.labels)
    )
    if characters > _MAX_HYPOTHESES:
        message = f"with all labels the hypothesis takes {characters:,} characters; at most {_MAX_HYPOTHESES:,} are served"
        raise InvalidInput(message, field="classify.hypothesis")
    return [hypothesis.replace(PLACE, label) for label in work.labels]


def adapter_of(card: Card, role: str, adapter: str) -> str:
    """The LoRA adapter for a text: the one that the request names, else the checkpoint's own one
    for the role; empty: none.
    """
    return adapter or card.role_adapters.get(role, "")


def prompt_of(card: Card, role: str, adapter: str = "") -> str:
    """The model's prompt for a role. No role: its default one. A role for which it has none: none.

    `adapter`: the request's. Where the checkpoint's own adapters have prompts, the prompt is that
    of the adapter.
    """
    if any(name in card.prompts for name in card.own_adapters):
        own = adapter if adapter in card.own_adapters else adapter_of(card, role, "")
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

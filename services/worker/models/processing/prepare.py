"""A Work -> a Prepared: checks what a router cannot know, puts prompts in place, tokenises.

The whole of `TextModel.prepare`; runs in the worker's threads and changes nothing here. A job fails as a whole, and alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from libs.catalog.card import Card, Task
from libs.errors import InvalidInput, TaskNotSupported
from services.worker.models.processing.late import LateFrame
from services.worker.models.processing.text import TextProcessor, Where
from services.worker.models.work import (
    ClassifyWork,
    EncodeWork,
    EntitiesWork,
    Prepared,
    Role,
    ScoreWork,
    Sequence,
    Truncation,
    Work,
)

# Names that checkpoints give to a document's prompt, in sentence-transformers' order.
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_PLACE = "{}"


class Preparer:
    """Prepares the jobs of one model. `late`: for models that answer a vector a token."""

    def __init__(self, card: Card, text: TextProcessor, late: LateFrame | None) -> None:
        self._card, self._text, self._late = card, text, late

    def prepare(self, work: Work) -> Prepared:
        if isinstance(work, EncodeWork):
            return self._encode(work)
        if isinstance(work, ScoreWork):
            return self._score(work)
        return self._entities(work) if isinstance(work, EntitiesWork) else self._classify(work)

    def _encode(self, work: EncodeWork) -> Prepared:
        self._need("encode")
        check_encode(work, self._card)
        prompt = work.instruction or self._prompt(work.role)
        if self._late is None:
            return Prepared(work, "dense", self._dense(work.texts, prompt, work.truncation, _item))
        frame = self._late.queries if work.role == "query" else self._late.documents
        sequences, kept = frame(work.texts, prompt, work.truncation, _item)
        return Prepared(work, "multi_vector", sequences, kept=kept)

    def _score(self, work: ScoreWork) -> Prepared:
        """The query first, then the documents; for a cross-encoder one pair a document."""
        self._need("score")
        if self._card.scoring == "classifier":
            # A cross-encoder's prompts are no pair of roles: sentence-transformers puts its default one before the query.
            query = (work.instruction or self._prompt("")) + work.query
            return Prepared(work, "logits", self._text.encode_pairs(query, work.documents, work.truncation))
        prompt = work.instruction or self._prompt("query")
        if self._late is None:
            query_part = self._dense([work.query], prompt, work.truncation, _query)
            return Prepared(
                work, "dense", query_part + self._dense(work.documents, self._prompt("document"), work.truncation, _document)
            )
        if work.scale == "probability":
            raise InvalidInput("a multi-vector model's scores have no probability: leave `scale` empty", field="scale")
        queries, query_kept = self._late.queries([work.query], prompt, work.truncation, _query)
        documents, kept = self._late.documents(work.documents, self._prompt("document"), work.truncation, _document)
        return Prepared(work, "multi_vector", queries + documents, kept=query_kept + kept)

    def _entities(self, work: EntitiesWork) -> Prepared:
        self._need("entities")
        self._known(work.labels, "entities.labels")
        sequences, spans = self._text.encode_spans(work.texts, work.truncation, _item)
        return Prepared(work, "token_logits", sequences, spans=spans)

    def _classify(self, work: ClassifyWork) -> Prepared:
        """For a model with labels of its own the texts; else the texts, then one prompt a label."""
        self._need("classify")
        if self._card.classes:
            self._known(work.labels, "classify.labels")
            return Prepared(work, "logits", self._text.encode(work.texts, work.truncation, _item))
        if not work.labels:
            message = f"{self._card.model} has no labels of its own: name at least one to compare the items with"
            raise InvalidInput(message, field="classify.labels")
        hypothesis = work.hypothesis or _PLACE
        if _PLACE not in hypothesis:
            raise InvalidInput(f"the hypothesis must hold {_PLACE}, where the label goes", field="classify.hypothesis")
        prompts = [hypothesis.replace(_PLACE, label) for label in work.labels]
        default = self._prompt("")
        texts = self._dense(work.texts, default, work.truncation, _item)
        return Prepared(work, "dense", texts + self._dense(prompts, default, work.truncation, _label))

    def _dense(self, texts: list[str], prompt: str, truncation: Truncation, where: Where) -> list[Sequence]:
        sequences = self._text.encode(texts, truncation, where, prompt=prompt)
        if self._card.pool_prompt or not prompt:
            return sequences
        skip = self._text.prompt_tokens(prompt)
        # At least the last token is pooled: a text that was cut could else have nothing left.
        return [Sequence(item.ids, item.type_ids, skip=min(skip, item.tokens - 1)) for item in sequences]

    def _prompt(self, role: Role) -> str:
        """The model's prompt for a role. No role: its default one. A role for which it has none: none."""
        prompts = self._card.prompts
        if role == "query":
            return prompts.get("query", "")
        if role == "document":
            return next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), "")
        return prompts.get(self._card.default_prompt, "")

    def _need(self, task: Task) -> None:
        if task not in self._card.tasks:
            tasks = ", ".join(self._card.tasks) or "nothing that is served"
            # as the router's path, which looks first where it knows the card
            field = task if task in ("entities", "classify") else "model"
            raise TaskNotSupported(f"{self._card.model} cannot {_VERBS[task]}; it can be asked for: {tasks}", field=field)

    def _known(self, labels: Many[str], path: str) -> None:
        for number, label in enumerate(labels):
            if label not in self._card.labels:
                raise InvalidInput(
                    f"{self._card.model} has no label {label!r}; it has {', '.join(self._card.labels)}", field=f"{path}[{number}]"
                )


_VERBS: dict[Task, str] = {"encode": "encode", "score": "score", "entities": "find entities", "classify": "classify"}


def check_encode(work: EncodeWork, card: Card) -> None:
    """Raises TaskNotSupported or InvalidInput for forms and sizes that the model does not have."""
    for number, form in enumerate(work.representations):
        if form not in card.representations:
            message = f"{card.model} has no {form} vectors; it has {', '.join(card.representations)}"
            raise TaskNotSupported(message, field=f"representations[{number}]")
    if "dense" not in card.representations:
        if work.dimensions:
            raise InvalidInput(f"only dense vectors can be cut, and {card.model} has none: leave it 0", field="dimensions")
        if work.data_type in ("int8", "uint8", "binary"):
            raise InvalidInput(f"{work.data_type} is for dense vectors, and {card.model} has none", field="data_type")
    elif work.dimensions > card.dimensions:
        raise InvalidInput(f"{work.dimensions} are asked for; {card.model} has {card.dimensions}", field="dimensions")


def _item(number: int) -> str:
    return f"items[{number}].text"


def _document(number: int) -> str:
    return f"documents[{number}].text"


def _label(number: int) -> str:
    return f"classify.labels[{number}]"


def _query(number: int) -> str:
    return "query.text"

"""The interface between what a model is asked for and the decode loop: a Reader makes prompts of jobs, and answers of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from libs.catalog.card import Card
from libs.errors import TaskNotSupported
from libs.models.generation.decoding.rules import Allows
from libs.models.generation.decoding.sequences import Request
from libs.models.generation.decoding.writer import Writer
from libs.models.generation.grammars import FIELD, Grammar, form_of
from libs.models.results import Extraction, ExtractResult
from libs.models.work import Between, GoOn, InputSequence, TextWork, WriteWork, WrittenIds


@dataclass(frozen=True, slots=True)
class Asked:
    """`InputSequence.input` of readers with a chat template. `most`: tokens of the answer, 0: the checkpoint's own number."""

    most: int
    grammar: Grammar | None = None

    @staticmethod
    def of(sequence: InputSequence) -> Asked:
        if not isinstance(sequence.input, Asked):
            raise TypeError("`input` is that of `prepare`")
        return sequence.input

    def allows(self) -> Allows | None:
        """The grammar from its beginning, since a sequence may be written again."""
        return None if self.grammar is None else self.grammar.allows()


def refuse_schema(work: WriteWork, card: Card) -> None:
    """For models that answer in no form, or in one of their own. Raises TaskNotSupported."""
    if isinstance(work, TextWork) and work.json_schema:
        raise TaskNotSupported(
            f"{card.model} writes no JSON by a schema: models with a chat template do, of texts or of images", field=FIELD
        )


def refuse_chat(work: WriteWork, card: Card) -> None:
    """For models without a chat template, which read no conversations of several turns. Raises TaskNotSupported."""
    if isinstance(work, TextWork) and work.turns:
        message = f"{card.model} reads one message: conversations are for models with a chat template"
        raise TaskNotSupported(message, field="text.turns")
    if isinstance(work, TextWork) and work.template_values:
        raise TaskNotSupported(f"{card.model} has no chat template to give values to", field="text.template_values")


def extraction(work: WriteWork, text: str, finish: Literal["stop", "length"]) -> Extraction:
    """An answer, with what it says where it is JSON. Raises InvalidInput for one whose grammar could not be followed to its end."""
    form = form_of(text, finish) if isinstance(work, TextWork) and work.json_schema else None
    return Extraction(text=text, finish=finish, json=form)


class Reader(Protocol):
    """`prepare` (preparing threads) -> `requests` (the device thread) -> the decode loop -> `finish` (finishing threads).

    One sequence for each text that is written, in the order of items (and of an item's pages). `writer`: what the loop runs.
    """

    writer: Writer

    def prepare(self, work: WriteWork, go_on: GoOn) -> tuple[list[InputSequence], object]:
        """A job's prompts, and notes for `finish`. Raises InvalidInput with the path of the item.

        `ids` has a token for each row of the prompt, or of the encoder's input, so that costs are known by its length; images are
        in `rows` or `input`. `go_on` is called every few milliseconds.
        """

    def requests(self, sequences: list[InputSequence], between: Between) -> list[Request]:
        """What the loop is to write: runs the encoder or the vision tower of a batch. `between`: a preemption point."""

    def reads_along(self, notes: object) -> bool:
        """Whether the answers of a job are what `text` says while they are written. `notes`: those of `prepare`."""

    def text(self, ids: list[int]) -> str:
        """The text of the tokens written so far, for clients that read along: ends before an incomplete character."""

    def finish(self, work: WriteWork, notes: object, written: list[WrittenIds]) -> ExtractResult:
        """The answer of a job."""

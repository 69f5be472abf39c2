"""Readers of texts: causal models with a chat template, and encoder-decoder models of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from libs.catalog.card import Card
from libs.errors import InputTooLong, InvalidInput, TaskNotSupported
from libs.models.generation.chat import ChatTemplate, Message
from libs.models.generation.decoding.language_model import LanguageModel
from libs.models.generation.decoding.sequences import SequenceRequest
from libs.models.generation.grammars import Grammar, Grammars
from libs.models.generation.reader import (
    INCOMPLETE,
    GenerationOptions,
    empty_states,
    extraction,
    generation_options,
    refuse_chat,
    refuse_schema,
    refuse_tools,
    token_text,
)
from libs.models.interface.results import ExtractResult
from libs.models.interface.sequences import GeneratedIds, InputSequence, YieldPoint
from libs.models.interface.work import CancelCheck, GenerationWork, TextWork, items_as_parts
from libs.models.text.checks import need_work
from libs.models.text.tokenising.text import TextProcessor

"""Replacement that tokenizers return for the first bytes of a character."""


class TextReader:
    """Generates text about texts. An instruction becomes the system message, or a paragraph before
    the user's first message if the template has none. Turns precede each text.
    """

    def __init__(
        self, card: Card, language_model: LanguageModel, root: Path, tokenizer: Tokenizer
    ) -> None:
        """Create a reader. `root` is the tokenizer's directory. Raises ModelBroken for an unusable
        chat template.
        """
        self.language_model = language_model
        self._card, self.tokenizer = card, tokenizer
        self._text = TextProcessor(tokenizer, limit=card.max_tokens, segments=False)
        self._grammars = Grammars(
            tokenizer,
            language_model.settings.vocabulary or language_model.vocabulary,
            language_model.settings.stops,
        )
        self._chat = ChatTemplate(card, root) if card.template else None
        self.tool_form = None if self._chat is None else self._chat.tool_form

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        """Implement `Reader.prepare`. The `input` of a sequence is `GenerationOptions`."""
        work = need_work(work, TextWork, self._card)
        if work.region is not None:
            raise TaskNotSupported(
                f"{self._card.model} reads text only, not regions of images", field="text.region"
            )
        if work.text_kind == "ocr_regions":
            raise TaskNotSupported(
                f"{self._card.model} reads text only, not images", field="text.kind"
            )
        if (
            self.language_model.encoder is not None
        ):  # their vocabularies often lack JSON's characters
            refuse_schema(work, self._card)
        if self._chat is None:
            refuse_chat(work, self._card)
        every = generation_options(
            work,
            self._card,
            self.language_model.settings,
            self.tokenizer.decode,
            self._grammar(work),
        )
        found: list[InputSequence] = []
        for parts, own in zip(items_as_parts(work), every, strict=True):
            check_cancelled()
            texts = []
            for part in parts:
                if not isinstance(part.content, str):
                    raise TaskNotSupported(
                        f"{self._card.model} reads text only, not images", field=part.field
                    )
                texts.append(part.content)
            text, field = "\n".join(texts), parts[0].field
            if not text.strip() and work.item_role != "tool":
                raise InvalidInput("the text is empty", field=field)
            ids = self._ids(text, field, work, check_cancelled)
            longest = self._longest(work.max_tokens)
            if len(ids) > longest:
                limit = f"{max(longest, 0):,} tokens"
                message = f"text and prompt exceed {limit} and leave no room for an answer"
                raise InputTooLong(
                    f"{message}: shorten the text or request fewer tokens", field=field
                )
            found.append(InputSequence(ids, input=own))
        return found, None

    def _grammar(self, work: TextWork) -> Grammar | None:
        if self.tool_form is None:
            refuse_tools(work, self._card)
        elif work.tools:
            return self._grammars.compile_tools(work, self.tool_form)
        return self._grammars.compile_schema(work.json_schema)

    def plan(self, sequence: InputSequence) -> SequenceRequest:
        options = GenerationOptions.from_sequence(sequence)
        if self.language_model.encoder is None:
            return options.request(sequence.ids)
        return options.request(states=empty_states(sequence))

    def requests(
        self, sequences: list[InputSequence], yield_point: YieldPoint
    ) -> list[SequenceRequest]:
        planned = list(map(self.plan, sequences))
        if self.language_model.encoder is None:
            return planned
        states = self.language_model.encode([each.ids for each in sequences], yield_point)
        return [replace(plan, states=own) for plan, own in zip(planned, states, strict=True)]

    def can_stream(self, notes: object) -> bool:
        return True

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids).rstrip(INCOMPLETE)

    def finish(
        self, work: GenerationWork, notes: object, generated: list[GeneratedIds]
    ) -> ExtractResult:
        own_text = partial(token_text, self.tokenizer)
        items = [
            extraction(work, self.tokenizer.decode, each, own_text, self.tool_form)
            for each in generated
        ]
        return ExtractResult(items, sum(len(each.ids) for each in generated))

    def _ids(
        self, text: str, field: str, work: TextWork, check_cancelled: CancelCheck
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Return the prompt's ids; if they exceed the limit, one id more than it. `field`: the
        text's path.
        """
        if self._chat is None or work.raw_prompt:
            whole = f"{work.instruction} {text}" if work.instruction else text
            (part,) = self._text.encode(
                [whole],
                "end",
                lambda _: "",
                limit=self._text.limit + 1,
                check_cancelled=check_cancelled,
            )
            return part.ids
        prompt = self._chat.prompt(
            _messages(text, field, work, has_system=self._chat.has_system),
            work.template_values,
            work.tools,
        )
        ((ids, is_whole),) = self._text.encode_plain([prompt], "end", check_cancelled)
        return ids if is_whole else np.zeros(self._text.limit + 1, np.int32)

    def _longest(self, most: int) -> int:
        """Return the longest prompt, or input of the encoder. A causal model's answer needs
        positions after it.
        """
        return (
            self._card.max_tokens
            if self.language_model.encoder is not None
            else self._card.max_tokens - max(most, 1)
        )


def _messages(text: str, field: str, work: TextWork, *, has_system: bool) -> list[Message]:
    """Build the conversation that ends with a text."""
    turns = [
        Message(turn.role, turn.text, f"text.turns[{number}].text", turn.tool_calls)
        for number, turn in enumerate(work.turns)
    ]
    said = [*turns, Message(work.item_role, text, field)]
    if not work.instruction:
        return said
    if has_system:
        return [Message("system", work.instruction, "text.instruction"), *said]
    first = next(number for number, message in enumerate(said) if message.role == "user")
    return [
        *said[:first],
        replace(said[first], text=f"{work.instruction}\n\n{said[first].text}"),
        *said[first + 1 :],
    ]

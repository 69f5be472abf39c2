"""The readers of texts: causal models with a chat template, and encoder-decoder models of
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from libs.catalog.card import Card
from libs.errors import InputTooLong, InvalidInput, TaskNotSupported
from libs.models.generation.chat import ChatTemplate, Message
from libs.models.generation.decoding.sequences import Request
from libs.models.generation.decoding.writer import Writer
from libs.models.generation.grammars import Grammar, Grammars
from libs.models.generation.reader import (
    Asked,
    asked,
    extraction,
    refuse_chat,
    refuse_schema,
    refuse_tools,
    token_text,
)
from libs.models.results import ExtractResult
from libs.models.text.checks import unsupported
from libs.models.text.tokenising.text import TextProcessor
from libs.models.work import (
    CancelCheck,
    GeneratedIds,
    GenerationWork,
    InputSequence,
    TextWork,
    YieldPoint,
    items_as_parts,
)

_INCOMPLETE: Final = "�"
"""What tokenizers make of the first bytes of a character."""


class TextReader:
    """Writes about texts. An instruction is the system's message, or a paragraph before the user's
    first one where there is no place for it. Turns stand before each text."""

    def __init__(self, card: Card, writer: Writer, root: Path, tokenizer: Tokenizer) -> None:
        """`root`: where the tokenizer's files are. Raises ModelBroken for a chat template that
        cannot be used.
        """
        self.writer = writer
        self._card, self.tokenizer = card, tokenizer
        self._text = TextProcessor(tokenizer, limit=card.max_tokens, segments=False)
        self._grammars = Grammars(
            tokenizer, writer.settings.vocabulary or writer.vocabulary, writer.settings.stops
        )
        self._chat = ChatTemplate(card, root) if card.template else None
        self.tool_form = None if self._chat is None else self._chat.tool_form

    def prepare(
        self, work: GenerationWork, check_cancelled: CancelCheck
    ) -> tuple[list[InputSequence], object]:
        """As `Reader.prepare`; `input` of a sequence is `Asked`."""
        if not isinstance(work, TextWork):
            raise unsupported(work, self._card)
        if work.region is not None:
            raise TaskNotSupported(
                f"{self._card.model} reads texts, and no regions of images", field="text.region"
            )
        if work.text_kind == "ocr_regions":
            raise TaskNotSupported(
                f"{self._card.model} reads texts, and no images", field="text.kind"
            )
        if self.writer.encoder is not None:  # their vocabularies often lack the characters of JSON
            refuse_schema(work, self._card)
        if self._chat is None:
            refuse_chat(work, self._card)
        every = asked(
            work, self._card, self.writer.settings, self.tokenizer.decode, self._grammar(work)
        )
        found: list[InputSequence] = []
        for parts, own in zip(items_as_parts(work), every, strict=True):
            check_cancelled()
            texts = []
            for part in parts:
                if not isinstance(part.content, str):
                    raise TaskNotSupported(
                        f"{self._card.model} reads texts, and no images", field=part.field
                    )
                texts.append(part.content)
            text, field = "\n".join(texts), parts[0].field
            if not text.strip():
                raise InvalidInput("there is no text to write about", field=field)
            ids = self._ids(text, field, work, check_cancelled)
            longest = self._longest(work.max_tokens)
            if len(ids) > longest:
                message = f"the text has more than {max(longest, 0):,} tokens with its prompt, which leaves no room for the answer"
                raise InputTooLong(f"{message}: shorten it, or ask for fewer tokens", field=field)
            found.append(InputSequence(ids, input=own))
        return found, None

    def _grammar(self, work: TextWork) -> Grammar | None:
        if self.tool_form is None:
            refuse_tools(work, self._card)
        elif work.tools:
            return self._grammars.of_tools(work, self.tool_form)
        return self._grammars.of(work.json_schema)

    def requests(self, sequences: list[InputSequence], yield_point: YieldPoint) -> list[Request]:
        if self.writer.encoder is None:
            return [Asked.of(each).request(each.ids) for each in sequences]
        states = self.writer.encode([each.ids for each in sequences], yield_point)
        return [
            Asked.of(each).request(states=own) for own, each in zip(states, sequences, strict=True)
        ]

    def reads_along(self, notes: object) -> bool:
        return True

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids).rstrip(_INCOMPLETE)

    def finish(
        self, work: GenerationWork, notes: object, written: list[GeneratedIds]
    ) -> ExtractResult:
        own_text = partial(token_text, self.tokenizer)
        items = [
            extraction(
                work, self.tokenizer.decode(each.ids.tolist()), each, own_text, self.tool_form
            )
            for each in written
        ]
        return ExtractResult(items, sum(len(each.ids) for each in written))

    def _ids(
        self, text: str, field: str, work: TextWork, check_cancelled: CancelCheck
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """The prompt's ids, or one more than the limit of them. `field`: the text's path."""
        if self._chat is None or work.raw_prompt:
            whole = f"{work.instruction} {text}" if work.instruction else text
            (part,) = self._text.encode(
                [whole], "end", lambda _: "", limit=self._text.limit + 1, go_on=check_cancelled
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
        """The longest prompt, or input of the encoder. A causal model's answer needs positions
        after it.
        """
        return (
            self._card.max_tokens
            if self.writer.encoder is not None
            else self._card.max_tokens - max(most, 1)
        )


def _messages(text: str, field: str, work: TextWork, *, has_system: bool) -> list[Message]:
    """The conversation that ends with a text."""
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

"""The prompt of a model with a chat template: one message of a user, and an instruction as that of the system.

As for rerankers (`libs/models/text/tokenising/chat.py`), templates are rendered once, when a model is loaded, with placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.catalog.card import Card
from libs.errors import ModelBroken
from libs.models.text.tokenising.chat import rendered, rendered_text, special_tokens

# Placeholders: characters of Unicode's private use area.
_TEXT, _INSTRUCTION = "\ue001", "\ue002"
_MARKS = re.compile(f"([{_TEXT}{_INSTRUCTION}])")
_PLAIN: Final = {_TEXT: "A <b>text</b>,\n  in \\lines\\ " + "and more " * 300 + "end", _INSTRUCTION: "told {so}"}
_SPACED: Final = {mark: f"\n {text} \n\n" for mark, text in _PLAIN.items()}
"""Texts that a template must put in as they are, or without the space around them."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`pieces`: fixed texts and placeholders. `strips`: the template takes away the space around texts."""

    pieces: tuple[str, ...]
    strips: bool

    @staticmethod
    def of(card: Card, root: Path) -> tuple[ChatPrompt, ChatPrompt | None]:
        """Without an instruction, and with one; None: the template has no place for it. `root`: where the tokenizer is.

        Raises ModelBroken for a template without a place for a user's message, or that changes it.
        """
        marks = {mark: mark for mark in _PLAIN}
        fixed = {"tools": None, "documents": None, "add_generation_prompt": True, **special_tokens(root), **card.template_values}
        asked = [
            {**fixed, "messages": _messages(texts, card.message_parts, instructed=instructed)}
            for instructed in (False, True)
            for texts in (marks, _PLAIN, _SPACED)
        ]
        found = rendered(card.template, asked)
        plain = _prompt([rendered_text(each) for each in found[:3]])
        if _TEXT not in plain.pieces:
            raise ModelBroken("the chat template: it has no place for the message of the role 'user'")
        try:
            told = _prompt([rendered_text(each) for each in found[3:]])
        except ModelBroken:  # some templates allow no message of the role system
            return plain, None
        return plain, told if {_TEXT, _INSTRUCTION} <= set(told.pieces) else None

    def around(self, instruction: str) -> tuple[str, str]:
        """The prompt before and after the text."""
        place = self.pieces.index(_TEXT)
        texts = {_INSTRUCTION: instruction.strip() if self.strips else instruction}
        return _filled(self.pieces[:place], texts), _filled(self.pieces[place + 1 :], texts)


def _messages(texts: Mapping[str, str], parts: bool, *, instructed: bool) -> list[dict[str, object]]:
    roles = [("system", texts[_INSTRUCTION])] if instructed else []
    roles.append(("user", texts[_TEXT]))
    return [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in roles]


def _prompt(renderings: list[str]) -> ChatPrompt:
    marked, plain, spaced = renderings
    pieces = tuple(_MARKS.split(marked))
    if plain != _filled(pieces, _PLAIN) or pieces.count(_TEXT) > 1:
        raise ModelBroken("the chat template: it changes the texts of messages, which is not served")
    return ChatPrompt(pieces, strips=spaced != _filled(pieces, _SPACED))


def _filled(pieces: tuple[str, ...], texts: Mapping[str, str]) -> str:
    return "".join(texts.get(piece, piece) for piece in pieces)

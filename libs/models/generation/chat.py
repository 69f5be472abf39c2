"""Render the prompt of a model with a chat template from a system message and a conversation.

The template renders each conversation like transformers' `apply_chat_template`, in a separate
process with limits of memory and time that lives as long as the model is loaded
(`libs/models/text/tokenising/renderer.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final, Literal

from shoal.extractions import ToolCall

from libs.catalog.card import Card
from libs.errors import InvalidInput, ModelBroken
from libs.models.generation.tools import tool_form
from libs.models.text.tokenising.renderer import (
    SPECIAL_TOKENS,
    Renderer,
    rendered_text,
    special_tokens,
)

Role = Literal["system", "user", "assistant", "tool"]

FIELD: Final = "text.turns"
VALUES_FIELD: Final = "text.template_values"
_NOT_FOR_CALLERS: Final = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS)
)
"""Template variables that callers cannot set."""
_PLACEHOLDER: Final = "\ue000"
"""A private-use character without a meaning."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        field: The message's path in the job.
        calls: The tool calls of an assistant.
    """

    role: Role
    text: str
    field: str
    calls: tuple[ToolCall, ...] = ()


class ChatTemplate:
    """The template of one model. Thread-safe."""

    def __init__(self, card: Card, root: Path) -> None:
        """Load the template. `root` is the tokenizer's directory. Raises ModelBroken if the
        template ignores a user's message.
        """
        self._parts = card.message_parts
        self.tool_form = tool_form(card.template)
        """The format of its function calls; None if it has none that is served."""
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        self._values: Mapping[str, object] = {
            **given,
            **special_tokens(root),
            **card.template_values,
        }
        self._renderer = Renderer(card.template)
        user, system = Message("user", _PLACEHOLDER, ""), Message("system", _PLACEHOLDER, "")
        alone, after = self._renderer.render(
            [self._given([user]), self._given([system, Message("user", "a", "")])]
        )
        if _PLACEHOLDER not in rendered_text(alone):
            raise ModelBroken("the chat template ignores messages of the role 'user'")
        self.has_system = _PLACEHOLDER in after.text
        """Whether the template renders a system message. Some templates reject it, others ignore
        it.
        """

    def prompt(
        self, messages: Sequence[Message], template_values: str = "", tools: str = ""
    ) -> str:
        """Render the whole prompt. The last message is the user's or a tool's.

        Args:
            template_values: Additional values for the template, a JSON object.
            tools: Functions that may be called, a JSON list.

        Raises InvalidInput for a conversation that the template rejects, and for values that it
        does not use.
        """
        given = self._given(messages)
        if tools:
            given = {**given, "tools": json.loads(tools)}
        (prompt,) = self._rendered(messages, [given], template_values)
        return prompt

    def around(
        self, messages: Sequence[Message], template_values: str = "", *, with_image: bool
    ) -> tuple[str, str]:
        """Return the prompt before and after the text of the last message, which is the user's.

        With `with_image` the last message is an image and a text, and the template's image
        placeholder is in the prompt before the text. Raises InvalidInput as `prompt`, and for a
        message that the template modifies.
        """
        last, mark = messages[-1], f"{_PLACEHOLDER}{token_hex(8)}"  # occurs in no message
        marked = [*messages[:-1], Message(last.role, mark, last.field)]
        rendered, prompt = self._rendered(
            messages,
            [self._given(turns, with_image=with_image) for turns in (marked, messages)],
            template_values,
        )
        before, _, after = rendered.partition(mark)
        if prompt != before + last.text + after:
            raise InvalidInput(
                "the model's chat template changes this message; that is not supported after turns",
                field=last.field,
            )
        return before, after

    def _rendered(
        self, messages: Sequence[Message], values: Sequence[Mapping[str, object]], more: str
    ) -> list[str]:
        own = self._own_values(more) if more else {}
        try:
            return [
                rendered_text(one)
                for one in self._renderer.render([{**given, **own} for given in values])
            ]
        except ModelBroken as error:
            is_alone = [message.role for message in messages] in (["user"], ["system", "user"])
            field = messages[-1].field if is_alone else FIELD
            raise InvalidInput(
                f"the model's chat template rejects the conversation: {error.message}", field=field
            ) from error

    def _own_values(self, template_values: str) -> Mapping[str, object]:
        values: Mapping[str, object] = json.loads(template_values)
        taken = self._renderer.names - _NOT_FOR_CALLERS
        unknown = sorted(values.keys() - taken)
        if unknown:
            known = f"it uses {', '.join(sorted(taken))}" if taken else "it uses none"
            raise InvalidInput(
                f"the model's chat template does not use the value {unknown[0]!r}: {known}",
                field=VALUES_FIELD,
            )
        return values

    def _given(
        self, messages: Sequence[Message], *, with_image: bool = False
    ) -> Mapping[str, object]:
        contents: list[object] = [message.text for message in messages]
        if self._parts:
            parts: list[list[dict[str, str]]] = [
                [{"type": "text", "text": message.text}] for message in messages
            ]
            contents = [*parts[:-1], [*([{"type": "image"}] if with_image else []), *parts[-1]]]
        said = [
            {"role": message.role, "content": content}
            | ({"tool_calls": _called(message.calls)} if message.calls else {})
            for message, content in zip(messages, contents, strict=True)
        ]
        return {**self._values, "messages": said}


def _called(calls: Sequence[ToolCall]) -> list[dict[str, object]]:
    return [
        {
            "type": "function",
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call in calls
    ]

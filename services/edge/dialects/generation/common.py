"""The shared parts of the generation APIs (OpenAI, Ollama): the request for a text, and the text
while it is streamed. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import orjson
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.generation.choices import AnswerChoices
from services.edge.messages.base import Fields, HttpError, encode_json, invalid
from services.edge.messages.names import AliasTarget
from services.edge.messages.reading import image_part, plain_text_item, read_count

MAX_TOKENS: Final = 4096
"""The maximum of `TextTask.max_tokens`, which limits generated tokens."""
SYSTEM: Final = ("system", "developer")
TOOL: Final = "tool"
_VALUES: Final = "chat_template_kwargs"
_ROLES: Final = {
    "user": pb.Turn.ROLE_USER,
    "assistant": pb.Turn.ROLE_ASSISTANT,
    TOOL: pb.Turn.ROLE_TOOL,
    **dict.fromkeys(SYSTEM, pb.Turn.ROLE_SYSTEM),
}
_LINE_ENDS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
_LENGTH: Final = pb.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A text or an image (a `data:` URI or base64) of a message, and the path of its field."""

    content: str
    field: str
    is_image: bool = False


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """A message between the first system message and the last message.

    Attributes:
        role: The speaker.
        texts: The contents.
        field: The path of the message.
        calls: The name and the arguments (JSON) of functions that an assistant called.
    """

    role: str
    texts: Sequence[MessageContent]
    field: str
    calls: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a request.

    Attributes:
        system: The contents of the system message at the beginning.
        user: The contents of the last message.
        turns: The messages in between.
        role: The role of the last message: user or tool.
    """

    system: Sequence[MessageContent]
    user: Sequence[MessageContent]
    turns: Sequence[ConversationTurn] = ()
    role: str = "user"


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call, in OpenAI's form.

    Attributes:
        functions: The definitions.
        required: The model must call a function.
        name: The only function that it may call; empty: any.
        single: The model may call at most one function.
    """

    functions: Sequence[Any] = ()
    required: bool = False
    name: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The request for one generated text.

    Attributes:
        max_tokens: The maximum number of generated tokens (None: the default), and the path of the
            field that sets it.
        schema: A JSON Schema that the text must match (None: none), and the path of the field that
            sets it.
        template_values: Additional values for the model's chat template.
    """

    target_model: AliasTarget
    conversation: Conversation
    max_tokens: tuple[int | None, str]
    schema: tuple[dict[str, Any] | None, str] = (None, "")
    template_values: dict[str, Any] | None = None
    choices: AnswerChoices = field(default_factory=AnswerChoices)
    tools: Tools = Tools()

    def request(self) -> pb.ExtractRequest:
        """Return the mesh's request. Raises HttpError."""
        system = self.conversation.system
        if system and any(one.is_image for one in self.conversation.user):
            field = system[0].field
            raise invalid(
                (
                    f"{field}: models that read images have no system message here: put it into "
                    "the user's text"
                ),
                field,
            )
        most, field = self.max_tokens
        if most is not None and most > MAX_TOKENS:
            raise invalid(f"{field} is {most}; it must be at most {MAX_TOKENS:,}", field)
        task = pb.TextTask(
            max_tokens=read_count(most, field),
            instruction=_joined(system),
            json_schema=_json(*self.schema),
            turns=[_turn(turn) for turn in self.conversation.turns],
            template_values=_json(self.template_values, _VALUES),
            tools=_json(list(self.tools.functions) or None, "tools"),
            tool=self.tools.name,
            single_tool_call=self.tools.single,
        )
        if self.tools.required:
            task.tool_choice = pb.TextTask.TOOL_CHOICE_REQUIRED
        if self.conversation.role == TOOL:
            task.item_role = pb.Turn.ROLE_TOOL
        self.choices.fill(task)
        items = self.choices.items([self._item()])
        return pb.ExtractRequest(
            model=self.target_model.model, items=items, text=task, adapter=self.target_model.adapter
        )

    def fields(self) -> Fields:
        """Return the caller's name of each Shoal field, for error messages."""
        system, user, turns = (
            self.conversation.system,
            self.conversation.user,
            self.conversation.turns,
        )
        return {
            "items[].parts[].*": lambda place: (
                user[place].field if place < len(user) else user[-1].field
            ),
            **dict.fromkeys(("items[].text", "items[]", "items"), user[-1].field),
            "text.tools": "tools",
            "text.tool": "tool_choice",
            "text.tool_choice": "tool_choice",
            "text.item_role": "messages",
            **self.choices.fields(),
            "text.turns[].*": lambda place: (
                turns[place].field if place < len(turns) else "messages"
            ),
            "text.turns": "messages",
            "text.max_tokens": self.max_tokens[1],
            "text.template_values": _VALUES,
            **({"text.instruction": system[0].field} if system else {}),
            **({"text.json_schema": self.schema[1]} if self.schema[1] else {}),
        }

    def _item(self) -> pb.Item:
        user = self.conversation.user
        if not any(one.is_image for one in user):
            return plain_text_item("\n\n".join(one.content for one in user), user[-1].field)
        parts = [
            _image(one)
            if one.is_image
            else pb.Part(text=plain_text_item(one.content, one.field).text)
            for one in user
        ]
        return pb.Item(parts=parts)


def _image(contents: MessageContent) -> pb.Part:
    part = image_part(contents.content, contents.field)
    if part.HasField("document"):
        message = (
            "is a PDF, which conversations do not support: "
            "POST /v1/extract/{model} with the task text reads its pages"
        )
        raise invalid(f"{contents.field} {message}", contents.field)
    return part


def _turn(turn: ConversationTurn) -> pb.Turn:
    calls = [pb.ToolCall(name=name, arguments=arguments) for name, arguments in turn.calls]
    return pb.Turn(role=_ROLES[turn.role], text=_joined(turn.texts), tool_calls=calls)


def _json(value: dict[str, Any] | list[Any] | None, field: str) -> str:
    if value is None:
        return ""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # msgpack types that JSON lacks, or too deep nesting
        raise invalid(f"{field} is not JSON: {error}", field) from None


def _joined(reported: Sequence[MessageContent]) -> str:
    return "\n\n".join(plain_text_item(one.content, one.field).text for one in reported)


def build_conversation(
    messages: Sequence[tuple[str, Sequence[MessageContent]]],
    calls: Mapping[int, Sequence[tuple[str, str]]] = MappingProxyType({}),
) -> Conversation:
    """Return the conversation of all messages.

    Args:
        messages: The role and the contents of each message.
        calls: Functions called in a message, by the message's index.

    Raises HttpError unless the last message is the user's or a tool's, and no other one has images.
    """
    system: Sequence[MessageContent] = ()
    turns: list[ConversationTurn] = []
    for place, (role, contents) in enumerate(messages):
        field = f"messages[{place}]"
        if role not in _ROLES:
            raise invalid(
                f"{field}.role is {role!r}; it must be one of {', '.join(_ROLES)}",
                f"{field}.role",
            )
        if role in SYSTEM and place == 0:
            system = contents
        else:
            turns.append(
                ConversationTurn(
                    role, contents, contents[-1].field if contents else field, calls.get(place, ())
                )
            )
        is_asked = role == "user" and place == len(messages) - 1
        if (
            not is_asked
            and (image := next((one for one in contents if one.is_image), None)) is not None
        ):
            raise invalid(
                f"{image.field} is an image: only the user's last message may have images",
                image.field,
            )
    if not turns:
        raise invalid(
            "messages must include a message of the user, with text or an image", "messages"
        )
    last, role = f"messages[{len(messages) - 1}].role", turns[-1].role
    if role not in ("user", TOOL):
        raise invalid(
            f"{last} is {role!r}: the last message must have the role user or tool",
            last,
        )
    asked = turns.pop()
    if not asked.texts:
        raise invalid(f"{asked.field} has no text and no image", asked.field)
    return Conversation(system, asked.texts, turns, role)


class StreamedText:
    """Tracks how much of a generated text the caller has received.

    If its worker is lost, another worker generates the text again with the same random numbers, so
    it is nearly always identical. Text that the caller already has is not sent again.
    """

    def __init__(self) -> None:
        self._written = ""
        self._sent = ""

    def next_text(self, deltas: Sequence[pb.ExtractDelta]) -> str:
        """Return the text to send now. Raises HttpError WORKER_LOST if the regenerated text
        differs.
        """
        for delta in deltas:
            self._written = delta.text if delta.restarted else self._written + delta.text
        return self._unsent(self._written)

    def remaining_text(self, text: str) -> str:
        """Return the rest of the complete text. Raises HttpError as `next_text`."""
        rest = self._unsent(text)
        if not text.startswith(self._sent):
            raise _different_text_error()
        return rest

    def _unsent(self, text: str) -> str:
        if self._sent.startswith(text):
            return ""  # a part of the text that was already sent
        if not text.startswith(self._sent):
            raise _different_text_error()
        unsent = text[len(self._sent) :]
        self._sent = text
        return unsent


def _different_text_error() -> HttpError:
    text = (
        "the worker that generated this text was lost, and a second worker generated a "
        "different text: send the request again"
    )
    return HttpError("WORKER_LOST", text)


def encode_line(content: object) -> bytes:
    """Return JSON in which U+0085, U+2028 and U+2029 are escaped: Python's `str.splitlines`, which
    Ollama's client uses, splits lines there too.
    """
    line = encode_json(content)
    for character, escaped in _LINE_ENDS:
        line = line.replace(character, escaped)
    return line


def is_last(reply: pb.ExtractStreamResponse) -> bool:
    """Return whether the reply is the last one, which holds the complete result."""
    return reply.HasField("response")


def is_cut(result: pb.Extraction) -> bool:
    """Return whether generation ended because the text reached its maximum number of tokens."""
    return result.finish_reason == _LENGTH

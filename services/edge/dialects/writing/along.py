"""What the wires of models that write share: the request for one text, and its text as it is
written. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import orjson
from shoal.v1 import inference_pb2 as pb

from services.edge.dialects.writing.choices import Choices
from services.edge.messages.base import Fields, HttpError, invalid, json_of
from services.edge.messages.names import Target
from services.edge.messages.reading import count_of, image_part, plain_text_item

MAX_TOKENS: Final = 4096
"""Of `TextTask.max_tokens`."""
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
class Told:
    """Something that somebody said: a text or an image (a `data:` URI or base64), and the path of
    its field.
    """

    content: str
    field: str
    is_image: bool = False


@dataclass(frozen=True, slots=True)
class Spoken:
    """A message between the first system message and the last one. `field`: its path. `calls`: of
    an assistant.
    """

    role: str
    texts: Sequence[Told]
    field: str
    calls: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """`system`, `user`: what a system message at the beginning and the last one say. `turns`: what
    was said between. `role`: of the last one, the user's or that of a tool."""

    system: Sequence[Told]
    user: Sequence[Told]
    turns: Sequence[Spoken] = ()
    role: str = "user"


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that the model may call, in OpenAI's form. `required`: it calls one; `name`: this
    one. `single`: once at most.
    """

    functions: Sequence[Any] = ()
    required: bool = False
    name: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """One text that a model is to write. `schema`: a JSON Schema. `longest`: the most tokens, and
    the field that says so.
    """

    named: Target
    said: Conversation
    longest: tuple[int | None, str]
    schema: tuple[dict[str, Any] | None, str] = (None, "")
    template_values: dict[str, Any] | None = None
    choices: Choices = field(default_factory=Choices)
    tools: Tools = Tools()

    def request(self) -> pb.ExtractRequest:
        """Raises HttpError."""
        system = self.said.system
        if system and any(one.is_image for one in self.said.user):
            field = system[0].field
            raise invalid(
                f"{field}: a model that reads images has no system message here: put it into the user's text",
                field,
            )
        most, field = self.longest
        if most is not None and most > MAX_TOKENS:
            raise invalid(f"{field} is {most}; it must be at most {MAX_TOKENS:,}", field)
        task = pb.TextTask(
            max_tokens=count_of(most, field),
            instruction=_joined(system),
            json_schema=_json(*self.schema),
            turns=[_turn(turn) for turn in self.said.turns],
            template_values=_json(self.template_values, _VALUES),
            tools=_json(list(self.tools.functions) or None, "tools"),
            tool=self.tools.name,
            single_tool_call=self.tools.single,
        )
        if self.tools.required:
            task.tool_choice = pb.TextTask.TOOL_CHOICE_REQUIRED
        if self.said.role == TOOL:
            task.item_role = pb.Turn.ROLE_TOOL
        self.choices.fill(task)
        items = self.choices.items([self._item()])
        return pb.ExtractRequest(
            model=self.named.model, items=items, text=task, adapter=self.named.adapter
        )

    def fields(self) -> Fields:
        """What the caller calls our fields."""
        system, user, turns = self.said.system, self.said.user, self.said.turns
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
            "text.max_tokens": self.longest[1],
            "text.template_values": _VALUES,
            **({"text.instruction": system[0].field} if system else {}),
            **({"text.json_schema": self.schema[1]} if self.schema[1] else {}),
        }

    def _item(self) -> pb.Item:
        user = self.said.user
        if not any(one.is_image for one in user):
            return plain_text_item("\n\n".join(one.content for one in user), user[-1].field)
        parts = [
            _image(one)
            if one.is_image
            else pb.Part(text=plain_text_item(one.content, one.field).text)
            for one in user
        ]
        return pb.Item(parts=parts)


def _image(said: Told) -> pb.Part:
    part = image_part(said.content, said.field)
    if part.HasField("document"):
        message = "is a PDF, which is not read in a conversation: POST /v1/extract/{model} with the task text reads its pages"
        raise invalid(f"{said.field} {message}", said.field)
    return part


def _turn(turn: Spoken) -> pb.Turn:
    calls = [pb.ToolCall(name=name, arguments=arguments) for name, arguments in turn.calls]
    return pb.Turn(role=_ROLES[turn.role], text=_joined(turn.texts), tool_calls=calls)


def _json(value: dict[str, Any] | list[Any] | None, field: str) -> str:
    if value is None:
        return ""
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # what msgpack has and JSON does not; nested too deeply
        raise invalid(f"{field} is not JSON: {error}", field) from None


def _joined(told: Sequence[Told]) -> str:
    return "\n\n".join(plain_text_item(one.content, one.field).text for one in told)


def conversation_of(
    messages: Sequence[tuple[str, Sequence[Told]]],
    calls: Mapping[int, Sequence[tuple[str, str]]] = MappingProxyType({}),
) -> Conversation:
    """A conversation of the roles and contents of all messages, and the functions that were called
    in them, by their places.

    Raises HttpError unless the last message is the user's or a tool's, and no other one has images.
    """
    system: Sequence[Told] = ()
    turns: list[Spoken] = []
    for place, (role, said) in enumerate(messages):
        field = f"messages[{place}]"
        if role not in _ROLES:
            raise invalid(
                f"{field}.role is {role!r}: served are the roles {', '.join(_ROLES)}",
                f"{field}.role",
            )
        if role in SYSTEM and place == 0:
            system = said
        else:
            turns.append(
                Spoken(role, said, said[-1].field if said else field, calls.get(place, ()))
            )
        is_asked = role == "user" and place == len(messages) - 1
        if (
            not is_asked
            and (image := next((one for one in said if one.is_image), None)) is not None
        ):
            raise invalid(
                f"{image.field} is an image: only the user's last message has images here",
                image.field,
            )
    if not turns:
        raise invalid("messages must have one of the role user, with text or an image", "messages")
    last, role = f"messages[{len(messages) - 1}].role", turns[-1].role
    if role not in ("user", TOOL):
        raise invalid(
            f"{last} is {role!r}: the last message must be of the role user, whom the model answers, or tool",
            last,
        )
    asked = turns.pop()
    if not asked.texts:
        raise invalid(f"{asked.field} has no text and no image", asked.field)
    return Conversation(system, asked.texts, turns, role)


class Along:
    """One text while it is written: what of it the caller does not have yet.

    A text whose worker was lost is written again from its beginning, by the same random numbers, so
    that it is the same text nearly always: the caller notices nothing, since what it has already is
    not sent again.
    """

    def __init__(self) -> None:
        self._written = ""
        self._sent = ""

    def more(self, deltas: Sequence[pb.ExtractDelta]) -> str:
        """The text to send now. Raises HttpError WORKER_LOST where the text that is written again
        is another one.
        """
        for delta in deltas:
            self._written = delta.text if delta.restarted else self._written + delta.text
        return self._unsent(self._written)

    def rest(self, text: str) -> str:
        """What is missing of the whole text. Raises HttpError as `more`."""
        rest = self._unsent(text)
        if not text.startswith(self._sent):
            raise _another()
        return rest

    def _unsent(self, text: str) -> str:
        if self._sent.startswith(text):
            return ""  # the beginning of what was sent, once more
        if not text.startswith(self._sent):
            raise _another()
        more = text[len(self._sent) :]
        self._sent = text
        return more


def _another() -> HttpError:
    text = "the worker that wrote this text was lost, and the one that wrote it again came to another text: ask again"
    return HttpError("WORKER_LOST", text)


def line_of(content: object) -> bytes:
    """JSON without any character that ends a line somewhere: Python's `str.splitlines`, by which
    Ollama's client reads lines, ends one at U+0085, U+2028 and U+2029, too."""
    line = json_of(content)
    for character, escaped in _LINE_ENDS:
        line = line.replace(character, escaped)
    return line


def is_last(reply: pb.ExtractStreamResponse) -> bool:
    """Whether it is the answer, which comes last."""
    return reply.HasField("response")


def is_cut(result: pb.Extraction) -> bool:
    """Whether the text ends because it has as many tokens as it may have."""
    return result.finish_reason == _LENGTH

"""The prompt of a model with a chat template: an instruction as the system's message, and what user and model say by turns.

As for rerankers (`libs/models/text/tokenising/chat.py`), a template is rendered with placeholders, and requests only fill them.
What a template makes of messages depends on their number and roles, the shape of a conversation: those of one user's message are
rendered when the model is loaded, any other when it comes first, in a preparing thread. What depends on the texts is learnt by
samples (space around them, the thoughts of earlier answers), or refused by what the template looks for in them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, Literal

from libs.catalog.card import Card
from libs.errors import InvalidInput, ModelBroken
from libs.models.text.tokenising.chat import Rendering, rendered, rendered_text, special_tokens

Role = Literal["system", "user", "assistant"]
Roles = tuple[Role, ...]

MOST_SHAPES: Final = 64
"""Shapes that are kept for a model: those that were asked for last."""
MOST_AROUND: Final = 65_536
"""Characters that a template may put around messages: a prompt has at most 8,192 tokens."""
FIELD: Final = "text.turns"
_ALONE: Final[Roles] = ("user",)
_TOLD: Final[Roles] = ("system", "user")

_THINK, _THOUGHT = "<think>", "</think>"
"""Around the thoughts before an answer. All known templates that take these out of earlier answers look for the second."""
_FIRST_MARK: Final = 0xE000
"""Placeholders: characters of Unicode's private use area, one for each message. In a caller's text they mean nothing: the template
is split at its placeholders before any text is put in."""

_Change = Callable[[str], str]


def _as_it_is(text: str) -> str:
    return text


def _stripped(text: str, *, of: str | None, left: bool, right: bool) -> str:
    text = text.lstrip(of) if left else text
    return text.rstrip(of) if right else text


_SIDES: Final = ((True, False), (False, True), (True, True))
_CHANGES: Final[tuple[_Change, ...]] = (
    _as_it_is,
    *(partial(_stripped, of=of, left=left, right=right) for of in ("\n", " ", None) for left, right in _SIDES),
)
"""What a template may do to a text, that which takes least first."""


@dataclass(frozen=True, slots=True)
class Message:
    """`field`: its path in the job."""

    role: Role
    text: str
    field: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered shape.

    `fixed`: what stands before the first place, between places and after the last one. `places`: the number of the message that
    stands there. `changes`: what becomes of its text; `thoughts`: of what follows its thoughts, empty where that is not known.
    `several`: it is known of thoughts that end more than once, too. `sought`: what the template looks for in a message, by its
    number; `sought_after`: in one with thoughts.
    """

    fixed: tuple[str, ...]
    places: tuple[int, ...]
    changes: tuple[_Change, ...]
    thoughts: tuple[_Change, ...]
    several: bool
    sought: Mapping[int, frozenset[str]]
    sought_after: Mapping[int, frozenset[str]]

    def around(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """The prompt before the last message, that message, and the prompt after it."""
        texts = [self._put_in(place, messages[number]) for place, number in enumerate(self.places)]
        last = self.places.index(len(messages) - 1)
        return _filled(self.fixed[: last + 1], texts[:last]), texts[last], _filled(self.fixed[last + 1 :], texts[last + 1 :])

    def check(self, messages: Sequence[Message]) -> None:
        """Raises InvalidInput with the path of a message that the template may treat in another way than it did the samples."""
        for number, message in enumerate(messages):
            text, sought = message.text, self.sought.get(number, frozenset())
            searched: Collection[tuple[str, frozenset[str]]] = ((text, sought),)
            if self._has_thoughts(message):
                text, sought = _after_thoughts(text), self.sought_after.get(number, frozenset())
                searched = ((message.text, sought - {_THINK, _THOUGHT}), (text, sought))
                if not self.several:
                    searched = (*searched, (message.text.rpartition(_THOUGHT)[0], frozenset([_THOUGHT])))
            found = next((one for said, these in searched for one in sorted(these) if one in said), None)
            if found is not None:
                what = f"the model's chat template treats messages with {found!r} in a way of its own"
                raise InvalidInput(f"{what}, which is not served in a conversation", field=message.field)
            if not text.strip():
                what = "the message has no text, or only thoughts, which the chat template leaves out"
                raise InvalidInput(f"{what}: leave the message out, or send its answer too", field=message.field)

    def _has_thoughts(self, message: Message) -> bool:
        return bool(self.thoughts) and message.role == "assistant" and _THOUGHT in message.text

    def _put_in(self, place: int, message: Message) -> str:
        if self._has_thoughts(message):
            return self.thoughts[place](_after_thoughts(message.text))
        return self.changes[place](message.text)


class ChatTemplate:
    """The template of one model. Thread-safe."""

    def __init__(self, card: Card, root: Path) -> None:
        """`root`: where the tokenizer is. Raises ModelBroken for a template without a place for a user's message, or that changes
        it in a way that is not known."""
        self._card = card
        given = {"tools": None, "documents": None, "add_generation_prompt": True}
        self._values: Mapping[str, object] = {**given, **special_tokens(root), **card.template_values}
        alone, told = self._samples(_ALONE), self._samples(_TOLD)
        found = rendered(card.template, [*alone, *told])
        self._alone = _learnt(_ALONE, found[: len(alone)])
        self._told: ChatPrompt | None = None
        try:
            prompt = _learnt(_TOLD, found[len(alone) :])
            self._told = prompt if 0 in prompt.places else None
        except ModelBroken:  # some templates allow no message of the role system
            pass
        # Guarded by the lock. A text: why the template does not take the shape.
        self._lock = Lock()
        self._shapes: OrderedDict[tuple[Roles, bool], ChatPrompt | str] = OrderedDict()

    @property
    def has_system(self) -> bool:
        """Whether there is a place for an instruction."""
        return self._told is not None

    def around(self, messages: Sequence[Message], *, with_image: bool = False) -> tuple[str, str, str]:
        """The prompt before the last message, which is the user's; that message, as the template puts it in; the prompt after it.

        `with_image`: the last message is an image and a text, and what the template has for an image is in the prompt before the
        text. Raises InvalidInput for a conversation that the template does not take, or that cannot be filled in as it would be
        rendered.
        """
        roles = tuple(message.role for message in messages)
        if roles == _ALONE and not with_image:
            return self._alone.around(messages)
        if roles == _TOLD and self._told is not None and not with_image:
            return self._told.around(messages)
        prompt = self._shape(roles, with_image)
        prompt.check(messages)
        return prompt.around(messages)

    def _shape(self, roles: Roles, with_image: bool) -> ChatPrompt:
        key = roles, with_image
        with self._lock:
            found = self._shapes.get(key)
            if found is not None:
                self._shapes.move_to_end(key)
        if found is None:
            found = self._render(roles, with_image)
            with self._lock:
                self._shapes[key] = found
                while len(self._shapes) > MOST_SHAPES:
                    self._shapes.popitem(last=False)
        if isinstance(found, str):
            raise _refused(found)
        return found

    def _render(self, roles: Roles, with_image: bool) -> ChatPrompt | str:
        try:
            found = rendered(self._card.template, self._samples(roles, with_image))
        except ModelBroken as error:  # not kept: on a machine that is less busy it may be in time
            raise _refused(error.message) from error
        try:
            prompt = _learnt(roles, found)
        except ModelBroken as error:
            return error.message
        around = sum(map(len, prompt.fixed))
        if around > MOST_AROUND:
            return f"the chat template: it puts {around:,} characters around messages; at most {MOST_AROUND:,} are served"
        # Samples show nothing of texts without what they have themselves.
        sampled = enumerate(_plain(roles))
        own = [one for number, text in sampled for one in sorted(prompt.sought.get(number, ())) if one in text]
        return f"the chat template: it looks for {own[0]!r} in messages, which is not served" if own else prompt

    def _samples(self, roles: Roles, with_image: bool = False) -> list[Mapping[str, object]]:
        """The values of the renderings that `_learnt` takes."""
        found: list[Mapping[str, object]] = []
        for texts in _texts(roles).values():
            contents: list[object] = list(texts)
            if self._card.message_parts:
                images = [{"type": "image"}] if with_image else []
                parts = [[{"type": "text", "text": text}] for text in texts]
                contents = [*parts[:-1], [*images, *parts[-1]]]
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            found.append({**self._values, "messages": messages})
        return found


def _refused(why: str) -> InvalidInput:
    return InvalidInput(f"the model does not take such a conversation: {why}", field=FIELD)


def _after_thoughts(text: str) -> str:
    return text.rpartition(_THOUGHT)[2]


# Samples


def _marks(roles: Roles) -> list[str]:
    return [chr(_FIRST_MARK + number) for number in range(len(roles))]


def _plain(roles: Roles) -> list[str]:
    """Texts that a template must put in as they are."""
    middle = " A <b>text</b>,\n  in \\lines\\ {so} " + "and more " * 300
    return [f"{number}{middle}end{number}" for number in range(len(roles))]


def _texts(roles: Roles) -> dict[str, list[str]]:
    """The messages of each rendering: placeholders; long and short texts that are put in as they are; texts with space around them,
    which begins and ends with either character that may be stripped alone. Where there are earlier answers: these with thoughts,
    with an end of thoughts alone, and some with several."""
    texts = [f"{number} a text" for number in range(len(roles))]
    found = {
        "marks": _marks(roles),
        "plain": _plain(roles),
        "short": ["aB"] * len(roles),
        "lines": [f"\n \t\u2003{text}\u2003\t \n" for text in texts],
        "spaces": [f" \n\t\u2003{text}\u2003\t\n " for text in texts],
    }
    answers = [number for number, role in enumerate(roles) if role == "assistant"]
    if answers:
        several = f"a {_THINK}b{_THOUGHT} c {_THINK}\n\n{_THOUGHT}\n\n"
        found["thoughts"] = _with_thoughts(found["lines"], f"{_THINK}\nI {{see}}.\n{_THOUGHT}", answers)
        found["ends"] = _with_thoughts(found["spaces"], f"I see.{_THOUGHT}", answers)
        found["several"] = _with_thoughts(texts, several, answers[::2])
    return found


def _with_thoughts(texts: Sequence[str], thoughts: str, where: Collection[int]) -> list[str]:
    return [thoughts + text if number in where else text for number, text in enumerate(texts)]


# What samples tell


def _learnt(roles: Roles, found: Sequence[Rendering]) -> ChatPrompt:
    """A shape by its renderings of `_texts`. Raises ModelBroken for one that has no place for the last message, or that changes
    texts in a way that is not known."""
    samples = _texts(roles)
    made = dict(zip(samples, found, strict=True))
    pieces = re.split(f"([{''.join(_marks(roles))}])", rendered_text(made["marks"]))
    fixed, places = tuple(pieces[::2]), tuple(ord(piece) - _FIRST_MARK for piece in pieces[1::2])
    if len(roles) - 1 not in places:
        raise ModelBroken("the chat template: it has no place for the message of the role 'user'")
    if places.count(len(roles) - 1) > 1:
        raise ModelBroken("the chat template: it puts the last message in more than once, which is not served")
    put_in = {name: [texts[number] for number in places] for name, texts in samples.items()}
    is_put_in = all(rendered_text(made[name]) == _filled(fixed, put_in[name]) for name in ("plain", "short"))
    changes = _changes(fixed, [(rendered_text(made[name]), put_in[name]) for name in ("lines", "spaces")])
    if changes is None or not is_put_in:
        raise ModelBroken("the chat template: it changes the texts of messages, which is not served")
    sought = _sought([made[name] for name in ("plain", "short", "lines", "spaces")])
    prompt = ChatPrompt(fixed, places, changes, (), False, sought, _sought(found[1:]))
    if "thoughts" not in made:
        return prompt
    # Texts that follow thoughts, where these are left out.
    after = [(made[name].text, list(map(_after_thoughts, put_in[name]))) for name in ("thoughts", "ends")]
    prompt = replace(prompt, thoughts=_changes(fixed, after) or ())
    said = [Message(role, text, "") for role, text in zip(roles, samples["several"], strict=True)]
    return replace(prompt, several="".join(prompt.around(said)) == made["several"].text)


def _sought(found: Sequence[Rendering]) -> dict[int, frozenset[str]]:
    sought: dict[int, frozenset[str]] = {}
    for number, text in (one for rendering in found for one in rendering.sought):
        sought[number] = sought.get(number, frozenset()) | {text}
    return sought


def _changes(fixed: Sequence[str], found: Sequence[tuple[str, Sequence[str]]]) -> tuple[_Change, ...] | None:
    """What was done to the text at each place, by renderings and the texts that they were made of. None: nothing that is known."""
    likely: list[tuple[_Change, ...]] = [_CHANGES] * (len(fixed) - 1)
    for rendering, texts in found:
        if not rendering.startswith(fixed[0]):
            return None
        at = len(fixed[0])
        for place, (text, after) in enumerate(zip(texts, fixed[1:], strict=True)):
            made = next((each(text) for each in _CHANGES if rendering.startswith(each(text) + after, at)), None)
            likely[place] = tuple(each for each in likely[place] if each(text) == made)
            if made is None or not likely[place]:
                return None
            at += len(made) + len(after)
        if at != len(rendering):
            return None
    return tuple(each[0] for each in likely)


def _filled(fixed: Sequence[str], texts: Sequence[str]) -> str:
    return fixed[0] + "".join(text + after for text, after in zip(texts, fixed[1:], strict=True))

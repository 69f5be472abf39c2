"""A standalone program that `chat.py` runs in a subprocess: renders a chat template within limits of memory and time.

Templates come with untrusted checkpoints. Jinja's sandbox keeps them from Python's internals, not from endless loops or texts of
gigabytes; resource limits (setrlimit) do. Imports nothing of Shoal, reads one JSON object from stdin,
`{"template", "values": [...]}`, and prints a list of a rendered `text` or an `error` for each of the values. Beside a text is what
the template looked for in the messages, `sought`: pairs of a message's place and a text, empty for what cannot be told.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final, Never

MEMORY_BYTES: Final = 512 << 20
CPU_SECONDS: Final = 2
MOST_CHARACTERS: Final = 1 << 20
MOST_SOUGHT: Final = 256
MOST_SOUGHT_CHARACTERS: Final = 128


def main() -> None:
    from jinja2 import TemplateError, runtime
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> Never:
        raise TemplateError(message)

    asked = json.load(sys.stdin)
    _limit()
    # The settings of transformers, for which templates are written.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = raise_exception
    # What `~`, macros and blocks of `set` are compiled to.
    runtime.str_join = _joined
    environment.concat = _joined  # type: ignore[method-assign]
    try:
        template = environment.from_string(asked["template"])
    except Exception as error:
        print(json.dumps([{"error": f"is not Jinja: {_told(error)}"}] * len(asked["values"])))
        return
    print(json.dumps([_rendered(template, values) for values in asked["values"]]))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _rendered(template: Any, values: dict[str, Any]) -> dict[str, Any]:
    _SOUGHT.clear()
    if "messages" in values:
        values = values | {"messages": [_heard(message, place) for place, message in enumerate(values["messages"])]}
    try:
        text: str = template.render(values)
    except Exception as error:
        return {"error": f"it cannot be rendered: {_told(error)}"}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it makes {len(text):,} characters of short texts; at most {MOST_CHARACTERS:,} are served"}
    return {"text": text, "sought": sorted(_SOUGHT)}


def _told(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:300]


_SOUGHT: set[tuple[int, str]] = set()


class _Heard(str):
    """A message's text, which notes what a template looks for in it: by `in`, `==` and the methods of str. What these return, and
    what it is joined with, is such a text too; of its length and order nothing is noted. `_places`: of the messages that it is
    made of."""

    _places: frozenset[int] = frozenset()

    def _note(self, *sought: object) -> None:
        """What cannot be told (a character by its place, one message's text in another's) is noted as the empty text."""
        for one in sought:
            if isinstance(one, str) and (one or type(one) is _Heard):
                is_known = not isinstance(one, _Heard) and len(_SOUGHT) < MOST_SOUGHT
                known = one[:MOST_SOUGHT_CHARACTERS] if is_known else ""
                _SOUGHT.update((place, known) for place in self._places)

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        self._note(other)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, part: str) -> bool:  # type: ignore[override]
        self._note(part)
        return str.__contains__(self, part)

    def __getitem__(self, key: Any) -> str:
        self._note(_Heard())
        return str.__getitem__(self, key)

    def __add__(self, other: str) -> Any:
        return _of(str.__add__(self, other), self._places | _places(other))

    def __radd__(self, other: str) -> Any:
        return _of(str.__add__(other, self), self._places | _places(other))


def _places(text: str) -> frozenset[int]:
    return text._places if isinstance(text, _Heard) else frozenset()


def _of(made: Any, places: frozenset[int]) -> Any:
    if isinstance(made, list | tuple):
        return type(made)(_of(each, places) for each in made)
    if not isinstance(made, str):
        return made
    heard = _Heard(made)
    heard._places = places
    return heard


def _joined(seq: Iterable[Any]) -> str:
    texts = list(map(str, seq))
    joined: str = _of("".join(texts), frozenset[int]().union(*map(_places, texts)))
    return joined


def _noting(name: str) -> Callable[..., Any]:
    own = getattr(str, name)

    def method(self: _Heard, *given: Any, **named: Any) -> Any:
        if name not in ("strip", "lstrip", "rstrip"):  # these are given characters
            first = given[0] if given else None
            self._note(*(first if isinstance(first, tuple) else (first,)), *named.values())
        return _of(own(self, *given, **named), self._places)

    return method


for _name in dir(str):
    if not _name.startswith("_") and _name not in ("format", "format_map", "join", "maketrans"):
        setattr(_Heard, _name, _noting(_name))


def _heard(message: Any, place: int) -> Any:
    """The message with a text, or parts of text, that note what is looked for in them."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _of(content, frozenset([place]))}
    if not isinstance(content, list):
        return message
    parts = [{**part, "text": _of(part["text"], frozenset([place]))} if "text" in part else part for part in content]
    return {**message, "content": parts}


if __name__ == "__main__":
    main()

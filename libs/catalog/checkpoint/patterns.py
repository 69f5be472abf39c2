"""Regular expressions that come with a checkpoint, matched in linear time.

Python's `re` goes back over what it has tried: `.?` forty times over takes for ever on a short name, and holds the interpreter all
the while. Here all ways through a pattern are followed at once (K. Thompson, Regular Expression Search Algorithm, CACM 1968):
at most pattern x name steps, whatever both are. The syntax is the part of `re` that names of modules are chosen with; the rest
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

MOST_CHARACTERS: Final = 200
_MOST_STEPS: Final = 2000
_MOST_DEPTH: Final = 20

Accepts: TypeAlias = Callable[[str], bool]
"""Of one character."""

_CATEGORIES: Final[dict[str, Accepts]] = {
    "d": str.isdecimal,
    "w": lambda letter: letter.isalnum() or letter == "_",
    "s": str.isspace,
}
_COUNT: Final = re.compile(r"\{(\d{1,3})(,?)(\d{0,3})\}", re.ASCII)
_TAIL: Final = re.compile(r"(?<![\w\\])\w+\Z")
_PUNCTUATION: Final = frozenset(".^$*+?{}[]()|\\/-_:, ")


class Unsupported(Exception):
    """A pattern that is none, or has what is not followed here; the message says what."""


@dataclass(frozen=True, slots=True)
class _Letter:
    accepts: Accepts


@dataclass(frozen=True, slots=True)
class _Edge:
    """The beginning or the end of the name."""

    at_end: bool


@dataclass(frozen=True, slots=True)
class _Chain:
    parts: Sequence[_Node]


@dataclass(frozen=True, slots=True)
class _Either:
    branches: Sequence[_Node]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """`most` None: without end."""

    part: _Node
    least: int
    most: int | None


_Node: TypeAlias = _Letter | _Edge | _Chain | _Either | _Repeat


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. Names are read from their end, where most of those that do not match already differ."""

    _steps: Sequence[_Step]
    _first: int
    _tail: str
    """What every name that matches ends with: told by a comparison, which is enough for most."""

    def matches_end(self, name: str) -> bool:
        """Whether the pattern matches `name` from its beginning, or from behind one of its dots, to its end.

        For names without line breaks this is `re.match(rf"(.*\\.)?({pattern})$", name)`.
        """
        if not name.endswith(self._tail):
            return False
        states = self._reached((self._first,), name, len(name))
        for place in range(len(name), -1, -1):
            if not states:
                return False
            if (place == 0 or name[place - 1] == ".") and any(self._steps[state].is_last for state in states):
                return True
            letter = name[place - 1] if place else ""
            states = self._reached((step.next[0] for step in self._after(states, letter)), name, place - 1)
        return False

    def _after(self, states: Iterable[int], letter: str) -> list[_Step]:
        found = (self._steps[state] for state in states)
        return [step for step in found if step.accepts is not None and letter and step.accepts(letter)]

    def _reached(self, states: Iterable[int], name: str, place: int) -> set[int]:
        """What can be reached from the states without reading a character before `place`."""
        found: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state in found:
                continue
            found.add(state)
            step = self._steps[state]
            if step.accepts is None and (step.edge is None or place == (len(name) if step.edge.at_end else 0)):
                waiting += step.next
        return found


@dataclass(frozen=True, slots=True)
class _Step:
    """Reads a character (`accepts`), needs an edge of the name, or does neither; then any of `next`, or is the last one."""

    next: Sequence[int] = ()
    accepts: Accepts | None = None
    edge: _Edge | None = None

    @property
    def is_last(self) -> bool:
        return not self.next


def compiled(pattern: str) -> Pattern:
    """Raises Unsupported for what is no pattern, or more than is followed here."""
    if len(pattern) > MOST_CHARACTERS:
        raise Unsupported(f"has {len(pattern):,} characters, more than {MOST_CHARACTERS}")
    program = _Program()
    first = program.add(_Reader(pattern).read(), program.put(_Step()))
    tail = _TAIL.search(pattern)
    return Pattern(tuple(program.steps), first, tail[0] if tail is not None and "|" not in pattern else "")


@dataclass(slots=True)
class _Program:
    """Steps are put in from the last to the first read one: each knows what follows it. Chains are read backwards, as names are."""

    steps: list[_Step] = field(default_factory=list)

    def put(self, step: _Step) -> int:
        if len(self.steps) >= _MOST_STEPS:
            raise Unsupported(f"repeats so much that it has more than {_MOST_STEPS:,} steps")
        self.steps.append(step)
        return len(self.steps) - 1

    def add(self, node: _Node, after: int) -> int:
        """The first step of a node that `after` follows."""
        match node:
            case _Letter(accepts):
                return self.put(_Step((after,), accepts=accepts))
            case _Edge():
                return self.put(_Step((after,), edge=node))
            case _Chain(parts):
                for part in parts:
                    after = self.add(part, after)
                return after
            case _Either(branches):
                return self.put(_Step([self.add(branch, after) for branch in branches]))
            case _Repeat(part, least, most):
                return self._repeated(part, least, most, after)

    def _repeated(self, part: _Node, least: int, most: int | None, after: int) -> int:
        if most is None:
            loop = self.put(_Step((after,)))  # replaced, once it is known where the part begins
            self.steps[loop] = _Step((after, self.add(part, loop)))
            after = loop
        else:
            skip = after
            for _ in range(most - least):
                after = self.put(_Step((skip, self.add(part, after))))
        for _ in range(least):
            after = self.add(part, after)
        return after


class _Reader:
    """Of one pattern, from its beginning to its end."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0

    def read(self) -> _Node:
        node = self._either()
        if self._place < len(self._pattern):
            raise Unsupported("closes a group that is not open")
        return node

    def _next(self) -> str:
        """The character that is next; empty at the end."""
        return self._pattern[self._place : self._place + 1]

    def _take(self, what: str = "") -> str:
        found = self._next()
        if not found:
            raise Unsupported("ends too early")
        if what and found != what:
            raise Unsupported(f"has {found!r} where {what!r} is needed")
        self._place += 1
        return found

    def _either(self) -> _Node:
        branches = [self._chain()]
        while self._next() == "|":
            self._take()
            branches.append(self._chain())
        return branches[0] if len(branches) == 1 else _Either(branches)

    def _chain(self) -> _Node:
        parts: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._counted(self._one()))
        return _Chain(parts)

    def _one(self) -> _Node:
        match letter := self._take():
            case ".":
                return _Letter(lambda other: other != "\n")
            case "^" | "$":
                return _Edge(letter == "$")
            case "(":
                return self._group()
            case "[":
                return _Letter(self._class())
            case "\\":
                return _Letter(self._escaped())
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise Unsupported(f"has {letter!r} where it means nothing: write \\{letter} for the character")
            case _:
                return _Letter(letter.__eq__)

    def _group(self) -> _Node:
        if self._next() == "?":
            self._take()
            if self._next() != ":":
                raise Unsupported("has a group of another kind than (...) and (?:...)")
            self._take()
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise Unsupported(f"has groups in groups, more than {_MOST_DEPTH} deep")
        node = self._either()
        self._take(")")
        self._depth -= 1
        return node

    def _counted(self, node: _Node) -> _Node:
        counts = self._counts()
        if counts is None:
            return node
        if isinstance(node, _Edge):
            raise Unsupported("repeats the beginning or the end of a name")
        if self._next() == "?":  # as few as will do: whether the whole matches is the same
            self._take()
        if self._next() in ("*", "+", "?", "{"):
            raise Unsupported("has one repetition on another")
        return _Repeat(node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._next() in simple:
            return simple[self._take()]
        if self._next() != "{":
            return None
        found = _COUNT.match(self._pattern, self._place)
        if found is None:
            raise Unsupported("has a '{' that is no repetition: write \\{ for the character")
        self._place = found.end()
        least = int(found[1])
        most = None if found[2] and not found[3] else int(found[3] or least) if found[2] else least
        if not found[2] and found[3]:
            least = most = int(found[1] + found[3])
        if most is not None and most < least:
            raise Unsupported("repeats at least more often than at most")
        return least, most

    def _escaped(self) -> Accepts:
        letter = self._take()
        if letter in _CATEGORIES:
            return _CATEGORIES[letter]
        if letter.lower() in _CATEGORIES:
            within = _CATEGORIES[letter.lower()]
            return lambda other: not within(other)
        if letter not in _PUNCTUATION:
            raise Unsupported(f"has \\{letter}, which is not followed here")
        return letter.__eq__

    def _class(self) -> Accepts:
        negated = self._next() == "^"
        if negated:
            self._take()
        accepts: list[Accepts] = []
        while self._next() != "]" or not accepts:
            accepts.append(self._range())
        self._take()
        return lambda other: any(one(other) for one in accepts) != negated

    def _range(self) -> Accepts:
        letter = self._take()
        if letter == "[":
            raise Unsupported("has '[' in a class: write \\[ for the character")
        if letter == "\\":
            one = self._escaped()
            if self._next() == "-":
                raise Unsupported("has a range of characters that begins with an escaped one")
            return one
        if self._next() != "-" or self._pattern[self._place + 1 : self._place + 2] in ("]", ""):
            return letter.__eq__
        self._take()
        last = self._take()
        if last in "\\[" or last < letter:
            raise Unsupported(f"has the range {letter}-{last}, which has no characters")
        return lambda other: letter <= other <= last

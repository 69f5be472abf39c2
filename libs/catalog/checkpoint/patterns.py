"""Matches regular expressions of untrusted checkpoints without backtracking.

Python's `re` backtracks: forty times `.?` takes for ever on a short name, while holding the GIL.
Here a pattern is compiled to a nondeterministic finite automaton (NFA) and simulated on all its
states at once (K. Thompson, Regular Expression Search Algorithm, CACM 1968), in time proportional
to pattern x name. The syntax is the subset of `re` used to select modules; the rest is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

MAX_CHARACTERS: Final = 200
_MAX_STATES: Final = 2000
_MAX_DEPTH: Final = 20

Accepts: TypeAlias = Callable[[str], bool]
"""Whether a character matches."""

_CATEGORIES: Final[dict[str, Accepts]] = {
    "d": str.isdecimal,
    "w": lambda letter: letter.isalnum() or letter == "_",
    "s": str.isspace,
}
_COUNT: Final = re.compile(r"\{(\d{1,3})(,?)(\d{0,3})\}", re.ASCII)
_TAIL: Final = re.compile(r"(?<![\w\\])\w+\Z")
_PUNCTUATION: Final = frozenset(".^$*+?{}[]()|\\/-_:, ")


class Unsupported(Exception):
    """A pattern that is invalid or outside the subset; the message says why, as a predicate of the
    pattern.
    """


@dataclass(frozen=True, slots=True)
class _Character:
    accepts: Accepts


@dataclass(frozen=True, slots=True)
class _Anchor:
    """`^` or `$`: the beginning or the end of the name."""

    at_end: bool


@dataclass(frozen=True, slots=True)
class _Concatenation:
    parts: Sequence[_Node]


@dataclass(frozen=True, slots=True)
class _Alternation:
    branches: Sequence[_Node]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A repetition from `least` to `most` times; None: unlimited."""

    part: _Node
    least: int
    most: int | None


_Node: TypeAlias = _Character | _Anchor | _Concatenation | _Alternation | _Repeat


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. Names are read from their end, where most names that do not match differ
    already.
    """

    _states: Sequence[_State]
    _first: int
    """The state before any character is read."""
    _tail: str
    """A literal suffix of all names that match, compared first: it excludes most other names."""

    def matches_end(self, name: str) -> bool:
        """Return True if the pattern matches all of `name`, or all that follows one of its dots.

        For names without line breaks this is `re.match(rf"(.*\\.)?({pattern})$", name)`.
        """
        if not name.endswith(self._tail):
            return False
        current = self._closure((self._first,), name, len(name))
        for place in range(len(name), -1, -1):
            if not current:
                return False
            if (place == 0 or name[place - 1] == ".") and any(
                self._states[number].is_last for number in current
            ):
                return True
            letter = name[place - 1] if place else ""
            current = self._closure(
                (state.next[0] for state in self._accepting(current, letter)), name, place - 1
            )
        return False

    def _accepting(self, numbers: Iterable[int], letter: str) -> list[_State]:
        """Return the states that read the character."""
        states = (self._states[number] for number in numbers)
        return [
            state
            for state in states
            if state.accepts is not None and letter and state.accepts(letter)
        ]

    def _closure(self, numbers: Iterable[int], name: str, place: int) -> set[int]:
        """Return the epsilon closure: the states that can be reached without reading the character
        before `place`.
        """
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            state = self._states[number]
            if state.accepts is None and (
                state.anchor is None or place == (len(name) if state.anchor.at_end else 0)
            ):
                waiting += state.next
        return found


@dataclass(frozen=True, slots=True)
class _State:
    """A state of the automaton: it reads a character that `accepts`, or requires an anchor, or
    neither; then goes to any of `next`.

    The state without `next` is the accepting one.
    """

    next: Sequence[int] = ()
    accepts: Accepts | None = None
    anchor: _Anchor | None = None

    @property
    def is_last(self) -> bool:
        return not self.next


def compiled(pattern: str) -> Pattern:
    """Return the pattern, compiled. Raises Unsupported for an invalid pattern, and for syntax
    outside the subset.
    """
    if len(pattern) > MAX_CHARACTERS:
        raise Unsupported(f"has {len(pattern):,} characters, more than {MAX_CHARACTERS}")
    compiler = _Compiler()
    first = compiler.add(_Parser(pattern).read(), compiler.put(_State()))
    tail = _TAIL.search(pattern)
    return Pattern(
        tuple(compiler.states), first, tail[0] if tail is not None and "|" not in pattern else ""
    )


@dataclass(slots=True)
class _Compiler:
    """Builds the automaton from the accepting state backwards, as each state names its successors.

    Since names are read from their end, the last part of a sequence is read first.
    """

    states: list[_State] = field(default_factory=list)

    def put(self, state: _State) -> int:
        """Adds a state and returns its number."""
        if len(self.states) >= _MAX_STATES:
            raise Unsupported(f"expands to more than {_MAX_STATES:,} states: repeat less")
        self.states.append(state)
        return len(self.states) - 1

    def add(self, node: _Node, after: int) -> int:
        """Adds the states of a node that continues at the state `after`; returns the state that it
        starts in.
        """
        match node:
            case _Character(accepts):
                return self.put(_State((after,), accepts=accepts))
            case _Anchor():
                return self.put(_State((after,), anchor=node))
            case _Concatenation(parts):
                for part in parts:
                    after = self.add(part, after)
                return after
            case _Alternation(branches):
                return self.put(_State([self.add(branch, after) for branch in branches]))
            case _Repeat(part, least, most):
                return self._repeated(part, least, most, after)

    def _repeated(self, part: _Node, least: int, most: int | None, after: int) -> int:
        if most is None:
            loop = self.put(
                _State((after,))
            )  # replaced below, when the part's first state is known
            self.states[loop] = _State((after, self.add(part, loop)))
            after = loop
        else:
            skip = after
            for _ in range(most - least):
                after = self.put(_State((skip, self.add(part, after))))
        for _ in range(least):
            after = self.add(part, after)
        return after


class _Parser:
    """A recursive-descent parser of one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0

    def read(self) -> _Node:
        node = self._alternation()
        if self._place < len(self._pattern):
            raise Unsupported("closes a group that is not open: write \\) for the character")
        return node

    def _next(self) -> str:
        """Return the next character, without consuming it; empty at the end."""
        return self._pattern[self._place : self._place + 1]

    def _take(self, expected: str = "") -> str:
        """Consumes a character, which must be `expected` if that is given."""
        found = self._next()
        if not found:
            raise Unsupported("ends too early")
        if expected and found != expected:
            raise Unsupported(f"has {found!r} where {expected!r} is needed")
        self._place += 1
        return found

    def _alternation(self) -> _Node:
        branches = [self._concatenation()]
        while self._next() == "|":
            self._take()
            branches.append(self._concatenation())
        return branches[0] if len(branches) == 1 else _Alternation(branches)

    def _concatenation(self) -> _Node:
        parts: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repetition(self._atom()))
        return _Concatenation(parts)

    def _atom(self) -> _Node:
        match letter := self._take():
            case ".":
                return _Character(lambda other: other != "\n")
            case "^" | "$":
                return _Anchor(letter == "$")
            case "(":
                return self._group()
            case "[":
                return _Character(self._class())
            case "\\":
                return _Character(self._escape())
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise Unsupported(
                    f"has {letter!r} where there is nothing to repeat or close: write "
                    f"\\{letter} "
                    "for the character"
                )
            case _:
                return _Character(letter.__eq__)

    def _group(self) -> _Node:
        if self._next() == "?":
            self._take()
            if self._next() != ":":
                raise Unsupported("has a group of another kind than (...) and (?:...)")
            self._take()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unsupported(f"has groups nested more than {_MAX_DEPTH} deep")
        node = self._alternation()
        self._take(")")
        self._depth -= 1
        return node

    def _repetition(self, node: _Node) -> _Node:
        counts = self._counts()
        if counts is None:
            return node
        if isinstance(node, _Anchor):
            raise Unsupported("repeats the beginning or the end of a name")
        if (
            self._next() == "?"
        ):  # lazy repetition, which does not change whether a whole name matches
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
            raise Unsupported("has a '{' that begins no repetition: write \\{ for the character")
        self._place = found.end()
        least = int(found[1])
        most = None if found[2] and not found[3] else int(found[3] or least) if found[2] else least
        if not found[2] and found[3]:
            least = most = int(found[1] + found[3])
        if most is not None and most < least:
            raise Unsupported("repeats at least more often than at most")
        return least, most

    def _escape(self) -> Accepts:
        letter = self._take()
        if letter in _CATEGORIES:
            return _CATEGORIES[letter]
        if letter.lower() in _CATEGORIES:
            within = _CATEGORIES[letter.lower()]
            return lambda other: not within(other)
        if letter not in _PUNCTUATION:
            raise Unsupported(f"has \\{letter}, which is not supported")
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
            one = self._escape()
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

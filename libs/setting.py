"""Declare the settings of a service once, as fields of a frozen dataclass.

A field made by `text`, `integer`, `choice` and so on states everything about one variable: its
name, type, default, unit, allowed values, description, and whether it is a secret. From these
declarations `read` parses the environment, `check_fields` validates, `describe` makes the log line
at the start, and `tools.docs.settings` writes docs/reference/settings.md. To add a setting, add a
field.

A library would do this too. Measured with Python 3.11 on 2 busy cores, medians of 5:

- Import: pydantic-settings 2.16 loads 197 modules in 240 ms of CPU time and environs 15.2 loads 60
  in 110 ms. This module loads one other in 10 ms.
- Dependencies: pydantic-settings needs six packages, 10 MB, in every image. environs needs two and
  reads one variable per call, so units, bounds of fields and descriptions stay elsewhere.
- Errors: pydantic reports "Input should be greater than or equal to 1000 [type=greater_than_equal,
  input_value='5', input_type=str]" and a link. An operator needs the variable, its allowed values
  and the value in one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

from libs.environment import random_id
from libs.errors import InvalidInput

Environ = Mapping[str, str]
Loggable = str | float
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = ("DEBUG", "INFO", "WARNING", "ERROR")

T = TypeVar("T")
Choice = TypeVar("Choice", bound=str)
Integer = TypeVar("Integer", bound="int | None")
File = TypeVar("File", bound="Path | None")

_KEY: Final = "shoal"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_UNSET: Final = object()


@dataclass(frozen=True, slots=True)
class Allowed:
    """The values that a setting may have, if they are fewer than those of its type."""

    text: str
    """Follows "must be" in errors."""
    holds: Callable[[Any], bool]


ANY: Final = Allowed("", lambda _: True)
NAME: Final = Allowed(
    "1..63 letters, digits, '.', '_' or '-'", lambda value: bool(_NAME.fullmatch(value))
)
"""Names of workers, pools, routers and schedulers, which become part of keys and log lines."""
ADDRESS: Final = Allowed("host:port or unix:path", bool)


def in_range(low: float, high: float, why: str = "") -> Allowed:
    return Allowed(
        f"{low}..{high}{f': {why}' if why else ''}", lambda value: bool(low <= value <= high)
    )


def above(low: float, high: float | str = math.inf) -> Allowed:
    """Allow numbers above `low`, and at most `high`.

    Args:
        high: The variable that limits this one, which the class checks itself, or a number.
    """
    text = f"above {low}" if high == math.inf else f"above {low}, at most {high}"
    most = math.inf if isinstance(high, str) else high
    return Allowed(text, lambda value: bool(low < value <= most))


def at_least(low: float, text: str = "") -> Allowed:
    """Allow numbers from `low`, and None where the field may be None.

    Args:
        text: Describes the allowed values better than their lower bound.
    """
    return Allowed(text or f"at least {low}", lambda value: value is None or bool(value >= low))


class SettingOptions(TypedDict, total=False):
    """Rarely needed parts of a declaration."""

    unset: Callable[[Environ], Any]
    """Returns the value if the variable is unset, where that is not the field's default."""
    default_text: str
    """Describes, for the documentation, a default that depends on the machine."""
    is_empty_refused: bool
    """Whether an empty variable is parsed. Otherwise it counts as unset."""
    is_secret: bool
    """Whether errors and logs must not repeat the value."""
    log: Callable[[Any], Loggable]
    """Returns the value for the log line at the start."""
    log_name: str
    """The name in that line, where it is not the field's."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable."""

    variable: str
    description: str
    kind: str = "text"
    """The type, as errors and the documentation name it."""
    unit: str = ""
    parse: Callable[[str], Any] = str
    """Converts the text of the variable. Raises ValueError, or InvalidInput with a message that
    says more than `kind`.
    """
    allowed: Allowed = ANY
    unset: Callable[[Environ], Any] = lambda _: _UNSET
    default_text: str = ""
    is_empty_refused: bool = False
    is_secret: bool = False
    log: Callable[[Any], Loggable] | None = None
    log_name: str = ""

    @property
    def variables(self) -> tuple[Setting, ...]:
        return (self,)

    @property
    def type(self) -> str:
        return f"{self.kind} of {self.unit}" if self.unit else self.kind

    def read(self, environ: Environ) -> Any:
        """Return the parsed variable, or _UNSET for the field's default. Raises InvalidInput."""
        given = environ.get(self.variable)
        if given is None or not (given or self.is_empty_refused):
            return self.unset(environ)
        try:
            return self.parse(given)
        except ValueError:
            raise self._refusal(given) from None

    def check(self, value: object) -> None:
        if not self.allowed.holds(value):
            raise self._refusal(str(self.log(value)) if self.log is not None else shown(value))

    def described(self, name: str, value: object) -> Mapping[str, Loggable]:
        if self.log is not None:
            logged = self.log(value)
        elif self.is_secret:
            logged = "set" if value else ""
        else:
            logged = value if isinstance(value, (bool, int, float)) else shown(value)
        return {self.log_name or name: logged}

    def _refusal(self, given: str) -> InvalidInput:
        limits = self.allowed.text
        expected = (
            ", ".join(filter(None, [self.type, limits])) if self.unit else limits or self.type
        )
        value = "" if self.is_secret else f", not {given!r}"
        return InvalidInput(f"{self.variable} must be {expected}{value}", field=self.variable)


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Several variables that become one field."""

    read: Callable[[Environ], Any]
    variables: tuple[Setting, ...]
    log: Callable[[Any], Loggable | Mapping[str, Loggable]]
    """Returns the value for the log line at the start, or several values with their names."""

    def check(self, value: object) -> None:
        """Accept the value: the object has checked itself."""

    def described(self, name: str, value: object) -> Mapping[str, Loggable]:
        logged = self.log(value)
        return logged if isinstance(logged, Mapping) else {name: logged}


def text(
    variable: str,
    default: str,
    description: str,
    allowed: Allowed = ANY,
    kind: str = "text",
    **options: Unpack[SettingOptions],
) -> str:
    return _field(Setting(variable, description, kind, "", str, allowed, **options), default)


def integer(
    variable: str,
    default: Integer,
    unit: str,
    allowed: Allowed,
    description: str,
    *,
    has_exponent: bool = False,
    **options: Unpack[SettingOptions],
) -> Integer:
    """Declare a whole number, or None if that is the default.

    Args:
        has_exponent: Whether the variable may be written as 2e7.
    """
    parse = _integer_or_exponent if has_exponent else _integer
    return _field(
        Setting(variable, description, "a whole number", unit, parse, allowed, **options), default
    )


def seconds(
    variable: str,
    default: float,
    allowed: Allowed,
    description: str,
    **options: Unpack[SettingOptions],
) -> float:
    return _field(
        Setting(variable, description, "a number", "seconds", _number, allowed, **options), default
    )


def flag(variable: str, default: bool, description: str, **options: Unpack[SettingOptions]) -> bool:
    return _field(Setting(variable, description, "0 or 1", "", _flag, **options), default)


def choice(
    variable: str,
    default: Choice,
    choices: Sequence[Choice],
    description: str,
    **options: Unpack[SettingOptions],
) -> Choice:
    kind = f"one of {', '.join(choices)}"
    among = Allowed("", lambda value: value in choices)
    return _field(
        Setting(variable, description, kind, "", partial(_choice, choices), among, **options),
        default,
    )


def path(
    variable: str,
    default: File,
    description: str,
    kind: str = "path",
    **options: Unpack[SettingOptions],
) -> File:
    return _field(Setting(variable, description, kind, "", Path, **options), default)


def items(
    variable: str,
    default: tuple[str, ...],
    allowed: Allowed,
    description: str,
    **options: Unpack[SettingOptions],
) -> tuple[str, ...]:
    """Declare a list of texts, separated by commas."""
    return _field(Setting(variable, description, "list", "", split, allowed, **options), default)


def parsed(
    variable: str,
    kind: str,
    parse: Callable[[str], T],
    default: Callable[[], T],
    description: str,
    allowed: Allowed = ANY,
    **options: Unpack[SettingOptions],
) -> T:
    """Declare a value that `parse` makes of the variable.

    Args:
        parse: Raises InvalidInput that names the variable, or ValueError.
        default: Returns the value of an unset variable.
    """
    return _made_field(Setting(variable, description, kind, "", parse, allowed, **options), default)


def group(
    read: Callable[[Environ], T],
    variables: Iterable[Setting],
    default: Callable[[], T],
    log: Callable[[T], Loggable | Mapping[str, Loggable]],
) -> T:
    """Declare a value that `read` makes of several variables.

    Args:
        read: Raises InvalidInput that names the variable.
        variables: `list_variables` a class, or settings that only document what `read` does.
        default: Returns the value of objects that are not read from an environment.
        log: Returns the value for the log line at the start, or several values with their names.
    """
    return _made_field(SettingGroup(read, tuple(variables), log), default)


def identity(variable: str, role: str, description: str) -> str:
    """Declare the name of a process in its mesh; by default a random one."""
    default_text = "the host's name and 8 hexadecimal digits"
    setting = Setting(variable, description, allowed=NAME, default_text=default_text)
    return _made_field(setting, partial(random_id, role))


def log_level() -> LogLevel:
    return choice(
        "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS, "The lowest level of log lines that are written."
    )


def metrics_address() -> str:
    return text(
        "SHOAL_METRICS_ADDRESS",
        "",
        "Address that Prometheus scrapes, plain HTTP without credentials. Empty: none.",
        kind="host:port",
    )


def routers(*, is_empty_refused: bool = False) -> tuple[str, ...]:
    """Declare the routers that a worker or an edge connects to."""
    return parsed(
        "SHOAL_ROUTERS",
        "list",
        lambda given: tuple(part.strip() for part in given.split(",")),
        lambda: ("127.0.0.1:50051",),
        "Addresses of routers, or dns:///name:port.",
        Allowed("addresses separated by commas", lambda value: bool(value) and all(value)),
        default_text="`127.0.0.1:50051`",
        is_empty_refused=is_empty_refused,
    )


def documented(descriptions: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return settings that only document variables, which other code reads."""
    return tuple(Setting(variable, text) for variable, text in descriptions.items())


def declared(kind: type) -> dict[str, Setting | SettingGroup]:
    """Return the declarations in a dataclass by the names of their fields."""
    return {one.name: one.metadata[_KEY] for one in fields(kind) if _KEY in one.metadata}


def list_variables(kind: type, without: Collection[str] = ()) -> tuple[Setting, ...]:
    """Return all variables of a class, those of groups included.

    Args:
        without: Names of fields to leave out.
    """
    return tuple(
        setting
        for name, one in declared(kind).items()
        if name not in without
        for setting in one.variables
    )


def read(kind: type[T], environ: Environ, without: Collection[str] = ()) -> T:
    """Return an object of the class with the values of its variables.

    Args:
        without: Names of fields that keep their defaults.

    Raises:
        InvalidInput: A value is invalid. The error names variable, value and allowed values.
    """
    values = {
        name: one.read(environ) for name, one in declared(kind).items() if name not in without
    }
    return kind(**{name: value for name, value in values.items() if value is not _UNSET})


def check_fields(settings: object) -> None:
    """Raise InvalidInput for the first field with a value that its declaration does not allow."""
    for name, one in declared(type(settings)).items():
        one.check(getattr(settings, name))


def describe(settings: object, without: Collection[str] = ()) -> dict[str, Loggable]:
    """Return names and values for the log line at the start, without secrets.

    Args:
        without: Names of fields to leave out.
    """
    described: dict[str, Loggable] = {}
    for name, one in declared(type(settings)).items():
        if name not in without:
            described |= one.described(name, getattr(settings, name))
    return described


def shown(value: object) -> str:
    """Return a value as its variable would hold it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def split(given: str) -> tuple[str, ...]:
    """Return the texts between commas, without surrounding blanks and without empty ones."""
    return tuple(filter(None, (part.strip() for part in given.split(","))))


def _field(setting: Setting, default: T) -> T:
    return field(default=default, repr=not setting.is_secret, metadata={_KEY: setting})


def _made_field(setting: Setting | SettingGroup, default: Callable[[], T]) -> T:
    return field(default_factory=default, metadata={_KEY: setting})


def _integer(given: str) -> int:
    return int(given)


def _integer_or_exponent(given: str) -> int:
    value = _number(given)
    if not value.is_integer():
        raise ValueError(given)
    return int(value)


def _number(given: str) -> float:
    value = float(given)
    if not math.isfinite(value):
        raise ValueError(given)
    return value


def _flag(given: str) -> bool:
    if given not in ("0", "1"):
        raise ValueError(given)
    return given == "1"


def _choice(choices: Sequence[Choice], given: str) -> Choice:
    for one in choices:
        if one == given:
            return one
    raise ValueError(given)

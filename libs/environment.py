"""Reads settings from environment variables: every error names the variable and its allowed
values.
"""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeVar

from libs.errors import InvalidInput

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = ("DEBUG", "INFO", "WARNING", "ERROR")

Environ = Mapping[str, str]
Choice = TypeVar("Choice", bound=str)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check(holds: bool, name: str, allowed: str) -> None:
    """Raises InvalidInput unless `holds`."""
    if not holds:
        raise InvalidInput(f"{name} must be {allowed}", field=name)


def check_name(value: str, name: str) -> None:
    """Checks the name of a worker, pool, router or scheduler, which becomes part of keys and of log
    lines.
    """
    check(bool(_NAME.fullmatch(value)), name, "1..63 letters, digits, '.', '_' or '-'")


def is_loopback_host(host: str) -> bool:
    """Return True if the host is certainly this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def number(environ: Environ, name: str, default: float) -> float:
    """Return a finite number; the default if the variable is not set or empty."""
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    check(math.isfinite(value), name, f"a number, not {text!r}")
    return value


def integer(environ: Environ, name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidInput(f"{name} must be a whole number, not {text!r}", field=name) from None


def choice(environ: Environ, name: str, default: Choice, allowed: Sequence[Choice]) -> Choice:
    value = environ.get(name, "") or default
    for one in allowed:
        if one == value:
            return one
    raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, not {value!r}", field=name)


def random_id(kind: str) -> str:
    """Return the host's name, or `kind` if it has none, and eight random hex digits."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:48].strip("-.")
    return f"{host or kind}-{secrets.token_hex(4)}"

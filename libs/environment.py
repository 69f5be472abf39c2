"""Reading settings from environment variables: every error names the variable and what it may be."""

from __future__ import annotations

import ipaddress
import math
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

from libs.errors import InvalidInput

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LOG_LEVELS: Final[tuple[LogLevel, ...]] = ("DEBUG", "INFO", "WARNING", "ERROR")

Environ = Mapping[str, str]
Choice = TypeVar("Choice", bound=str)

_VISIBLE: Final = re.compile(r"[!-~]{1,4096}")
_REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
_REDIS_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]{1,253}")
_REDIS_DATABASE: Final = re.compile(r"(/\d{0,4})?", re.ASCII)
_REDIS_ARGUMENTS: Final = ("username", "password", "client_name")
_REDIS_FORM: Final = (
    "redis://[user:password@]host[:port][/database], rediss:// likewise, or unix://[user:password@]/path, with ?db=, host=, "
    "username=, password= or client_name= and nothing else; what is none of A-Z a-z 0-9 . _ - in a password is written %XX, "
    "such as %2F for /"
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check(holds: bool, name: str, allowed: str) -> None:
    """Raises InvalidInput unless `holds`."""
    if not holds:
        raise InvalidInput(f"{name} must be {allowed}", field=name)


def check_name(value: str, name: str) -> None:
    """A worker's, a pool's, a router's or a scheduler's: part of keys and of log lines."""
    check(bool(_NAME.fullmatch(value)), name, "1..63 letters, digits, '.', '_' or '-'")


def check_redis_url(url: str) -> None:
    """Raises InvalidInput, which repeats nothing of it: a password that is written wrongly may be read as any part."""
    check(url.startswith(tuple(f"{scheme}://" for scheme in _REDIS_SCHEMES)), "SHOAL_REDIS_URL", "redis://, rediss:// or unix://")
    check(_is_redis_url(url), "SHOAL_REDIS_URL", _REDIS_FORM)


def _is_redis_url(url: str) -> bool:
    if not _VISIBLE.fullmatch(url) or "#" in url:
        return False
    try:
        parts = urlsplit(url)
        has_port = parts.port is not None
        arguments = parse_qs(parts.query, strict_parsing=bool(parts.query), max_num_fields=10)
    except ValueError:
        return False
    place = parts.netloc.rpartition("@")[2]
    if parts.scheme == "unix":
        is_place = not place and bool(parts.path.strip("/")) and not (parts.netloc and "@" in parts.path)
    else:
        # Without a host it is localhost, or the query's.
        is_place = bool(_REDIS_HOST.fullmatch(parts.hostname or "localhost")) and bool(_REDIS_DATABASE.fullmatch(parts.path))
        is_place = is_place and not (has_port and not parts.hostname) and not place.endswith(":")
    return is_place and all(_is_argument(name, values) for name, values in arguments.items())


def _is_argument(name: str, values: Sequence[str]) -> bool:
    if len(values) != 1:
        return False
    if name == "db":
        return bool(_REDIS_DATABASE.fullmatch(f"/{values[0]}"))
    # Of the latter it is said elsewhere what to set instead.
    return (name == "host" and bool(_REDIS_HOST.fullmatch(values[0]))) or name in _REDIS_ARGUMENTS or name.startswith("ssl_")


def is_loopback_host(host: str) -> bool:
    """Whether it is this machine. In doubt it is not so."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_password(url: str) -> str:
    """A URL that `check_redis_url` takes, as it may stand in a log."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def number(environ: Environ, name: str, default: float) -> float:
    """A finite number; the default if the variable is not set or empty."""
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
    """The host's name, or `kind` if it has none, and eight random hex digits."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:48].strip("-.")
    return f"{host or kind}-{secrets.token_hex(4)}"

"""Decide whether a request is from the console's page, opened under a known name. Pure.

Any web page can make a browser send requests to any address, including this machine's. Three checks
keep other pages out:

- Host: an attacker's name can be made to resolve to this machine (DNS rebinding), and the browser
  then treats the console as part of that page. Only addresses of this machine and names that an
  operator lists are answered.
- The header x-shoal-console: no form or link can send it, and a script of another page needs
  permission (CORS), which the edge grants only to listed origins. The third check refuses those.
- Origin and Sec-Fetch-Site, if the browser sends them: they must be those of the page. Its origin
  matches the Host, unless an operator lists the console's origins because a proxy in front of it
  has another name or scheme.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import Final

from services.edge.messages.base import HttpError

HEADER: Final = "x-shoal-console"
_LOCAL: Final = "localhost"
_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]+?)\.?)(?::[0-9]*)?")
_ORIGIN: Final = re.compile(
    r"(?P<scheme>https?)://(?P<name>[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::(?P<port>[1-9][0-9]{0,4}))?"
)


def check_host(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Raise HttpError (421) unless the request's Host is this machine's loopback or one of
    `names`.
    """
    given = headers.get("host", "")
    host = host_name(given)
    if is_local(host) or host in names:
        return
    text = (
        f"the console does not answer for the host {given[:100]!r}: open it as http://127.0.0.1, "
        "or add the name to SHOAL_CONSOLE_HOSTS"
    )
    raise HttpError("PERMISSION_DENIED", text, field="host", status=421)


def check_page(headers: Mapping[str, str], origins: Collection[str] = ()) -> None:
    """Raise HttpError (403) unless the console's page, or a program, sent the request on purpose.

    Args:
        headers: The request's headers.
        origins: The exact origins of the page. If empty, the Host's by http or https. A loopback
            Host is always accepted too, since tunnels end there.
    """
    origin, site, host = (
        headers.get("origin"),
        headers.get("sec-fetch-site", "same-origin"),
        headers.get("host", ""),
    )
    if not headers.get(HEADER):
        raise HttpError(
            "PERMISSION_DENIED", f"this request needs the header {HEADER}: 1", field=HEADER
        )
    if site != "same-origin":
        raise HttpError(
            "PERMISSION_DENIED",
            "this request is not from the console's page",
            field="origin",
        )
    if origin is None or origin in origins:
        return
    if not (is_same(origin, host) and (not origins or is_local(host_name(host)))):
        text = (
            f"this request is from {origin[:100]!r}, which is not the console's page: if a proxy "
            "is in front of it, list its origin in "
            "SHOAL_CONSOLE_ORIGINS"
        )
        raise HttpError("PERMISSION_DENIED", text, field="origin")


def origin_name(origin: str) -> str:
    """Return the name in `https://mesh.example:8443`. Raises ValueError unless `origin` has the
    form that browsers send: http or https, a name or an IPv4 address in lower case, a port only if
    it is not the scheme's default, and nothing after it.
    """
    found = _ORIGIN.fullmatch(origin)
    if found is None or (found["scheme"], found["port"]) in (("http", "80"), ("https", "443")):
        raise ValueError(f"{origin!r} is not an origin")
    return found["name"]


def check_json(headers: Mapping[str, str]) -> None:
    """Raise HttpError unless the body is declared as JSON, which no form can send."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(
            "UNSUPPORTED_MEDIA", "the content-type must be application/json", field="content-type"
        )


def is_same(origin: str, host: str) -> bool:
    """Return whether this Host served a page of this origin over http or https."""
    scheme, separator, name = origin.partition("://")
    return (
        bool(separator)
        and scheme in ("http", "https")
        and bool(host)
        and name.lower() == host.lower()
    )


def host_name(given: str) -> str:
    """Return a Host header without its port and without the brackets of an IPv6 address; empty if
    it is invalid.
    """
    found = _HOST.fullmatch(given.lower())
    return (found["address"] or found["name"]) if found is not None else ""


def is_local(host: str) -> bool:
    """Return whether a host is this machine's loopback, by name or address."""
    return (
        host == _LOCAL
        or host.endswith(f".{_LOCAL}")
        or (is_address(host) and ip_address(host).is_loopback)
    )


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, which no resolver can redirect."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True

"""Which requests come from the console's own page, opened by a name that is ours. Pure.

A browser is asked by any page to send requests to any address, this machine's included. Three
checks keep other pages out:

- Host: a name that somebody else owns can be made to resolve to this machine (DNS rebinding), and
  the browser then takes the
  console for a part of that page. Addresses of this machine and the names that an operator lists
  are answered, no others.
- The header x-shoal-console: no form and no link can send it, and a script of another page needs a
  permission (CORS) that the
  edge gives to listed origins only, whose requests the third check refuses.
- Origin and Sec-Fetch-Site, where a browser sends them: the page's own. That is the Host's, unless
  an operator lists the origins
  under which browsers know the console, because a proxy before it has another name or another
  scheme.
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
    """Raises HttpError (421) unless the request's Host is this machine's loopback or one of
    `names`.
    """
    given = headers.get("host", "")
    host = host_of(given)
    if is_local(host) or host in names:
        return
    text = (
        f"the console does not answer for the host {given[:100]!r}: open it as http://127.0.0.1, or add the name to "
        "SHOAL_CONSOLE_HOSTS"
    )
    raise HttpError("PERMISSION_DENIED", text, field="host", status=421)


def check_page(headers: Mapping[str, str], origins: Collection[str] = ()) -> None:
    """Raises HttpError (403) unless a page of this origin, or a program, sent the request on
    purpose.

    `origins`: those of the page, letter for letter; none: the Host's, by http or https. A Host of
    this machine's loopback counts besides, since tunnels end there.
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
            "this request comes from another page than the console",
            field="origin",
        )
    if origin is None or origin in origins:
        return
    if not (is_same(origin, host) and (not origins or is_local(host_of(host)))):
        text = (
            f"this request comes from {origin[:100]!r}, another page than the console: if a proxy stands before it, list that in "
            "SHOAL_CONSOLE_ORIGINS"
        )
        raise HttpError("PERMISSION_DENIED", text, field="origin")


def name_of(origin: str) -> str:
    """The name in `https://mesh.example:8443`. Raises ValueError unless it is an origin as browsers
    write it: http or https, a name or an address of IPv4 in lower case, a port only if it is not
    the scheme's own, and nothing behind it."""
    found = _ORIGIN.fullmatch(origin)
    if found is None or (found["scheme"], found["port"]) in (("http", "80"), ("https", "443")):
        raise ValueError(f"{origin!r} is no origin")
    return found["name"]


def check_json(headers: Mapping[str, str]) -> None:
    """Raises HttpError unless the body is declared as JSON, which no form can send."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(
            "UNSUPPORTED_MEDIA", "the content-type must be application/json", field="content-type"
        )


def is_same(origin: str, host: str) -> bool:
    """Whether a page of this origin was served by this Host, over http or https."""
    scheme, separator, name = origin.partition("://")
    return (
        bool(separator)
        and scheme in ("http", "https")
        and bool(host)
        and name.lower() == host.lower()
    )


def host_of(given: str) -> str:
    """Returns a Host header without its port, an address of IPv6 without its brackets; empty if it
    is not a host.
    """
    found = _HOST.fullmatch(given.lower())
    return (found["address"] or found["name"]) if found is not None else ""


def is_local(host: str) -> bool:
    """Whether a host is this machine's loopback, by name or address."""
    return (
        host == _LOCAL
        or host.endswith(f".{_LOCAL}")
        or (is_address(host) and ip_address(host).is_loopback)
    )


def is_address(host: str) -> bool:
    """Whether a host is an IP address, so that no resolver decides where it leads."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True

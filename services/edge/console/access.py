"""Which requests come from the console's own page, opened by a name that is ours. Pure.

A browser is asked by any page to send requests to any address, this machine's included. Three checks keep other pages out:

- Host: a name that somebody else owns can be made to resolve to this machine (DNS rebinding), and the browser then takes the
  console for a part of that page. Addresses of this machine and the names that an operator lists are answered, no others.
- The header x-shoal-console: no form and no link can send it, and a script of another page needs a permission (CORS) that the
  edge never gives.
- Origin and Sec-Fetch-Site, where a browser sends them: the page's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import Final

from services.edge.messages.base import Problem

HEADER: Final = "x-shoal-console"
_LOCAL: Final = "localhost"


def check_host(headers: Mapping[str, str], names: Collection[str]) -> None:
    """Raises Problem (421) unless the request's Host is this machine's loopback or one of `names`."""
    given = headers.get("host", "")
    host = _host_of(given)
    if host == _LOCAL or host.endswith(f".{_LOCAL}") or _is_loopback(host) or host in names:
        return
    text = (
        f"the console does not answer for the host {given[:100]!r}: open it as http://127.0.0.1, or add the name to "
        "SHOAL_CONSOLE_HOSTS"
    )
    raise Problem("PERMISSION_DENIED", text, field="host", status=421)


def check_page(headers: Mapping[str, str]) -> None:
    """Raises Problem (403) unless a page of this origin, or a program, sent the request on purpose."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if not headers.get(HEADER):
        raise Problem("PERMISSION_DENIED", f"this request needs the header {HEADER}: 1", field=HEADER)
    if site != "same-origin" or (origin is not None and not _is_same(origin, headers.get("host", ""))):
        raise Problem("PERMISSION_DENIED", "this request comes from another page than the console", field="origin")


def check_json(headers: Mapping[str, str]) -> None:
    """Raises Problem unless the body is declared as JSON, which no form can send."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Problem("UNSUPPORTED_MEDIA", "the content-type must be application/json", field="content-type")


def _is_same(origin: str, host: str) -> bool:
    scheme, separator, name = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and bool(host) and name.lower() == host.lower()


def _host_of(given: str) -> str:
    """Without the port; an address of IPv6 without its brackets."""
    if given.startswith("["):
        return given[1:].partition("]")[0].lower()
    return given.partition(":")[0].lower().rstrip(".")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False

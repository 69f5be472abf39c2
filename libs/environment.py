"""Helpers for settings that need more than a declaration (`libs/setting.py`)."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket

from libs.errors import InvalidInput


def check(holds: bool, name: str, allowed: str) -> None:
    """Raise InvalidInput unless `holds`."""
    if not holds:
        raise InvalidInput(f"{name} must be {allowed}", field=name)


def is_loopback_host(host: str) -> bool:
    """Return True if the host is certainly this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def random_id(kind: str) -> str:
    """Return the host's name, or `kind` if it has none, and eight random hex digits."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:48].strip("-.")
    return f"{host or kind}-{secrets.token_hex(4)}"

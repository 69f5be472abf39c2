"""Who asks: what a credential says of its holder."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

from libs.errors import PermissionDenied

Role = Literal["client", "admin", "worker", "scaler", "anonymous"]
"""What its holder may call: `roles.py`. Nobody's credential says anonymous."""

NAMED_ROLES: Final[tuple[Role, ...]] = ("client", "admin", "worker", "scaler")
DEFAULT_TENANT: Final = "default"
ANY_TENANT: Final = "*"
"""As a credential's tenant: its holder asks for whomever it names."""

PRINTABLE: Final = r"[\x21-\x7e]{1,128}"
"""Of subjects, tenants and request ids: they stand in headers, in Redis and in logs."""


CERTIFIED_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|\*"
"""Of a tenant or whoever else a certificate is for, in its URI: nothing that a URI escapes or that ends it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a credential: its name in logs, its role, and the tenant it asks for (`*`: any that it names)."""

    subject: str
    role: Role
    tenant: str

    def asks_as(self, named: str) -> str:
        """The tenant of a call that names one in its metadata, or none (empty). Raises PermissionDenied for another's."""
        if self.tenant == ANY_TENANT:
            return named or DEFAULT_TENANT
        if named and named != self.tenant:
            raise PermissionDenied("this credential is of another tenant than metadata x-shoal-tenant names: leave that out")
        return self.tenant


ANONYMOUS: Final = Identity("anonymous", "anonymous", ANY_TENANT)
"""Everybody, where nothing that tells callers apart is configured."""

UNKNOWN: Final = Identity("", "anonymous", "")
"""In logs: a caller whose credential was missing or not taken."""


def digest_of(token: str) -> bytes:
    """By which a token is looked up and remembered: how long that takes tells nothing of the token itself."""
    return hashlib.sha256(token.encode()).digest()


def is_role(text: object) -> bool:
    """Whether a credential may say so."""
    return text in NAMED_ROLES


def is_certified_name(text: str) -> bool:
    """Whether a certificate may be for somebody of that name."""
    return bool(re.fullmatch(CERTIFIED_NAME, text))


def is_printable(text: object) -> bool:
    """Whether it may be a subject or a tenant: 1..128 printable ASCII characters without spaces."""
    return isinstance(text, str) and bool(re.fullmatch(PRINTABLE, text))

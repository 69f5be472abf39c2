"""The identity of a caller: subject, role and tenant, as its credential states them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

from libs.errors import PermissionDenied

Role = Literal["client", "admin", "worker", "scaler", "anonymous"]
"""Decides which methods the holder may call (`roles.py`). No credential states `anonymous`."""

NAMED_ROLES: Final[tuple[Role, ...]] = ("client", "admin", "worker", "scaler")
DEFAULT_TENANT: Final = "default"
ANY_TENANT: Final = "*"
"""As a credential's tenant: its holder may act for any tenant that it names."""

PRINTABLE: Final = r"[\x21-\x7e]{1,128}"
"""The form of subjects, tenants and request ids: they appear in headers, in Redis and in logs."""


CERTIFIED_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|\*"
"""The form of the tenant or name in a certificate's URI: no characters that a URI escapes or that
end it.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a credential: its name in logs, its role, and the tenant it may act for (`*`:
    any that it names).
    """

    subject: str
    role: Role
    tenant: str

    def tenant_for(self, named: str) -> str:
        """The tenant of a call whose metadata names `named` (empty: none). Raises PermissionDenied
        for another tenant.
        """
        if self.tenant == ANY_TENANT:
            return named or DEFAULT_TENANT
        if named and named != self.tenant:
            raise PermissionDenied(
                "this credential is of another tenant than metadata x-shoal-tenant names: leave that out"
            )
        return self.tenant


ANONYMOUS: Final = Identity("anonymous", "anonymous", ANY_TENANT)
"""Every caller, where no authentication is configured."""

UNKNOWN: Final = Identity("", "anonymous", "")
"""In logs: a caller whose credential was missing or refused."""


def digest_of(token: str) -> bytes:
    """The key by which a token is looked up and cached, so that the timing of a lookup reveals
    nothing of the token.
    """
    return hashlib.sha256(token.encode()).digest()


def is_role(text: object) -> bool:
    """Whether this is a role that a credential may state."""
    return text in NAMED_ROLES


def is_certified_name(text: str) -> bool:
    """Whether this may be the tenant or name in a certificate's URI."""
    return bool(re.fullmatch(CERTIFIED_NAME, text))


def is_printable(text: object) -> bool:
    """Whether this may be a subject, tenant or request id: 1..128 printable ASCII characters
    without spaces.
    """
    return isinstance(text, str) and bool(re.fullmatch(PRINTABLE, text))

"""The identity of a caller: subject, role and tenant, as in its credential."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Final, Literal

from libs.errors import PermissionDenied

Role = Literal["client", "admin", "worker", "scaler", "anonymous"]
"""The role of a caller, which decides the methods that it may call (`roles.py`). `anonymous` is the
role of callers without a credential.
"""

NAMED_ROLES: Final[tuple[Role, ...]] = ("client", "admin", "worker", "scaler")
DEFAULT_TENANT: Final = "default"
ANY_TENANT: Final = "*"
"""A credential's tenant that lets its holder act for any tenant that it names."""

PRINTABLE: Final = r"[\x21-\x7e]{1,128}"
"""The form of subjects, tenants and request IDs, which appear in headers, in Redis and in logs."""


CERTIFIED_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}|\*"
"""The form of the tenant or name in a certificate's URI: no characters that end a URI or need
escaping.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of a credential.

    Attributes:
        subject: The name in logs.
        tenant: The tenant for which it may act; `*`: any tenant that a call names.
    """

    subject: str
    role: Role
    tenant: str

    def tenant_for(self, named: str) -> str:
        """Return the tenant of a call, given the tenant `named` in its metadata ("": none). Raises
        PermissionDenied if the holder may not act for the named tenant.
        """
        if self.tenant == ANY_TENANT:
            return named or DEFAULT_TENANT
        if named and named != self.tenant:
            raise PermissionDenied(
                "metadata x-shoal-tenant names a tenant other than the credential's: omit it"
            )
        return self.tenant


ANONYMOUS: Final = Identity("anonymous", "anonymous", ANY_TENANT)
"""Every caller, if no authentication is configured."""

UNKNOWN: Final = Identity("", "anonymous", "")
"""The identity of a caller with a missing or refused credential, for logs."""


def token_digest(token: str) -> bytes:
    """Return the lookup and cache key of a token. A digest, so that the timing of a lookup reveals
    nothing about the token.
    """
    return hashlib.sha256(token.encode()).digest()


def is_role(text: object) -> bool:
    """Return whether a credential may have this role."""
    return text in NAMED_ROLES


def is_certified_name(text: str) -> bool:
    """Return whether this may be the tenant or name in a certificate's URI."""
    return bool(re.fullmatch(CERTIFIED_NAME, text))


def is_printable(text: object) -> bool:
    """Return whether this may be a subject, tenant or request ID: 1..128 printable ASCII characters
    without spaces.
    """
    return isinstance(text, str) and bool(re.fullmatch(PRINTABLE, text))

"""Authentication: maps a call's credential to an Identity, before any other part of the call is
read.

A bearer token identifies the caller: a static one of the file SHOAL_TOKENS, or a JWT signed by a
key of SHOAL_JWKS. Without a token the client certificate does, if SHOAL_TLS_CLIENT_CA requires
certificates. Neither errors nor logs repeat a token.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, cast

from libs.errors import Unauthenticated
from libs.serving.security.identity import (
    ANONYMOUS,
    Identity,
    Role,
    is_certified_name,
    is_role,
    token_digest,
)
from libs.serving.security.settings import Security
from libs.serving.watched import Watched

if TYPE_CHECKING:
    from libs.serving.security.jwks import PublicKeys
    from libs.serving.security.tokens import Tokens

AUTHORIZATION: Final = "authorization"
POLL_SECONDS: Final = 1.0
"""Interval of checks of token and key files. A revoked token is valid for at most two more checks
(`watched.SETTLE_SECONDS`).
"""
MAX_REMEMBERED: Final = 10_000
"""Maximum cached verified JWTs. Verifying one takes a tenth of a millisecond of the event loop."""

_BEARER: Final = re.compile(r"[Bb]earer ([\x21-\x7e]{1,8192})")
_CERTIFICATE: Final = "x509_pem_cert"
"""gRPC's key for the client certificate."""
MAX_READ: Final = 4096
"""Maximum cached certificate names."""

Metadata = Sequence[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]


class Authenticator:
    """Authenticates callers as `security` configures it. Raises InvalidInput for unusable files."""

    def __init__(self, security: Security, clock: Callable[[], float] = time.time) -> None:
        self._security = security
        self._clock = clock
        self._tokens = _watched_tokens(security)
        self._keys = _watched_keys(security)
        # Mutable state: verified JWTs by digest, with their expiry, and the keys that verified
        # them.
        self._remembered: dict[bytes, tuple[Identity, float]] = {}
        self._remembered_keys = self._keys.content if self._keys is not None else None

    def identify(self, metadata: Metadata, auth_context: Callable[[], AuthContext]) -> Identity:
        """Return the caller's identity. `auth_context` returns gRPC's TLS properties, and is only
        called if needed. Raises Unauthenticated.
        """
        if not self._security.authenticates:
            return ANONYMOUS
        given = [value for key, value in metadata if key == AUTHORIZATION]
        if given:
            return self._authenticate_bearer(given)
        if self._security.client_ca is not None:
            uris = [uri for pem in auth_context().get(_CERTIFICATE, ()) for uri in read_uris(pem)]
            return certified(uris, self._security.trust_domain)
        raise Unauthenticated(
            "this call needs a credential: send metadata `authorization: Bearer <token>` "
            "(shoal: SHOAL_TOKEN)"
        )

    def refresh(self) -> None:
        """Read files that have changed. Blocking: call it in a thread."""
        for watched in (self._tokens, self._keys):
            if watched is not None:
                watched.refresh()

    async def watch(self) -> None:
        """Check the files every second, forever; return immediately if the server takes no
        tokens.
        """
        while self._security.takes_tokens:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.refresh)

    def _authenticate_bearer(self, given: Sequence[str | bytes]) -> Identity:
        if not self._security.takes_tokens:
            raise Unauthenticated(
                "this server takes certificates, not tokens: omit metadata `authorization`"
            )
        found = _BEARER.fullmatch(str(given[0])) if len(given) == 1 else None
        if found is None:
            raise Unauthenticated("metadata `authorization` must occur once, as `Bearer <token>`")
        token = found[1]
        digest = token_digest(token)
        if self._tokens is not None and (identity := self._tokens.content.get(digest)) is not None:
            return identity
        if self._keys is None or token.count(".") != 2:
            raise Unauthenticated("this mesh does not know the bearer token")
        return self._authenticate_jwt(token, digest, self._keys.content)

    def _authenticate_jwt(self, token: str, digest: bytes, keys: PublicKeys) -> Identity:
        if keys is not self._remembered_keys:
            self._remembered.clear()
            self._remembered_keys = keys
        identity, expires = self._remembered.get(digest, (None, 0.0))
        if identity is not None and self._clock() < expires:
            return identity
        self._remembered.pop(digest, None)
        identity, expires = keys.verify(token)
        if len(self._remembered) >= MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]  # the oldest
        self._remembered[digest] = (identity, expires)
        return identity


@lru_cache(maxsize=MAX_READ)
def read_uris(pem: bytes) -> tuple[bytes, ...]:
    """Return the URIs of a certificate's subject alternative names; none if it cannot be parsed.

    gRPC's list (`peer_uri`) cuts each URI at its first NUL.
    """
    from cryptography import x509

    try:
        extensions = x509.load_pem_x509_certificate(pem).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return tuple(
            uri.encode() for uri in names.get_values_for_type(x509.UniformResourceIdentifier)
        )
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return ()


def certified(uris: Sequence[bytes], trust_domain: str) -> Identity:
    """Return the identity in a certificate's single URI, `spiffe://<trust domain>/<role>/<tenant or
    name>`. Raises Unauthenticated.
    """
    prefix = f"spiffe://{trust_domain}/"
    subject = uris[0].decode("ascii", "replace") if len(uris) == 1 else ""
    role, _, name = subject.removeprefix(prefix).partition("/")
    if not subject.startswith(prefix) or not is_role(role) or not is_certified_name(name):
        raise Unauthenticated(
            f"the client certificate has no identity: its only URI must be {prefix}<role>/"
            "<tenant or name>"
        )
    return Identity(subject, cast("Role", role), name)


def _watched_tokens(security: Security) -> Watched[Tokens] | None:
    path = security.tokens
    if path is None:
        return None
    from libs.serving.security.tokens import read_tokens

    return Watched([path], partial(read_tokens, path))


def _watched_keys(security: Security) -> Watched[PublicKeys] | None:
    path = security.jwks
    if path is None:
        return None
    from libs.serving.security.jwks import read_keys

    return Watched([path], partial(read_keys, path, security.issuer, security.audience))

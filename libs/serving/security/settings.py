"""The security settings of a server, read at startup: TLS, authentication, and whether it may
listen beyond loopback.

Each serving process has one `Security` in its settings. With nothing set, any caller may call any
method, on loopback only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.environment import check, is_loopback_host
from libs.errors import InvalidInput
from libs.serving.security.identity import is_printable
from libs.serving.security.tls import TlsFiles

DEFAULT_TRUST_DOMAIN: Final = "shoal"
_TRUST_DOMAIN: Final = re.compile(r"[a-z0-9._-]{1,255}")
_REMEDIES: Final = (
    "set SHOAL_TLS_CERT and SHOAL_TLS_KEY together with SHOAL_TLS_CLIENT_CA (callers present "
    "certificates), or with SHOAL_TOKENS or SHOAL_JWKS (callers send tokens), or "
    "SHOAL_ALLOW_INSECURE=1 if something else protects it; `shoal certs` makes certificates for "
    "development"
)


@dataclass(frozen=True, slots=True)
class Security:
    """The settings of one server process. `check_files` validates the files, which are read again
    when they are used.
    """

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    """If set, every caller must present a certificate of one of these authorities."""
    tokens: Path | None = None
    jwks: Path | None = None
    issuer: str = ""
    audience: str = ""
    trust_domain: str = DEFAULT_TRUST_DOMAIN
    """The trust domain in callers' certificates: spiffe://<trust domain>/<role>/<tenant or
    name>.
    """
    allow_insecure: bool = False
    health_address: str = ""
    """A second address for health probes, without TLS. Empty: none."""

    def __post_init__(self) -> None:
        check(
            (self.cert is None) == (self.key is None),
            "SHOAL_TLS_KEY",
            "set if and only if SHOAL_TLS_CERT is",
        )
        check(
            self.client_ca is None or self.cert is not None,
            "SHOAL_TLS_CERT",
            "set if SHOAL_TLS_CLIENT_CA is: mTLS is TLS",
        )
        has_jwks = self.jwks is not None
        check(
            bool(self.issuer) or not has_jwks,
            "SHOAL_JWT_ISSUER",
            "set if SHOAL_JWKS is: the `iss` that tokens must have",
        )
        check(
            bool(self.audience) or not has_jwks,
            "SHOAL_JWT_AUDIENCE",
            "set if SHOAL_JWKS is: the `aud` that tokens must have",
        )
        for value, name in (
            (self.issuer, "SHOAL_JWT_ISSUER"),
            (self.audience, "SHOAL_JWT_AUDIENCE"),
        ):
            check(
                not value or is_printable(value),
                name,
                "1..128 printable ASCII characters without spaces",
            )
        check(
            bool(_TRUST_DOMAIN.fullmatch(self.trust_domain)),
            "SHOAL_TRUST_DOMAIN",
            "lower-case letters, digits, '.', '_' or '-'",
        )

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Security:
        """Read SHOAL_* variables and validate the files. Raises InvalidInput with variable, file,
        line and key.
        """
        allow = environ.get("SHOAL_ALLOW_INSECURE") or "0"
        check(allow in ("0", "1"), "SHOAL_ALLOW_INSECURE", "0 or 1")
        security = Security(
            cert=_path(environ, "SHOAL_TLS_CERT"),
            key=_path(environ, "SHOAL_TLS_KEY"),
            client_ca=_path(environ, "SHOAL_TLS_CLIENT_CA"),
            tokens=_path(environ, "SHOAL_TOKENS"),
            jwks=_path(environ, "SHOAL_JWKS"),
            issuer=environ.get("SHOAL_JWT_ISSUER", ""),
            audience=environ.get("SHOAL_JWT_AUDIENCE", ""),
            trust_domain=environ.get("SHOAL_TRUST_DOMAIN") or DEFAULT_TRUST_DOMAIN,
            allow_insecure=allow == "1",
            health_address=environ.get("SHOAL_HEALTH_ADDRESS", ""),
        )
        security.check_files()
        return security

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files; None without TLS."""
        if self.cert is None or self.key is None:
            return None
        return TlsFiles(self.cert, self.key, self.client_ca)

    @property
    def takes_tokens(self) -> bool:
        return self.tokens is not None or self.jwks is not None

    @property
    def authenticates(self) -> bool:
        """True if callers need a credential. If not, every caller is anonymous and may call any
        method.
        """
        return self.takes_tokens or self.client_ca is not None

    def check_files(self) -> None:
        """Raise InvalidInput for the first unusable file."""
        if self.tls is not None:
            self.tls.read()
        # Imported only if needed: a worker's health server takes no tokens.
        if self.tokens is not None:
            from libs.serving.security.tokens import read_tokens

            read_tokens(self.tokens)
        if self.jwks is not None:
            from libs.serving.security.jwks import read_keys

            read_keys(self.jwks, self.issuer, self.audience)

    def describe(self) -> dict[str, str | float]:
        """Return the names of the files, without contents, for the log line at startup."""
        return {
            "tls": "none"
            if self.cert is None
            else "callers present certificates"
            if self.client_ca
            else "on",
            "tokens": str(self.tokens or ""),
            "jwks": str(self.jwks or ""),
            "trust_domain": self.trust_domain,
            "allow_insecure": self.allow_insecure,
            "health_address": self.health_address,
        }


def check_exposure(address: str, security: Security) -> None:
    """Raise InvalidInput, with remedies, for an address beyond loopback that is neither protected
    nor explicitly allowed.
    """
    if problem := exposure(address, security):
        raise InvalidInput(f"{problem}: {_REMEDIES}", field="SHOAL_ALLOW_INSECURE")


def exposure(address: str, security: Security) -> str:
    """Return why a server must not listen there, "" if it may."""
    if security.allow_insecure or is_loopback(address):
        return ""
    refusal = f"refusing to listen on {address}, beyond this machine,"
    if security.cert is None and security.takes_tokens:
        return f"{refusal} without TLS: tokens would be sent in clear text"
    if security.cert is None:
        return f"{refusal} without TLS and authentication"
    if not security.authenticates:
        return f"{refusal} without authentication: TLS alone accepts any caller"
    return ""


def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to a listening address, `host:port` or
    `unix:path`. False in doubt.
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0]
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return is_loopback_host(host)


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    text = environ.get(name, "")
    return Path(text) if text else None

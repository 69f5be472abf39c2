"""The security settings of a server, read at startup: TLS, authentication, and whether it may
listen beyond loopback.

Each serving process has one `Security` in its settings. With nothing set, any caller may call any
method, on loopback only.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs import setting
from libs.environment import check, is_loopback_host
from libs.errors import InvalidInput
from libs.serving.security.identity import is_printable
from libs.serving.security.tls import TlsFiles

DEFAULT_TRUST_DOMAIN: Final = "shoal"
_TRUST_DOMAIN: Final = re.compile(r"[a-z0-9._-]{1,255}")
_CLAIM: Final = setting.Allowed(
    "1..128 printable ASCII characters without spaces",
    lambda value: not value or is_printable(value),
)
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

    cert: Path | None = setting.path(
        "SHOAL_TLS_CERT",
        None,
        "The server's certificate chain. Set with SHOAL_TLS_KEY.",
        "PEM file",
    )
    key: Path | None = setting.path("SHOAL_TLS_KEY", None, "The key of SHOAL_TLS_CERT.", "PEM file")
    client_ca: Path | None = setting.path(
        "SHOAL_TLS_CLIENT_CA",
        None,
        "If set, every caller must present a certificate of one of these authorities. Needs "
        "SHOAL_TLS_CERT.",
        "PEM file",
    )
    tokens: Path | None = setting.path(
        "SHOAL_TOKENS", None, "The file of accepted tokens with their tenants and roles."
    )
    jwks: Path | None = setting.path(
        "SHOAL_JWKS",
        None,
        "The file of keys that sign accepted JWTs. Needs SHOAL_JWT_ISSUER and SHOAL_JWT_AUDIENCE.",
    )
    issuer: str = setting.text("SHOAL_JWT_ISSUER", "", "The `iss` that JWTs must have.", _CLAIM)
    audience: str = setting.text("SHOAL_JWT_AUDIENCE", "", "The `aud` that JWTs must have.", _CLAIM)
    trust_domain: str = setting.text(
        "SHOAL_TRUST_DOMAIN",
        DEFAULT_TRUST_DOMAIN,
        "The trust domain in callers' certificates: "
        "spiffe://<trust domain>/<role>/<tenant or name>.",
        setting.Allowed(
            "lower-case letters, digits, '.', '_' or '-'",
            lambda value: bool(_TRUST_DOMAIN.fullmatch(value)),
        ),
    )
    allow_insecure: bool = setting.flag(
        "SHOAL_ALLOW_INSECURE",
        False,
        "1: serve and send without TLS or credentials beyond this machine, because something else "
        "protects it.",
    )
    health_address: str = setting.text(
        "SHOAL_HEALTH_ADDRESS",
        "",
        "A second address for health probes, without TLS. Empty: none.",
        kind="host:port",
    )

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
        setting.check_fields(self)

    @staticmethod
    def from_env(environ: setting.Environ, without: Collection[str] = ()) -> Security:
        """Read the variables and validate the files.

        Args:
            without: Names of fields to leave at their defaults.

        Raises:
            InvalidInput: Names the variable, or the file with line and key.
        """
        security = setting.read(Security, environ, without)
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

    def describe(self, without: Collection[str] = ()) -> dict[str, setting.Loggable]:
        """Return the names of the files, without contents, for the log line at startup.

        Args:
            without: Names of fields to leave out.
        """
        tls = (
            "none"
            if self.cert is None
            else "callers present certificates"
            if self.client_ca
            else "on"
        )
        return {"tls": tls, **setting.describe(self, ("cert", "key", "client_ca", *without))}


def security_settings() -> Security:
    """Declare TLS, authentication and exposure of a server."""
    return setting.group(
        Security.from_env, setting.list_variables(Security), Security, Security.describe
    )


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

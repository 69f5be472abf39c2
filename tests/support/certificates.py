"""Certificates and JWTs for tests, made by the code of `shoal certs` and by PyJWT."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from libs.serving import Security
from services.local.trust.certificates import Authority, Issued, Party, issue, open_authority

ISSUER = "https://issuer.example"
AUDIENCE = "shoal-tests"


class Certificates:
    """An authority in a directory. Not `shoal certs`' default parties: those that a test asks
    for.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = datetime.now(UTC)
        self.authority: Authority = open_authority(directory, now=self.now)[0]

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def issue(self, name: str, *, trust_domain: str = "shoal", days: float = 1.0) -> Issued:
        """Issue a certificate for `role` or `role/name`. Negative days: it has expired."""
        ended = timedelta(days=-2 * days) if days < 0 else timedelta()
        return issue(
            self.directory,
            self.authority,
            Party.parse(name),
            now=self.now - ended,
            days=abs(days),
            trust_domain=trust_domain,
        )

    def issue_odd(self, role: str, name: str) -> Issued:
        """Issue a certificate for a name that `Party` refuses."""
        return issue(self.directory, self.authority, OddParty(role, "odd", name), now=self.now)

    def security(self, *, asks_callers: bool = False, **more: Any) -> Security:
        """TLS with a new certificate of a router; `asks_callers`: mTLS."""
        made = self.issue("router")
        return Security(
            cert=made.certificate, key=made.key, client_ca=self.ca if asks_callers else None, **more
        )

    def channel_credentials(self, caller: Issued | None = None) -> grpc.ChannelCredentials:
        """Return credentials that trust this authority and, for mTLS, show a certificate."""
        ca = self.ca.read_bytes()
        if caller is None:
            return grpc.ssl_channel_credentials(ca)
        return grpc.ssl_channel_credentials(
            ca, caller.key.read_bytes(), caller.certificate.read_bytes()
        )


@dataclass(frozen=True, slots=True)
class OddParty(Party):
    """A party that `shoal certs` does not issue certificates for."""

    odd: str = ""

    def uri(self, trust_domain: str) -> str:
        return f"spiffe://{trust_domain}/{self.role}/{self.odd}"


@dataclass(frozen=True)
class Issuer:
    """Signs JWTs with one key."""

    key: Any
    kid: str = "k1"
    algorithm: str = "ES256"

    @staticmethod
    def make(kind: str = "ES256", kid: str = "k1") -> Issuer:
        if kind == "RS256":
            return Issuer(rsa.generate_private_key(65537, 2048), kid, kind)
        if kind == "EdDSA":
            return Issuer(ed25519.Ed25519PrivateKey.generate(), kid, kind)
        return Issuer(ec.generate_private_key(ec.SECP256R1()), kid, "ES256")

    def jwk(self) -> dict[str, Any]:
        """The public key, as it stands in a JWKS file."""
        made: dict[str, Any] = jwt.get_algorithm_by_name(self.algorithm).to_jwk(
            self.key.public_key(), as_dict=True
        )
        return made | {"kid": self.kid, "alg": self.algorithm, "use": "sig"}

    def token(
        self, *, seconds: float = 300.0, headers: Mapping[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a JWT that is valid for `seconds`. A claim that is None is left out."""
        now = datetime.now(UTC).timestamp()
        said = {
            "sub": "somebody",
            "role": "client",
            "tenant": "acme",
            "iss": ISSUER,
            "aud": AUDIENCE,
            "exp": int(now + seconds),
        }
        said |= claims
        kept = {name: value for name, value in said.items() if value is not None}
        pem = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return jwt.encode(kept, pem, self.algorithm, headers={"kid": self.kid, **(headers or {})})


def write_jwks(path: Path, *issuers: Issuer) -> Path:
    path.write_text(json.dumps({"keys": [issuer.jwk() for issuer in issuers]}))
    return path


def forged(header: Mapping[str, Any], claims: Mapping[str, Any], signature: bytes = b"") -> str:
    """A token that says anything."""
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)

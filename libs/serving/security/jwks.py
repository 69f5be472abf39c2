"""Verifies JSON Web Tokens with the public keys of a JWKS file (RFC 7517, 7519). Imported only if
SHOAL_JWKS is set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from libs.errors import InvalidInput, Unauthenticated
from libs.serving.security.identity import NAMED_ROLES, Identity, Role, is_printable, is_role

VARIABLE: Final = "SHOAL_JWKS"
ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
"""Only asymmetric ones: a verifier must not be able to sign tokens. The key decides which one,
never the token.
"""
LEEWAY_SECONDS: Final = 10
"""Tolerated clock skew."""
_MIN_RSA: Final = 2048

_REFUSALS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (jwt.ExpiredSignatureError, "the JWT has expired: get a new one"),
    (jwt.ImmatureSignatureError, "the JWT is not valid yet: is the issuer's clock ahead?"),
    (jwt.InvalidAudienceError, "the JWT's aud is not SHOAL_JWT_AUDIENCE: it is not for this mesh"),
    (jwt.InvalidIssuerError, "the JWT's iss is not SHOAL_JWT_ISSUER"),
    (jwt.InvalidSignatureError, "the JWT is not signed with the key in its header"),
    (jwt.InvalidAlgorithmError, "the JWT's algorithm does not match its key"),
)


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Public keys by key ID (kid), and the required issuer and audience of tokens."""

    by_id: Mapping[str, jwt.PyJWK]
    issuer: str
    audience: str

    def verify(self, token: str) -> tuple[Identity, float]:
        """Return the token's identity, and when it expires (Unix seconds). Raises Unauthenticated
        without repeating the token.
        """
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self.issuer,
                audience=self.audience,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "sub", "iss", "aud"]},
            )
        except jwt.MissingRequiredClaimError as error:
            raise Unauthenticated(f"the JWT has no claim {error.claim}") from None
        except (
            jwt.PyJWTError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # PyJWT does not translate the last three
            raise Unauthenticated(_why(error)) from None
        return _identity(claims), float(claims["exp"])

    def _key(self, name: object) -> jwt.PyJWK:
        if name is None and len(self.by_id) == 1:
            return next(iter(self.by_id.values()))
        found = self.by_id.get(name) if isinstance(name, str) else None
        if found is None:
            raise Unauthenticated("this mesh does not know the JWT's key (kid)")
        return found


def read_keys(path: Path, issuer: str, audience: str) -> PublicKeys:
    """Read the keys of a JWKS file. Raises InvalidInput with file and key."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidInput(
            f"{VARIABLE}: {path} cannot be read: {error.strerror}", field=VARIABLE
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{path}:{error.lineno}: is not JSON: {error.msg}", field=VARIABLE
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"{path}: is not JSON", field=VARIABLE) from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(f"{path}: `keys` must be a list of at least one JWK", field=VARIABLE)
    by_id: dict[str, jwt.PyJWK] = {}
    for number, entry in enumerate(entries):
        key = _read_key(entry, f"{path}: `keys[{number}]`")
        if not key.key_id and len(entries) > 1:
            raise InvalidInput(
                f"{path}: `keys[{number}]` needs a kid, since there are several keys",
                field=VARIABLE,
            )
        if (key.key_id or "") in by_id:
            raise InvalidInput(
                f"{path}: `keys[{number}]` has the same kid as another key", field=VARIABLE
            )
        by_id[key.key_id or ""] = key
    return PublicKeys(by_id, issuer, audience)


def _read_key(entry: object, where: str) -> jwt.PyJWK:
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where} is not a JWK", field=VARIABLE)
    if entry.get("kty") == "oct" or "d" in entry:
        raise InvalidInput(
            f"{where} is a secret: only public keys are allowed, not keys that can sign",
            field=VARIABLE,
        )
    if not isinstance(entry.get("kid", ""), str):
        raise InvalidInput(f"{where} has a kid that is not a string", field=VARIABLE)
    if entry.get("use", "sig") != "sig":
        raise InvalidInput(
            f"{where} is for {str(entry['use'])[:20]!r}: only signature keys are allowed",
            field=VARIABLE,
        )
    try:
        key = jwt.PyJWK(entry)
    except (jwt.PyJWTError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{where} is not a usable JWK: {type(error).__name__}", field=VARIABLE
        ) from error
    if key.algorithm_name not in ALGORITHMS:
        raise InvalidInput(
            f"{where} is for {key.algorithm_name}, not one of {', '.join(ALGORITHMS)}",
            field=VARIABLE,
        )
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _MIN_RSA:
        raise InvalidInput(f"{where} has {key.key.key_size} bits, below {_MIN_RSA}", field=VARIABLE)
    return key


def _identity(claims: Mapping[str, Any]) -> Identity:
    for claim in ("sub", "tenant"):
        if not is_printable(claims.get(claim)):
            raise Unauthenticated(
                f"the JWT's claim {claim} must be 1..128 printable ASCII characters without spaces"
            )
    if not is_role(claims.get("role")):
        raise Unauthenticated(f"the JWT's claim role must be one of {', '.join(NAMED_ROLES)}")
    return Identity(claims["sub"], cast("Role", claims["role"]), claims["tenant"])


def _why(error: Exception) -> str:
    return next(
        (words for kind, words in _REFUSALS if isinstance(error, kind)),
        "the bearer token is not a valid JWT",
    )

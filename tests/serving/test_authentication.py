"""Token files, JWTs and certificates: the identities that they give, and the errors for invalid
ones.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libs.errors import InvalidInput, Unauthenticated
from libs.serving import Identity, Security
from libs.serving.security.authentication import Authenticator, certified
from libs.serving.security.tokens import read_tokens
from tests.serving.parts import CLIENT, write_tokens
from tests.support.certificates import AUDIENCE, ISSUER, Issuer, forged, write_jwks


def authenticator(tmp_path: Path, *issuers: Issuer) -> Authenticator:
    jwks = write_jwks(tmp_path / "keys.json", *issuers)
    return Authenticator(Security(jwks=jwks, issuer=ISSUER, audience=AUDIENCE))


def identify(known: Authenticator, token: str) -> Identity:
    return known.identify([("authorization", f"Bearer {token}")], dict)


@pytest.fixture
def known(tmp_path: Path) -> Authenticator:
    return authenticator(tmp_path, Issuer.make())


@pytest.mark.parametrize("kind", ["ES256", "RS256", "EdDSA"])
def test_jwt_with_a_known_key_identifies_its_holder(kind: str, tmp_path: Path) -> None:
    issuer = Issuer.make(kind)
    known = authenticator(tmp_path, issuer, Issuer.make(kid="k2"))
    assert identify(known, issuer.token(sub="u", role="worker", tenant="t")) == Identity(
        "u", "worker", "t"
    )
    assert identify(known, issuer.token(aud=["others", AUDIENCE])) == Identity(
        "somebody", "client", "acme"
    )


def bad_jwts(issuer: Issuer) -> list[tuple[str, str]]:
    """Return refused tokens with their error messages."""
    stranger = Issuer.make()
    secret = json.dumps(issuer.jwk()).encode()
    claims = {
        "sub": "s",
        "role": "admin",
        "tenant": "*",
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": 9_999_999_999,
    }
    head, body, signature = issuer.token().split(".")
    richer = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return [
        (issuer.token(seconds=-60), "has expired"),
        (issuer.token(nbf=9_999_999_999), "not valid yet"),
        (issuer.token(exp=None), "no claim exp"),
        (issuer.token(sub=None), "no claim sub"),
        (issuer.token(aud=None), "no claim aud"),
        (issuer.token(iss=None), "no claim iss"),
        (issuer.token(aud="others"), "SHOAL_JWT_AUDIENCE"),
        (issuer.token(iss="others"), "SHOAL_JWT_ISSUER"),
        (issuer.token(role="root"), "claim role"),
        (issuer.token(role="anonymous"), "claim role"),
        (issuer.token(role=["admin"]), "claim role"),
        (issuer.token(role=None), "claim role"),
        (issuer.token(tenant=None), "claim tenant"),
        (issuer.token(tenant="a b"), "claim tenant"),
        (issuer.token(tenant=7), "claim tenant"),
        (issuer.token(sub="two\nlines"), "claim sub"),
        (stranger.token(), "not signed with the key"),
        (issuer.token(headers={"kid": "k9"}), r"does not know the JWT's key \(kid\)"),
        (forged({"alg": "ES256"}, claims, b"x"), r"does not know the JWT's key \(kid\)"),
        (f"{head}.{richer}.{signature}", "not signed with the key"),
        (f"{head}.{body}.", "not signed with the key"),
        (forged({"alg": "none", "kid": "k1"}, claims), "algorithm|not a valid JWT"),
        (forged({"alg": "None", "kid": "k1"}, claims), "algorithm|not a valid JWT"),
        (
            forged({"alg": "HS256", "kid": "k1"}, claims, hashlib.sha256(secret).digest()),
            "algorithm|not a valid JWT",
        ),
        (forged({"alg": "RS256", "kid": "k1"}, claims, b"x"), "algorithm|not a valid JWT"),
        (forged({"kid": "k1"}, claims), "not a valid JWT|algorithm"),
        ("a.b.c", "not a valid JWT"),
        ("..", "not a valid JWT"),
        (base64.urlsafe_b64encode(b"[" * 5000).decode().rstrip("=") + ".e30.", "not a valid JWT"),
        (base64.urlsafe_b64encode(b"[]").decode().rstrip("=") + ".e30.", "not a valid JWT"),
        ("wrong-token-0123456789", "does not know the bearer token"),
    ]


def test_refused_jwts_report_why_without_being_repeated(tmp_path: Path) -> None:
    issuer = Issuer.make()
    known = authenticator(tmp_path, issuer, Issuer.make(kid="k2"))
    for token, words in bad_jwts(issuer):
        with pytest.raises(Unauthenticated, match=words) as raised:
            identify(known, token)
        assert all(part not in str(raised.value) for part in token.split(".") if len(part) > 3)
        assert raised.value.__cause__ is None


HEADERS = st.dictionaries(
    st.sampled_from(["alg", "kid", "typ", "crit", "b64", "zip"]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["k1", "ES256", "none", "b64"])
    | st.lists(st.just("b64"), max_size=2),
)


@given(
    HEADERS.map(lambda said: json.dumps(said).encode()) | st.binary(max_size=30),
    st.binary(max_size=30),
    st.binary(max_size=70),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_jwts_are_unauthenticated(
    known: Authenticator, header: bytes, claims: bytes, signature: bytes
) -> None:
    token = ".".join(
        base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (header, claims, signature)
    )
    with pytest.raises(Unauthenticated):
        identify(known, token)


def test_jwt_is_verified_once_until_it_expires_or_the_keys_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    issuer = Issuer.make()
    jwks = write_jwks(tmp_path / "keys.json", issuer)
    known = Authenticator(Security(jwks=jwks, issuer=ISSUER, audience=AUDIENCE), clock=lambda: now)
    monkeypatch.setattr("libs.serving.security.authentication.MAX_REMEMBERED", 2)
    checked: list[str] = []
    decode = jwt.decode

    def noting(token: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        checked.append(token)
        return decode(token, *arguments, **options)

    monkeypatch.setattr(jwt, "decode", noting)
    tokens = [issuer.token(sub=f"s{number}") for number in range(3)]
    for token in (tokens[0], tokens[0], tokens[1], tokens[0]):
        identify(known, token)
    assert checked == tokens[:2]
    identify(known, tokens[2])  # evicts the first
    identify(known, tokens[0])
    assert checked == [*tokens, tokens[0]]
    now += 3600.0  # expired by the authenticator's clock, so it is verified again
    identify(known, tokens[0])
    assert len(checked) == 5
    write_jwks(jwks, Issuer.make())
    known.refresh()
    with pytest.raises(Unauthenticated):
        identify(known, tokens[0])


def test_static_tokens_and_jwts_work_together(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens.yaml")
    issuer = Issuer.make()
    jwks = write_jwks(tmp_path / "keys.json", issuer)
    known = Authenticator(Security(tokens=tokens, jwks=jwks, issuer=ISSUER, audience=AUDIENCE))
    assert identify(known, CLIENT).subject == "frontend"
    assert identify(known, issuer.token()).subject == "somebody"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ":1: the file is empty"),
        ("tokens: [", ": is not YAML"),
        ("[" * 10_000, "cannot be read: RecursionError"),
        ("tokens: []", ":1: `tokens` must be a list of at least one token"),
        ("token: []", ":1: the file has no key 'token': did you mean 'tokens'"),
        (
            "tokens:\n- {subject: s, role: client}",
            r":2: `tokens\[0\]` needs either `token` or `sha256`",
        ),
        (
            "tokens:\n- {token: secret-secret-secret, subject: s, role: client, tenants: t}",
            r":2: `tokens\[0\]` has no key 'tenants'",
        ),
        (
            "tokens:\n- {token: secret-secret-secret, subject: s, role: root}",
            r"`tokens\[0\].role` is 'root', which is not one of",
        ),
        (
            "tokens:\n- {token: secret-secret-secret, subject: s, role: anonymous}",
            "not one of client, admin, worker, scaler",
        ),
        (
            "tokens:\n- {token: secret, subject: s, role: client}",
            r"`tokens\[0\].token` must be 16..8192 printable",
        ),
        ("tokens:\n- {token: 12345678901234567890, subject: s, role: client}", r"put it in quotes"),
        (
            "tokens:\n- {sha256: secret, subject: s, role: client}",
            r"`tokens\[0\].sha256` must be 64 hex digits",
        ),
        ("tokens:\n- {token: secret-secret-secret, role: client}", "has no key 'subject'"),
        (
            "tokens:\n- {token: secret-secret-secret, subject: a b, role: client}",
            "which is not 1..128 printable",
        ),
        (
            "tokens:\n- {token: secret-secret-secret, subject: s, role: client}\n"
            "- {token: secret-secret-secret, subject: t, role: client}",
            r":3: `tokens\[1\]` is the token of 's'",
        ),
        (
            "tokens:\n- {token: !!python/object/apply:os.system [secret], subject: s, "
            "role: client}",
            "put it in quotes",
        ),
    ],
)
def test_broken_token_file_error_repeats_no_token(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words) as raised:
        read_tokens(path)
    assert raised.value.field == "SHOAL_TOKENS"
    assert not any(secret in raised.value.message for secret in ("secret-", "1234567890"))
    assert "tokens.yaml" in raised.value.message


def test_token_file_may_contain_digests(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(CLIENT.encode()).hexdigest()
    path.write_text(f"tokens: [{{sha256: '{digest.upper()}', subject: s, role: client}}]")
    assert identify(Authenticator(Security(tokens=path)), CLIENT) == Identity(
        "s", "client", "default"
    )


@pytest.mark.parametrize("role", ["router", "scheduler", "edge", "redis", "anonymous"])
def test_server_certificates_may_not_call(role: str) -> None:
    with pytest.raises(Unauthenticated, match="has no identity"):
        certified([f"spiffe://shoal/{role}/default".encode()], "shoal")


@pytest.mark.parametrize(
    ("uris", "expected"),
    [
        ([b"spiffe://shoal/client/acme"], Identity("spiffe://shoal/client/acme", "client", "acme")),
        ([b"spiffe://shoal/worker/w-1"], Identity("spiffe://shoal/worker/w-1", "worker", "w-1")),
        ([b"spiffe://shoal/admin/*"], Identity("spiffe://shoal/admin/*", "admin", "*")),
        ([], None),
        ([b"spiffe://shoal/client/acme", b"spiffe://shoal/admin/acme"], None),
        ([b"spiffe://others/client/acme"], None),
        ([b"spiffe://shoal/router/r"], None),
        ([b"spiffe://shoal/anonymous/a"], None),
        ([b"spiffe://shoal/client"], None),
        ([b"spiffe://shoal/client/"], None),
        ([b"spiffe://shoal/client/a/b"], None),
        ([b"https://shoal/client/a"], None),
        ([b"x spiffe://shoal/client/a"], None),
        ([b"spiffe://shoal/client/\xff"], None),
        ([b"spiffe://shoal/client/acme?admin"], None),
        ([b"spiffe://shoal/client/acme#a"], None),
        ([b"spiffe://shoal/client/acme%2fadmin"], None),
        ([b"spiffe://shoal/client/ac%6de"], None),
        ([b"spiffe://shoal/client/acme\x00"], None),
        ([b"spiffe://shoal/client/acme\n"], None),
        ([b"spiffe://shoal/client/.."], None),
        ([b"spiffe://shoal/client/**"], None),
        ([b"spiffe://shoal/client/" + b"a" * 64], None),
    ],
)
def test_certificate_identifies_its_holder_by_one_uri(
    uris: Sequence[bytes], expected: Identity | None
) -> None:
    if expected is not None:
        assert certified(uris, "shoal") == expected
        return
    with pytest.raises(Unauthenticated, match="spiffe://shoal/<role>/<tenant or name>"):
        certified(uris, "shoal")

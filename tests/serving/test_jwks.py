"""The file of public keys for JWTs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from libs.errors import InvalidInput
from libs.serving.security.jwks import read_keys
from tests.support.certificates import AUDIENCE, ISSUER, Issuer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"keys\.json:1: is not JSON"),
        ('{"keys": [\n{]}', r"keys\.json:2: is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "`keys` must be a list"),
        ('{"keys": []}', "`keys` must be a list"),
        ('{"keys": [7]}', r"`keys\[0\]` is not a JWK"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}', r"`keys\[0\]` is a secret"),
        (
            '{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB", "d": "AQAB"}]}',
            r"`keys\[0\]` is a secret",
        ),
        (
            '{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA"}]}',
            r"`keys\[0\]` is not a usable JWK",
        ),
        ('{"keys": [{"kty": "XX"}]}', r"`keys\[0\]` is not a usable JWK"),
        ('{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB", "alg": "HS256"}]}', r"`keys\[0\]`"),
        (
            '{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB", "use": "enc"}]}',
            "only signature keys",
        ),
    ],
)
def test_broken_jwks_file_error_names_the_file(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words) as raised:
        read_keys(path, ISSUER, AUDIENCE)
    assert raised.value.field == "SHOAL_JWKS"
    assert "c2VjcmV0" not in raised.value.message


def test_several_keys_need_ids_and_short_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    one, two = Issuer.make().jwk(), Issuer.make().jwk()
    short = Issuer(rsa.generate_private_key(65537, 1024), "k1", "RS256").jwk()
    for keys, words in (
        ([one, two], r"`keys\[1\]` has the same kid as another key"),
        (
            [one, {name: value for name, value in two.items() if name != "kid"}],
            r"`keys\[1\]` needs a kid",
        ),
        ([short], "1024 bits"),
        ([one | {"alg": "ES384"}], r"`keys\[0\]`"),
    ):
        path.write_text(json.dumps({"keys": keys}))
        with pytest.raises(InvalidInput, match=words):
            read_keys(path, ISSUER, AUDIENCE)
    path.write_text(
        json.dumps(
            {
                "keys": [
                    {
                        name: value
                        for name, value in one.items()
                        if name not in ("kid", "alg", "use")
                    }
                ]
            }
        )
    )
    assert len(read_keys(path, ISSUER, AUDIENCE).by_id) == 1

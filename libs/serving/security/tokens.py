"""The file of static tokens (SHOAL_TOKENS) with their holders' identities. No error ever contains a
token or a part of one.

tokens:
  - {sha256: <hex digest of the token>, subject: search-frontend, role: client, tenant: search}
  - {token: <the token itself>, subject: worker-pool-a, role: worker}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import yaml

from libs.catalog.shapes import At, Choice, Key, Record, Schema, Text
from libs.errors import InvalidInput
from libs.serving.security.identity import (
    DEFAULT_TENANT,
    NAMED_ROLES,
    PRINTABLE,
    Identity,
    Role,
    token_digest,
)

VARIABLE: Final = "SHOAL_TOKENS"
MAX_TOKEN_CHARACTERS: Final = 8192
"""Maximum characters of a bearer token, static or JWT."""
_MIN_TOKEN_CHARACTERS: Final = 16
_WORDS: Final = "1..128 printable ASCII characters without spaces"
_TOKEN: Final = re.compile(rf"[\x21-\x7e]{{{_MIN_TOKEN_CHARACTERS},{MAX_TOKEN_CHARACTERS}}}")
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")

Tokens = Mapping[bytes, Identity]
"""The holders' identities, by the digest of the token."""


@dataclass(frozen=True, slots=True)
class _Secret:
    """A text that errors never repeat."""

    pattern: re.Pattern[str]
    words: str

    def read(self, node: yaml.Node, at: At) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            raise at.wrong(node, f"must be {self.words}: put it in quotes")
        value: str = node.value
        if not self.pattern.fullmatch(value):
            raise at.wrong(node, f"must be {self.words}")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{self.pattern.pattern}$"}


_NAME: Final = Text(PRINTABLE, _WORDS)
_ENTRY: Final = Record(
    lambda **values: values,
    {
        "token": Key(
            _Secret(
                _TOKEN,
                f"{_MIN_TOKEN_CHARACTERS}..{MAX_TOKEN_CHARACTERS} printable ASCII characters "
                "without spaces",
            ),
            "the token",
        ),
        "sha256": Key(
            _Secret(_DIGEST, "64 hex digits"),
            "the token's SHA-256, which keeps the token out of the file",
        ),
        "subject": Key(_NAME, "the holder's name in logs", needed=True),
        "role": Key(Choice(NAMED_ROLES), "the holder's role", needed=True),
        "tenant": Key(_NAME, "the holder's tenant; '*': any that it names; default: default"),
    },
)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The list of tokens. Not a shapes.List, which repeats values in its errors."""

    def read(self, node: yaml.Node, at: At) -> dict[bytes, Identity]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise at.wrong(node, "must be a list of at least one token")
        found: dict[bytes, Identity] = {}
        for number, entry in enumerate(node.value):
            digest, identity = _entry(entry, at.entry(number))
            if digest in found:
                raise at.entry(number).wrong(entry, f"is the token of {found[digest].subject!r}")
            found[digest] = identity
        return found

    def schema(self) -> Schema:
        return {"type": "array", "items": _ENTRY.schema(), "minItems": 1}


_FILE: Final = Record(
    lambda tokens: tokens, {"tokens": Key(_Entries(), "the tokens and their holders", needed=True)}
)


def read_tokens(path: Path) -> Tokens:
    """Read the tokens of the file. Raises InvalidInput with file, line and key."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # The error's own text would repeat a piece of the file.
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise InvalidInput(f"{path}:{line}: is not YAML", field=VARIABLE) from None
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise InvalidInput(
            f"{VARIABLE}: {path} cannot be read: {type(error).__name__}", field=VARIABLE
        ) from None
    if node is None:
        raise InvalidInput(f"{path}:1: the file is empty", field=VARIABLE)
    try:
        return cast("Tokens", _FILE.read(node, At(str(path), whole="the file")))
    except InvalidInput as error:
        error.field = VARIABLE
        raise


def _entry(node: yaml.Node, at: At) -> tuple[bytes, Identity]:
    values = _ENTRY.read(node, at)
    if ("token" in values) == ("sha256" in values):
        raise at.wrong(node, "needs either `token` or `sha256`")
    digest = (
        bytes.fromhex(values["sha256"]) if "sha256" in values else token_digest(values["token"])
    )
    return digest, Identity(
        values["subject"], cast("Role", values["role"]), values.get("tenant", DEFAULT_TENANT)
    )

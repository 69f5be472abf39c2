"""HTTP and TEI gRPC requests that are larger than they look: a recipe of a few numbers, and the
bytes that it describes.

A recipe covers the multiplying parts at the edge: values in a body, compression, header and trailer
lines, connections, and messages of TEI's gRPC port. An input is the recipe as JSON, like those of
`products.py`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Final, Literal, get_args

from services.edge.messages.limits import MAX_ITEMS
from tests.fuzz import tiny_kinds
from tests.fuzz.products import count
from tests.fuzz.target import Random

MAX_BODY_BYTES: Final = 24 << 20
MAX_WIRE_BYTES: Final = 64 << 20
"""The maximum bytes of one input over all its connections."""
MAX_CONNECTIONS: Final = 200

Credential = Literal["none", "wrong", "valid"]
Encoding = Literal["identity", "gzip", "deflate"]
Ending = Literal["answered", "unfinished", "closed"]
"""The way in which the client ends its connections: read the answer, send all but the last byte, or
send everything and close.
"""

HTTP_PATHS: Final[Mapping[str, str]] = {
    "/v1/embeddings": "input",
    "/v1/chat/completions": "messages",
    "/v2/rerank": "documents",
    "/v2/embed": "texts",
    "/rerank": "texts",
    "/embed": "inputs",
    "/predict": "inputs",
    "/tokenize": "inputs",
    "/api/embed": "input",
    "/api/chat": "messages",
    f"/v1/encode/{tiny_kinds.FORMS}": "items",
    f"/v1/extract/{tiny_kinds.LABELS}": "items",
    f"/v2/models/{tiny_kinds.FORMS}/infer": "inputs",
    "/openapi.json": "",
    "/livez": "",
}
"""Paths, and the field of their body that is a list."""
TEI_PATHS: Final = (
    "/tei.v1.Embed/Embed",
    "/tei.v1.Rerank/Rerank",
    "/tei.v1.Info/Info",
    "/grpc.health.v1.Health/Check",
)

SHAPES: Final[Mapping[str, tuple[bytes, bytes]]] = {
    "texts": (b'"a",', b'"a"'),
    "numbers": (b"1,", b"1"),
    "empty lists": (b"[],", b"[]"),
    "empty objects": (b"{},", b"{}"),
    "messages": (b'{"role":"user","content":"a"},', b'{"role":"user","content":"a"}'),
    "long text": (b"aaaa ", b"a"),
    "depth": (b"[", b"]"),
    "msgpack maps": (b"\x80", b"\x80"),
    "msgpack lists": (b"\x90", b"\x90"),
}
"""The repeated part of a body, and its last part."""


@dataclass(frozen=True, slots=True)
class HttpRecipe:
    """One input: the same request on `connections` connections.

    Args:
        path: A key of HTTP_PATHS or one of TEI_PATHS.
        shape: A key of SHAPES.
        body: Bytes of the body before compression.
        encoding: Its content coding.
        credential: The request's credential.
        headers: The number of additional header lines.
        header_bytes: The bytes of each additional header.
        trailers: Trailer lines after a chunked body, of 8 bytes each; 0 sends the body by its
            length.
        connections: The number of connections, opened one after the other.
        ending: How the connections end.
    """

    path: str = "/v1/embeddings"
    shape: str = "texts"
    body: int = 100
    encoding: Encoding = "identity"
    credential: Credential = "none"
    headers: int = 0
    header_bytes: int = 8
    trailers: int = 0
    connections: int = 1
    ending: Ending = "answered"

    @property
    def verb(self) -> str:
        """Return the name of a finding."""
        return f"{self.path} ({self.credential})"

    @property
    def is_grpc(self) -> bool:
        return self.path in TEI_PATHS

    @property
    def deadline(self) -> float:
        """Return the edge's default deadline in seconds, since requests specify none."""
        return 60.0

    @property
    def sequences(self) -> int:
        """Return the number of texts that a model processes; other shapes are refused earlier."""
        if self.shape != "texts" or self.credential != "valid" or self.ending != "answered":
            return 0
        piece, last = SHAPES[self.shape]
        return self.connections * min(MAX_ITEMS, 1 + max(0, (self.body - len(last)) // len(piece)))

    def content(self) -> bytes:
        """Return the body as it is sent."""
        return _content(self.path, self.shape, self.body, self.encoding)

    def to_json(self) -> bytes:
        """Return the path, which marks an HTTP recipe, and the fields that differ from the
        defaults.
        """
        own = asdict(self)
        return json.dumps(
            {
                one.name: own[one.name]
                for one in fields(self)
                if one.name == "path" or own[one.name] != one.default
            }
        ).encode()

    def request(self, token: str) -> bytes:
        """Return the bytes of one connection; `token` is the valid one."""
        content, kind = (
            self.content(),
            "application/msgpack" if self.shape.startswith("msgpack") else "application/json",
        )
        lines = [f"POST {self.path} HTTP/1.1", "host: 127.0.0.1", f"content-type: {kind}"]
        if self.encoding != "identity":
            lines.append(f"content-encoding: {self.encoding}")
        if self.credential != "none":
            lines.append(
                "authorization: Bearer "
                f"{token if self.credential == 'valid' else 'nobody-issued-this'}"
            )
        lines += [f"x-{number}: {'v' * self.header_bytes}" for number in range(self.headers)]
        lines.append(
            "transfer-encoding: chunked" if self.trailers else f"content-length: {len(content)}"
        )
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        if not self.trailers:
            return head + content
        return (
            head
            + b"%x\r\n%b\r\n0\r\n" % (len(content), content)
            + b"t: 12345\r\n" * self.trailers
            + b"\r\n"
        )


@lru_cache(maxsize=1)
def _content(path: str, shape: str, size: int, encoding: Encoding) -> bytes:
    piece, last = SHAPES[shape]
    times = max(0, (size - len(last)) // len(piece))
    name = HTTP_PATHS.get(path, "inputs")
    if shape.startswith("msgpack"):
        count_bytes = (times + 1).to_bytes(4, "big")
        plain = (
            b"\x82\xa5model"
            + _msgpack(tiny_kinds.FORMS)
            + _msgpack(name)
            + b"\xdd"
            + count_bytes
            + piece * times
            + last
        )
    else:
        begin, end = (
            (b'"', b'"')
            if shape == "long text"
            else (b"", b"")
            if shape == "depth"
            else (b"[", b"]")
        )
        inner = piece * times + last * (max(1, times) if shape == "depth" else 1)
        plain = b'{"model":"%b","%b":%b%b%b}' % (
            tiny_kinds.FORMS.encode(),
            name.encode(),
            begin,
            inner,
            end,
        )
    if encoding == "gzip":
        return gzip.compress(plain, 6, mtime=0)
    return zlib.compress(plain) if encoding == "deflate" else plain


def _msgpack(text: str) -> bytes:
    return bytes([0xA0 | len(text)]) + text.encode()


def read(data: bytes) -> HttpRecipe | None:
    """Return the recipe of an input; None for another kind of input, or one above this module's
    limits.
    """
    try:
        recipe = HttpRecipe(**json.loads(data))
        numbers = (
            recipe.body,
            recipe.headers,
            recipe.header_bytes,
            recipe.trailers,
            recipe.connections,
        )
        if not all(type(number) is int and number >= 0 for number in numbers):
            return None
        wire = recipe.connections * (
            recipe.headers * (recipe.header_bytes + 8) + 10 * recipe.trailers
        )
        is_known = (recipe.path in HTTP_PATHS or recipe.is_grpc) and recipe.shape in SHAPES
        words = (
            (recipe.encoding, Encoding),
            (recipe.credential, Credential),
            (recipe.ending, Ending),
        )
        is_known = is_known and all(word in get_args(known) for word, known in words)
        within = (
            recipe.body <= MAX_BODY_BYTES
            and 1 <= recipe.connections <= MAX_CONNECTIONS
            and wire <= MAX_WIRE_BYTES
        )
        if not (is_known and within and "path" in json.loads(data)):
            return None
        return recipe if recipe.connections * len(recipe.content()) <= MAX_WIRE_BYTES else None
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def make(random: Random, known: Sequence[bytes]) -> bytes:
    """Return a recipe with one or two large quantities, or a known one with two values changed."""
    old = next(
        (
            found
            for data in random.sample(list(known), min(3, len(known)))
            if (found := read(data)) is not None
        ),
        None,
    )
    while True:
        drawn = asdict(_drawn(random))
        if old is not None and random.random() < 0.3:
            drawn = asdict(old) | {name: drawn[name] for name in random.sample(sorted(drawn), 2)}
        data = HttpRecipe(**drawn).to_json()
        if read(data) is not None:
            return data


def _drawn(random: Random) -> HttpRecipe:
    values: dict[str, Any] = {"path": random.choice((*HTTP_PATHS, *TEI_PATHS))}
    sizes = {
        "body": lambda: count(random, MAX_BODY_BYTES),
        "headers": lambda: count(random, 20_000),
        "header_bytes": lambda: count(random, 60_000),
        "trailers": lambda: count(random, 1 << 20),
        "connections": lambda: count(random, MAX_CONNECTIONS),
    }
    for name in {"body", *random.sample(sorted(sizes), 2)}:
        values[name] = sizes[name]()
    return HttpRecipe(
        **values,
        shape=random.choice(sorted(SHAPES)),
        encoding=random.choice(("identity", "identity", "gzip", "deflate")),
        credential=random.choice(("none", "none", "wrong", "valid")),
        ending=random.choice(get_args(Ending)),
    )

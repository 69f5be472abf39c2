"""`ModelHandle`: one model with its settings, answering in Python's own types, for frameworks and
whoever else wants no arrays.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Self

from shoal.client import AsyncClient, Client
from shoal.results import EncodeResult, ExtractResult, Form, ScoreResult
from shoal.tasks import Chunking, Role

Findings = Literal["entities", "labels", "relations"]
_VERBS: Final[Mapping[Findings, str]] = {
    "entities": "entities",
    "labels": "classify",
    "relations": "relations",
}


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A chunk of a text, as text splitters of frameworks need it.

    Attributes:
        start: Its first character in the text, in Unicode code points, as Python's strings count.
        end: One past its last character.
        text: The text from `start` to `end`.
        tokens: Number of tokens that its vector is made of, special tokens included.
        vector: Its dense vector, or None if vectors were not requested.
    """

    start: int
    end: int
    text: str
    tokens: int
    vector: list[float] | None = None


class ModelHandle:
    """A model of a mesh, with the arguments that every call for it repeats.

    Clients are created at the first call, again after a fork, and one for each event loop, so that
    a handle may be created anywhere and shared by threads. A copy is the same handle. A pickle
    holds no token: the unpickled handle takes the environment's.

    Methods with `a` in front are coroutines. All return an empty list for an empty input without a
    call, and raise ShoalError.

    Args:
        address, tenant, token, timeout: As for `Client`; if not given, from the environment, as TLS
            always is.
        query_instruction: Replaces the prompt of queries, never that of documents.
        options: Further arguments of the client's methods that the handle calls, such as
            {"dimensions": 256, "truncation": "none"} for `encode`.
    """

    def __init__(
        self,
        model: str,
        *,
        address: str | None = None,
        tenant: str = "",
        token: str | Callable[[], str] | None = None,
        timeout: float = 60.0,
        query_instruction: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.query_instruction = query_instruction
        self.options = dict(options or {})
        self._settings: dict[str, Any] = {"address": address, "tenant": tenant, "timeout": timeout}
        self._token = token
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._client: Client | None = None
        self._async_clients: dict[asyncio.AbstractEventLoop, AsyncClient] = {}

    @property
    def client(self) -> Client:
        """The blocking client of this process."""
        with self._lock:
            self._forget_after_fork()
            if self._client is None:
                self._client = Client(**self._settings, token=self._token)
            return self._client

    @property
    def async_client(self) -> AsyncClient:
        """The client of the running event loop. Raises RuntimeError if none runs."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._forget_after_fork()
            self._async_clients = {
                other: client
                for other, client in self._async_clients.items()
                if not other.is_closed()
            }
            if loop not in self._async_clients:
                self._async_clients[loop] = AsyncClient(**self._settings, token=self._token)
            return self._async_clients[loop]

    def dense(self, texts: Sequence[str], role: Role | None = None) -> list[list[float]]:
        """Return a vector for each text."""
        return _dense(self.client.encode(self.model, texts, **self._encoding("dense", role)))

    async def adense(self, texts: Sequence[str], role: Role | None = None) -> list[list[float]]:
        return _dense(
            await self.async_client.encode(self.model, texts, **self._encoding("dense", role))
        )

    def sparse(
        self, texts: Sequence[str], role: Role | None = None
    ) -> list[tuple[list[int], list[float]]]:
        """Columns, rising, and their weights for each text."""
        return _sparse(self.client.encode(self.model, texts, **self._encoding("sparse", role)))

    async def asparse(
        self, texts: Sequence[str], role: Role | None = None
    ) -> list[tuple[list[int], list[float]]]:
        return _sparse(
            await self.async_client.encode(self.model, texts, **self._encoding("sparse", role))
        )

    def multi_vector(
        self, texts: Sequence[str], role: Role | None = None
    ) -> list[list[list[float]]]:
        """Return a vector for each token of each text."""
        return _multi_vector(
            self.client.encode(self.model, texts, **self._encoding("multi_vector", role))
        )

    async def amulti_vector(
        self, texts: Sequence[str], role: Role | None = None
    ) -> list[list[list[float]]]:
        return _multi_vector(
            await self.async_client.encode(
                self.model, texts, **self._encoding("multi_vector", role)
            )
        )

    def forms(
        self, texts: Sequence[str], forms: Sequence[Form], role: Role | None = None
    ) -> dict[Form, list[Any]]:
        """Several representations of one forward pass, each as its own method gives it."""
        return _forms(self.client.encode(self.model, texts, **self._encoding(forms, role)), forms)

    async def aforms(
        self, texts: Sequence[str], forms: Sequence[Form], role: Role | None = None
    ) -> dict[Form, list[Any]]:
        return _forms(
            await self.async_client.encode(self.model, texts, **self._encoding(forms, role)), forms
        )

    def chunks(
        self, texts: Sequence[str], chunking: Chunking | None = None, *, embed: bool = False
    ) -> list[list[TextChunk]]:
        """Divide texts into chunks, by default `Chunking()`. An empty text has none.

        The mesh computes vectors in any case. With `embed` each chunk has its dense vector, and the
        texts are encoded as documents.
        """
        kept, divided = _nonempty(texts, chunking or Chunking())
        if not kept:
            return [[] for _ in texts]
        encoding = self._chunk_encoding(divided, embed)
        return _chunks(texts, self.client.encode(self.model, kept, **encoding), embed)

    async def achunks(
        self, texts: Sequence[str], chunking: Chunking | None = None, *, embed: bool = False
    ) -> list[list[TextChunk]]:
        kept, divided = _nonempty(texts, chunking or Chunking())
        if not kept:
            return [[] for _ in texts]
        encoding = self._chunk_encoding(divided, embed)
        return _chunks(texts, await self.async_client.encode(self.model, kept, **encoding), embed)

    def rank(self, query: str, texts: Sequence[str], top_n: int = 0) -> list[tuple[int, float]]:
        """Index and score of the `top_n` best texts (0: of all), best first."""
        return _ranked(self.client.score(self.model, query, texts, top_n=top_n, **self._scoring()))

    async def arank(
        self, query: str, texts: Sequence[str], top_n: int = 0
    ) -> list[tuple[int, float]]:
        return _ranked(
            await self.async_client.score(self.model, query, texts, top_n=top_n, **self._scoring())
        )

    def extract(
        self, texts: Sequence[str], find: Findings, labels: Sequence[str] = ()
    ) -> list[list[dict[str, Any]]]:
        """Return the findings in each text, as maps with the fields of `Entity`, `LabelScore` (best
        first) or `Relation`.
        """
        return _found(
            getattr(self.client, _verb(find))(self.model, texts, labels, **self.options), find
        )

    async def aextract(
        self, texts: Sequence[str], find: Findings, labels: Sequence[str] = ()
    ) -> list[list[dict[str, Any]]]:
        return _found(
            await getattr(self.async_client, _verb(find))(
                self.model, texts, labels, **self.options
            ),
            find,
        )

    def __repr__(self) -> str:
        """Without the token."""
        address = self._settings["address"]
        return f"ModelHandle({self.model!r}{f', address={address!r}' if address else ''})"

    def close(self) -> None:
        """Close the blocking client. The next call makes a new one."""
        with self._lock:
            self._forget_after_fork()
            client, self._client = self._client, None
        if client is not None:
            client.close()

    async def aclose(self) -> None:
        """Close the client of the running event loop. The next call makes a new one."""
        with self._lock:
            self._forget_after_fork()
            client = self._async_clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., ModelHandle], tuple[str, dict[str, Any]]]:
        settings = self._settings | {
            "query_instruction": self.query_instruction,
            "options": self.options,
        }
        return _unpickled, (self.model, settings)

    def _forget_after_fork(self) -> None:
        if self._process != os.getpid():
            self._process, self._client, self._async_clients = os.getpid(), None, {}

    def _encoding(self, forms: Form | Sequence[Form], role: Role | None) -> dict[str, Any]:
        instruction = (
            {"instruction": self.query_instruction}
            if role == "query" and self.query_instruction
            else {}
        )
        return {"role": role, "representations": forms} | instruction | self.options

    def _chunk_encoding(self, chunking: Chunking, embed: bool) -> dict[str, Any]:
        forms: tuple[Form, ...] = ("dense",) if embed else ()
        return self._encoding(forms, "document") | {"chunking": chunking}

    def _scoring(self) -> dict[str, Any]:
        return (
            {"instruction": self.query_instruction} if self.query_instruction else {}
        ) | self.options


def _unpickled(model: str, settings: dict[str, Any]) -> ModelHandle:
    return ModelHandle(model, **settings)


def _dense(result: EncodeResult) -> list[list[float]]:
    rows: list[list[float]] = result.dequantize().tolist()
    return rows


def _sparse(result: EncodeResult) -> list[tuple[list[int], list[float]]]:
    return [(columns.tolist(), weights.tolist()) for columns, weights in result.sparse]


def _multi_vector(result: EncodeResult) -> list[list[list[float]]]:
    return [rows.tolist() for rows in result.multi_vector]


def _forms(result: EncodeResult, forms: Sequence[Form]) -> dict[Form, list[Any]]:
    readers: dict[Form, Callable[[EncodeResult], list[Any]]] = {
        "dense": _dense,
        "sparse": _sparse,
        "multi_vector": _multi_vector,
    }
    return {form: readers[form](result) for form in forms}


def _nonempty(texts: Sequence[str], chunking: Chunking) -> tuple[list[str], Chunking]:
    """Return the texts that are not empty, and the chunking of these: routers refuse empty ones."""
    if all(texts):
        return list(texts), chunking
    kept = [index for index, text in enumerate(texts) if text]
    selected = replace(
        chunking,
        contexts=[chunking.contexts[index] for index in kept] if chunking.contexts else (),
        spans=[chunking.spans[index] for index in kept] if chunking.spans else (),
    )
    return [texts[index] for index in kept], selected


def _chunks(texts: Sequence[str], result: EncodeResult, embed: bool) -> list[list[TextChunk]]:
    """Return the chunks of each text, of a result for the texts that are not empty."""
    vectors = _dense(result) if embed else None
    divided = iter(result.chunks)
    return [
        [
            TextChunk(
                chunk.start,
                chunk.end,
                chunk.text,
                chunk.tokens,
                None if vectors is None else vectors[chunk.row],
            )
            for chunk in (next(divided) if text else ())
        ]
        for text in texts
    ]


def _ranked(result: ScoreResult) -> list[tuple[int, float]]:
    return [(int(index), float(result.scores[index])) for index in result.ranking]


def _verb(find: Findings) -> str:
    if find not in _VERBS:
        raise ValueError(f"find must be one of {', '.join(_VERBS)}, not {find!r}")
    return _VERBS[find]


def _found(result: ExtractResult, find: Findings) -> list[list[dict[str, Any]]]:
    return [[asdict(one) for one in getattr(extraction, find)] for extraction in result]

"""A patient client of HTTP, over the edges of a mesh: it repeats what may be repeated, under one
request id, until its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import shoal
from numpy.typing import NDArray
from shoal.errors import DeadlinePassed

from tests.edge.parts import Http, Reply, head, read_reply

AGAIN: Final = (429, 500, 502, 503)
MAX_PAUSE: Final = 0.5
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpClient:
    """Connections to edges, one for each request under way. It moves on to the next edge after a
    failure.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._edges = [Http(address) for address in addresses]
        self._current = 0
        self._idle: list[tuple[int, Connection]] = []

    async def encode(
        self, model: str, texts: Sequence[str], *, tenant: str, priority: str, timeout: float
    ) -> NDArray[np.float32]:
        """[texts, dimensions]. Raises ShoalError."""
        body = {
            "model": model,
            "input": list(texts),
            "encoding_format": "base64",
            "priority": priority,
        }
        request_id, end = secrets.token_hex(16), time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            pause = 0.1
            edge = self._current
            try:
                # A live edge reports an expired deadline itself.
                async with asyncio.timeout(left + 1.0):
                    reply = await self._post(
                        edge, body, {"x-request-id": request_id, "x-shoal-tenant": tenant}, left
                    )
            except (OSError, EOFError, asyncio.IncompleteReadError):
                self._current = (edge + 1) % len(self._edges)
            else:
                if reply.status == 200:
                    return np.stack(
                        [
                            np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
                            for row in reply.json["data"]
                        ]
                    )
                if reply.status == 504:
                    break
                if reply.status not in AGAIN:
                    raise shoal.ShoalError(f"HTTP {reply.status}: {reply.body[:200]!r}")
                pause = min(MAX_PAUSE, float(reply.headers.get("retry-after-ms", "100")) / 1000)
                self._current = (edge + 1) % len(self._edges)
            await asyncio.sleep(pause)
        raise DeadlinePassed("no edge answered in time")

    async def _post(
        self, edge: int, body: object, headers: dict[str, str], seconds: float
    ) -> Reply:
        content = json.dumps(body).encode()
        kept = next((one for one in self._idle if one[0] == edge), None)
        if kept is not None:
            self._idle.remove(kept)
        reader, writer = kept[1] if kept is not None else await self._edges[edge].open()
        reported = {
            **headers,
            "content-length": str(len(content)),
            "x-request-timeout": f"{seconds:.3f}",
        }
        try:
            writer.write(head("POST", "/v1/embeddings", reported) + content)
            reply = await read_reply(reader)
        except BaseException:
            writer.close()
            raise
        if reply.headers.get("connection") == "close":
            writer.close()
        else:
            self._idle.append((edge, (reader, writer)))
        return reply

    def close(self) -> None:
        for _, (_, writer) in self._idle:
            writer.close()

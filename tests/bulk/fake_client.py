"""A client that answers from arithmetic, without a mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from shoal.errors import InputTooLong
from shoal.extractions import Extraction, LabelScore
from shoal.results import EncodeResult, ExtractResult, ScoreResult, Skipped, Timings, Usage, Vectors

DIMENSIONS = 4
RECIPE = "0123456789abcdef"
_TIMINGS = Timings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def make_vector(text: str) -> list[float]:
    return [float(len(text)), *(float(ord(text[place % len(text)])) for place in range(3))]


class FakeClient:
    """Replaces `shoal.AsyncClient`.

    Attributes:
        skips: Return whether a text is refused as too long.
        cuts: Return whether a text is cut at the model's limit.
        before: Called with the texts of each request; may raise the request's error.
        texts: The texts of all requests.
        expected: The embedding id that each request to encode required.
        timeouts: The timeout of each request.
        blocked: Number of requests that wait for `gate`.
    """

    def __init__(self) -> None:
        self.skips: Callable[[str], bool] = lambda text: False
        self.cuts: Callable[[str], bool] = lambda text: False
        self.before: Callable[[Sequence[str]], None] = lambda texts: None
        self.embedding_id: Callable[[], str] = lambda: f"{RECIPE}.float32"
        self.revision: Callable[[], str] = lambda: "r1"
        self.gate = asyncio.Event()
        self.gate.set()
        self.texts: list[str] = []
        self.expected: list[str] = []
        self.timeouts: list[float] = []
        self.active = self.most_active = self.blocked = 0

    async def encode(
        self, model: str, texts: Sequence[str], *, expect_embedding_id: str = "", **options: Any
    ) -> EncodeResult:
        self.expected.append(expect_embedding_id)
        usage, skipped = await self._ask(texts, options)
        array = np.array([make_vector(text) for text in texts], np.float32)
        array[[one.index for one in skipped]] = np.nan
        vectors = Vectors(array, "float32", DIMENSIONS)
        return EncodeResult(
            vectors,
            None,
            None,
            usage,
            _TIMINGS,
            self.revision(),
            skipped,
            embedding_id=self.embedding_id(),
        )

    async def score(
        self, model: str, query: str, texts: Sequence[str], **options: Any
    ) -> ScoreResult:
        usage, skipped = await self._ask(texts, options)
        scores = np.array([len(query) * 1000 + len(text) for text in texts], np.float32)
        scores[[one.index for one in skipped]] = np.nan
        ranking = np.argsort(-scores)
        return ScoreResult(scores, ranking, usage, _TIMINGS, self.revision(), skipped)

    async def extract(
        self, model: str, texts: Sequence[str], task: object, **options: Any
    ) -> ExtractResult:
        usage, skipped = await self._ask(texts, options)
        found = [Extraction(labels=(LabelScore(text[:1], 0.5),)) for text in texts]
        return ExtractResult(found, usage, _TIMINGS, self.revision(), skipped)

    async def _ask(
        self, texts: Sequence[str], options: dict[str, Any]
    ) -> tuple[Usage, tuple[Skipped, ...]]:
        self.timeouts.append(options["timeout"])
        assert (options["priority"], options["on_invalid"]) == ("bulk", "skip")
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            self.blocked += 1
            await self.gate.wait()
            self.blocked -= 1
            await asyncio.sleep(0)
            self.before(texts)
        finally:
            self.active -= 1
        self.texts += texts
        options["on_progress"](len(texts), len(texts))
        skipped = tuple(
            Skipped(index, InputTooLong.reason, f"items[{index}].text is too long")
            for index, text in enumerate(texts)
            if self.skips(text)
        )
        cut = sum(map(self.cuts, texts))
        return Usage(sum(len(text.split()) for text in texts), truncated_items=cut), skipped

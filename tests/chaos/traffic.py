"""Clients and the results of their requests, compared with the results of the calm mesh.

The seed and its number decide a request. Most are patient (60 s, the client's default retries):
whatever happens to the mesh, each of them must be answered once and correctly. Some are cancelled
on purpose, some have a very short deadline: only the results of these that arrive are checked.
"""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import shoal
from numpy.typing import NDArray
from PIL import Image
from shoal.errors import DeadlinePassed, Overloaded, Unavailable
from shoal.tasks import Priority

from tests.chaos.http import HttpClient
from tests.chaos.models import CLASSES, CLASSIFIER, DENSE, GENERATIVE, IMAGES, OTHER_DENSE, RANKER
from tests.chaos.stage import TENANTS
from tests.support.texts import texts

PATIENT_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 10.0
"""Seconds after its deadline at which an unanswered request counts as lost."""
TOLERANCE: Final = 1e-5
TEXTS: Final = 200
MAX_DOCUMENTS: Final = 4
OVER_HTTP: Final = 4
"""One of this number of requests, if it encodes, goes over HTTP through an edge."""

WRITTEN_TOKENS: Final = 8
MAX_CHARACTERS: Final = 400
"""Longest generated text that is compared."""
STREAM_PAUSE_SECONDS: Final = 0.2
"""Between attempts of a stream, which the client does not retry."""

Verb = Literal["encode", "score", "classify", "images", "generate", "stream"]
Mood = Literal["patient", "hasty", "fickle"]
KINDS: Final[tuple[tuple[Verb, str, int, int], ...]] = (
    ("encode", DENSE, TEXTS, 45),
    ("encode", OTHER_DENSE, TEXTS, 18),
    ("score", RANKER, 50, 13),
    ("classify", CLASSIFIER, 50, 13),
    ("images", IMAGES, 20, 5),
    ("generate", GENERATIVE, 20, 3),
    ("stream", GENERATIVE, 20, 3),
)
"""Verb, model, number of items, and share of the requests in percent."""
PRIORITIES: Final[tuple[Priority, ...]] = ("interactive", "bulk")
MOODS: Final[tuple[Mood, ...]] = ("patient", "hasty", "fickle")
Numbers = NDArray[np.number]
Clients = Mapping[str, Sequence[shoal.AsyncClient]]
"""Clients by tenant."""


@dataclass(frozen=True, slots=True)
class Request:
    """The content of request `number`."""

    number: int
    verb: Verb
    model: str
    items: tuple[int, ...]
    tenant: str
    priority: Priority
    mood: Mood
    seconds: float
    """Time until its deadline."""
    leaves_after: float
    """Seconds until a fickle client cancels."""


def request(seed: int, number: int, patient_seconds: float = PATIENT_SECONDS) -> Request:
    dice = random.Random(f"{seed}/{number}")
    mood = dice.choices(MOODS, (90, 4, 6))[0]
    verb, model, items, _ = dice.choices(KINDS, [kind[3] for kind in KINDS])[0]
    count = dice.choice((1, 1, 2, 4)) if verb in ("encode", "images") else 1
    return Request(
        number,
        verb,
        model,
        tuple(dice.randrange(items) for _ in range(count)),
        tenant=dice.choice(tuple(TENANTS)),
        priority=dice.choices(PRIORITIES, (80, 20))[0],
        mood=mood,
        seconds=dice.uniform(0.02, 0.6) if mood == "hasty" else patient_seconds,
        leaves_after=dice.uniform(0.0, 0.15) if mood == "fickle" else 0.0,
    )


class Answers:
    """Makes requests and knows their expected results: `learn` asks for each once."""

    def __init__(self) -> None:
        self._texts = texts(TEXTS, shortest=1, longest=12, seed=5)
        self._images = [_image(number) for number in range(20)]
        self._expected: dict[tuple[str, str], Numbers] = {}

    async def learn(self, client: shoal.AsyncClient) -> None:
        for verb, model, items, _ in KINDS:
            asked = [
                Request(0, verb, model, (item,), "nobody", "interactive", "patient", 120.0, 0.0)
                for item in range(items)
            ]
            parts = [
                await asyncio.gather(*(self.ask(client, one) for one in asked[at : at + 16]))
                for at in range(0, items, 16)
            ]
            self._expected[verb, model] = np.concatenate([part for some in parts for part in some])
        streamed, written = (self._expected[verb, GENERATIVE] for verb in ("stream", "generate"))
        assert np.array_equal(streamed, written)

    def example(self) -> tuple[str, Numbers]:
        """A text, and what models.DENSE says of it."""
        return self._texts[0], self._expected["encode", DENSE][:1]

    async def ask_http(self, client: HttpClient, wanted: Request) -> Numbers:
        """The same over HTTP, of a request that encodes."""
        words = [self._texts[item] for item in wanted.items]
        return await client.encode(
            wanted.model,
            words,
            tenant=wanted.tenant,
            priority=wanted.priority,
            timeout=wanted.seconds,
        )

    async def ask(self, client: shoal.AsyncClient, wanted: Request) -> Numbers:
        """The answer as rows of numbers. Raises ShoalError."""
        words = [self._texts[item] for item in wanted.items]
        model, priority, timeout = wanted.model, wanted.priority, wanted.seconds
        if wanted.verb == "score":
            documents = self._documents(wanted.items[0])
            scores = (
                await client.score(model, words[0], documents, priority=priority, timeout=timeout)
            ).scores
            return np.pad(scores, (0, MAX_DOCUMENTS - len(scores)))[None]
        if wanted.verb == "classify":
            found = await client.classify(
                model, words, threshold=0.0, priority=priority, timeout=timeout
            )
            by_label = [{one.label: one.score for one in item.labels} for item in found]
            return np.array([[scores.get(name, -1.0) for name in CLASSES] for scores in by_label])
        if wanted.verb == "generate":
            task = shoal.ReadText(max_tokens=WRITTEN_TOKENS)
            found = await client.extract(model, words, task, priority=priority, timeout=timeout)
            return _characters(found[0].text)
        if wanted.verb == "stream":
            return await self._stream(client, wanted, words)
        items = [self._images[item] for item in wanted.items] if wanted.verb == "images" else words
        dense = (await client.encode(model, items, priority=priority, timeout=timeout)).dense
        assert dense is not None
        return dense

    async def _stream(
        self, client: shoal.AsyncClient, wanted: Request, words: Sequence[str]
    ) -> Numbers:
        """Return the text of a stream, again from the start after errors that may be repeated. Its
        deltas must be the beginning of the text: if they are not, they are returned.
        """
        task, end = shoal.ReadText(max_tokens=WRITTEN_TOKENS), time.monotonic() + wanted.seconds
        while True:
            streamed = ""
            try:
                async for part in client.extract_stream(
                    wanted.model,
                    words,
                    task,
                    priority=wanted.priority,
                    timeout=max(0.01, end - time.monotonic()),
                ):
                    if isinstance(part, shoal.Delta):
                        streamed = part.text if part.restarted else streamed + part.text
                        continue
                    text = part[0].text
                    return _characters(text if text.startswith(streamed.strip()) else streamed)
            except (Unavailable, Overloaded):
                if time.monotonic() + STREAM_PAUSE_SECONDS > end:
                    raise
            await asyncio.sleep(STREAM_PAUSE_SECONDS)

    def _documents(self, item: int) -> list[str]:
        return [
            self._texts[(item * MAX_DOCUMENTS + offset) % TEXTS]
            for offset in range(1 + item % MAX_DOCUMENTS)
        ]

    def are_right(self, wanted: Request, answer: Numbers) -> bool:
        expected = self._expected[wanted.verb, wanted.model][list(wanted.items)]
        return answer.shape == expected.shape and bool(
            np.allclose(answer, expected, rtol=0, atol=TOLERANCE)
        )


def _image(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (40, 30 + number, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _characters(text: str) -> Numbers:
    """Return a generated text as one row of numbers."""
    codes = [ord(character) for character in text[:MAX_CHARACTERS]]
    return np.pad(np.array(codes, np.float64), (0, MAX_CHARACTERS - len(codes)))[None]


@dataclass
class Watch:
    """The requests that were in flight when the watch began; `over` is set when the last of them
    ends (monotonic seconds).
    """

    left: set[int]
    over: asyncio.Future[float]


@dataclass
class Tally:
    """Counts of requests."""

    sent: int = 0
    answers: Counter[int] = field(default_factory=Counter)
    """Number of answers of each request."""
    lost: list[str] = field(default_factory=list)
    """A line for each lost request."""
    wrong: list[str] = field(default_factory=list)
    """A line for each wrong answer."""
    cancelled: int = 0
    late: int = 0
    seconds: list[float] = field(default_factory=list)
    """Durations of patient requests that were answered."""

    @property
    def answered(self) -> int:
        return len(self.answers)

    @property
    def duplicates(self) -> int:
        return sum(times - 1 for times in self.answers.values())


class Traffic:
    """Sends requests while `running`: at most `at_once`, and `per_second` while the mesh keeps
    up.
    """

    def __init__(
        self,
        seed: int,
        answers: Answers,
        clients: Clients,
        http: HttpClient | None = None,
        *,
        at_once: int,
        per_second: float,
        patient_seconds: float = PATIENT_SECONDS,
    ) -> None:
        self.tally = Tally()
        self._seed = seed
        self._answers = answers
        self._clients = clients
        self._http = http
        self._at_once = at_once
        self._per_second = per_second
        self._patient_seconds = patient_seconds
        # Mutable state: the requests in flight, and who watches them.
        self._in_flight: set[int] = set()
        self._watches: list[Watch] = []
        self._next_at = 0.0
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving it waits for the requests in flight; if it is left by an error, they are given
        up.
        """
        async with asyncio.TaskGroup() as group:
            self._next_at = time.monotonic()
            for _ in range(self._at_once):
                group.create_task(self._keep_asking())
            try:
                yield
            finally:
                self._stop.set()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def watch(self) -> asyncio.Future[float]:
        """Return a future with the end of the last of the requests that are now in flight."""
        over: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        watch = Watch(set(self._in_flight), over)
        self._watches.append(watch)
        self._check_watch(watch)
        return over

    async def _keep_asking(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            self._next_at = (
                max(self._next_at, now - 2.0) + 1.0 / self._per_second
            )  # two seconds' worth may be caught up on
            if self._next_at > now:
                await asyncio.sleep(self._next_at - now)
            if not self._stop.is_set():
                self.tally.sent += 1
                await self._make(request(self._seed, self.tally.sent, self._patient_seconds))

    async def _make(self, wanted: Request) -> None:
        self._in_flight.add(wanted.number)
        try:
            await {"patient": self._patient, "hasty": self._hasty, "fickle": self._fickle}[
                wanted.mood
            ](wanted)
        finally:
            self._in_flight.discard(wanted.number)
            for watch in self._watches:
                watch.left.discard(wanted.number)
                self._check_watch(watch)
            self._watches = [watch for watch in self._watches if not watch.over.done()]

    def _check_watch(self, watch: Watch) -> None:
        if not watch.left and not watch.over.done():
            watch.over.set_result(time.monotonic())

    async def _patient(self, wanted: Request) -> None:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(wanted.seconds + MARGIN_SECONDS):
                await self._check(wanted)
        except TimeoutError:
            self._lose(wanted, begin, "neither an answer nor an error")
        except shoal.ShoalError as error:
            self._lose(wanted, begin, f"{type(error).__name__}: {error}")
        else:
            self.tally.seconds.append(time.monotonic() - begin)

    async def _hasty(self, wanted: Request) -> None:
        begin = time.monotonic()
        try:
            async with asyncio.timeout(wanted.seconds + MARGIN_SECONDS):
                await self._check(wanted)
        except TimeoutError:
            self._lose(wanted, begin, "neither an answer nor an error")
        except (DeadlinePassed, Unavailable, Overloaded):
            self.tally.late += 1
        except shoal.ShoalError as error:
            self._lose(wanted, begin, f"{type(error).__name__}: {error}")

    async def _fickle(self, wanted: Request) -> None:
        begin = time.monotonic()
        asking = asyncio.ensure_future(self._check(wanted))
        await asyncio.wait([asking], timeout=wanted.leaves_after)
        if asking.cancel():
            await asyncio.wait([asking])
            self.tally.cancelled += 1
        if not asking.cancelled() and (error := asking.exception()) is not None:
            if not isinstance(error, shoal.ShoalError):
                raise error
            self._lose(wanted, begin, f"{type(error).__name__}: {error}")

    async def _check(self, wanted: Request) -> None:
        clients = self._clients[wanted.tenant]
        if self._http is not None and wanted.verb == "encode" and wanted.number % OVER_HTTP == 0:
            answer = await self._answers.ask_http(self._http, wanted)
        else:
            answer = await self._answers.ask(clients[wanted.number % len(clients)], wanted)
        self.tally.answers[wanted.number] += 1
        if not self._answers.are_right(wanted, answer):
            self.tally.wrong.append(f"{_clock()} request {wanted.number}: {wanted}")

    def _lose(self, wanted: Request, begin: float, what: str) -> None:
        self.tally.lost.append(
            f"{_clock()} request {wanted.number} ({wanted.mood} {wanted.verb}, after "
            f"{time.monotonic() - begin:.2f} s): {what}"
        )


def _clock() -> str:
    """UTC, as in the logs of the processes."""
    return time.strftime("%H:%M:%S", time.gmtime())


@asynccontextmanager
async def connected(address: str, each: int) -> AsyncIterator[Clients]:
    """Connect `each` clients of each tenant."""
    async with AsyncExitStack() as stack:
        yield {
            tenant: [
                await stack.enter_async_context(shoal.AsyncClient(address, tenant=tenant))
                for _ in range(each)
            ]
            for tenant in TENANTS
        }

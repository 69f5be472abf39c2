"""The driver's side of `proxy.py`: names of links, and the ways in which they can be."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Literal

Direction = Literal["both", "up", "down"]


@dataclass(frozen=True, slots=True)
class Course:
    """The behaviour of one direction. `latency` and `jitter` are in seconds, `rate` in bytes a
    second (0: unlimited).
    """

    silent: bool = False
    latency: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """The behaviour of a link: `up` is from the client to the server. `cut`: connections are reset,
    new ones at once.
    """

    up: Course = field(default_factory=Course)
    down: Course = field(default_factory=Course)
    cut: bool = False


PASS = Way()
CUT = Way(cut=True)


def silent(direction: Direction) -> Way:
    return Way(Course(silent=direction != "down"), Course(silent=direction != "up"))


def slow(latency: float, jitter: float) -> Way:
    """Each direction."""
    return Way(Course(latency=latency, jitter=jitter), Course(latency=latency, jitter=jitter))


def narrow(rate: float) -> Way:
    return Way(Course(rate=rate), Course(rate=rate))


class Links:
    """The proxy's process while the context is open. `ports`: where each link begins, on
    127.0.0.1.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self.ports: dict[str, int] = {}
        self._targets = dict(targets)
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> Links:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.proxy"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ,
            # Ctrl-C reaches the driver alone, which then ends the others in order
            start_new_session=True,
        )
        self.ports = await self._ask(self._targets)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def matching(self, ends: str) -> list[str]:
        """The links `a>b` where `ends` is their name, or their begin (`a>`) or end (`>b`)."""
        return [
            name
            for name in self.ports
            if ends == name or name.startswith(ends) or name.endswith(ends)
        ]

    async def set(self, names: Collection[str], way: Way) -> int:
        """Returns when they are so, with the number of their connections."""
        answer = await self._ask({"links": list(names), "way": asdict(way)})
        return answer["connections"]

    async def _ask(self, message: object) -> dict[str, int]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._asking:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()
            answer: dict[str, int] = json.loads(await process.stdout.readline())
            return answer

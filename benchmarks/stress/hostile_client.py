"""The hostile tenant of `benchmarks.stress.hostile`, in a process of its own: asks in turn for what multiplies most, at a rate.

`python -m benchmarks.stress.hostile_client ADDRESS REQUESTS_PER_SECOND`; it ends with its input, and prints each kind's outcomes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from shoal.v1 import inference_pb2 as pb

from benchmarks.common.texts import MINILM_ID
from tests.fuzz.tiny_kinds import LABELS, PAIRS

TENANT: Final = "hostile"
DEADLINE_SECONDS: Final = 2.0
CANCEL_SECONDS: Final = 0.05
MIB: Final = 1 << 20
# The most that the contract allows (docs/security.md). What all items make a worker read, with what each repeats, is 256 MiB, and
# what an answer may repeat of labels 8 MiB.
INSTRUCTION, HYPOTHESIS, LABEL, QUERY, TEXT = 16_384, 1_024, 1_024, 131_072, 4 * MIB
MANY: Final = 2_000
MANY_TIMES_QUERY: Final = 1_900
"""Documents, each of which is read with the largest query."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A request as it goes out. `legal`: within the limits of every field, so that it must be served or run out of its time."""

    name: str
    method: str
    body: bytes
    legal: bool


def attacks() -> list[Attack]:
    """Of each product one at its limit and one far beyond it."""
    words, rows = "shoal of fish ", [pb.Item(text=f"text {number}") for number in range(MANY)]
    labels = [f"{number} {'l' * LABEL}"[:LABEL] for number in range(256)]
    long = [pb.Item(text=_exactly(words, MIB)) for _ in range(16)]

    def encode(items: list[pb.Item], instruction: str = "") -> pb.EncodeRequest:
        return pb.EncodeRequest(model=MINILM_ID, items=items, instruction=instruction)

    def score(model: str, documents: list[pb.Item], query: str) -> pb.ScoreRequest:
        return pb.ScoreRequest(model=model, query=pb.Item(text=query), documents=documents)

    def classify(hypothesis: str, names: list[str]) -> pb.ExtractRequest:
        return pb.ExtractRequest(model=MINILM_ID, items=rows[:31], classify=pb.ClassifyTask(labels=names, hypothesis=hypothesis))

    def entities(items: list[pb.Item], names: list[str]) -> pb.ExtractRequest:
        return pb.ExtractRequest(model=LABELS, items=items, entities=pb.EntitiesTask(labels=names))

    made: list[tuple[str, bool, Any]] = [
        ("instruction x items", True, encode(rows, _exactly(words, INSTRUCTION))),
        ("instruction x items", False, encode(rows, _exactly(words, 2 * MIB))),
        ("hypothesis x labels", True, classify("{}" + _exactly(words, HYPOTHESIS - 2), labels)),
        ("hypothesis x labels", False, classify("{}" + "h" * (4 * MIB), ["a", *labels[:255]])),
        ("long texts", True, encode(long)),
        ("texts that grow", True, encode([pb.Item(text="\ufdfa" * (TEXT // 3))])),
        ("one text too long", False, encode([pb.Item(text="w" * (2 * TEXT))])),
        ("query x documents", True, score(PAIRS, rows[:MANY_TIMES_QUERY], _exactly(words, QUERY))),
        ("query x documents", False, score(PAIRS, rows, _exactly(words, 4 * MIB))),
        ("query of vectors", True, score(MINILM_ID, rows, _exactly(words, QUERY))),
        ("labels x items", True, entities(rows[:31], labels)),
        ("labels x items", False, entities(rows, ["l" * MIB, *map(str, range(24))])),
    ]
    methods = {"EncodeRequest": "Encode", "ScoreRequest": "Score", "ExtractRequest": "Extract"}
    return [Attack(name, methods[type(one).__name__], one.SerializeToString(), legal) for name, legal, one in made]


def _exactly(words: str, size: int) -> str:
    return (words * (size // len(words) + 1))[:size]


class Hostile:
    """Asks in an open loop; every second request is cancelled at once, the others are left to run out of their time."""

    def __init__(self, channel: grpc.aio.Channel, tenant: str = TENANT) -> None:
        self._channel, self._metadata = channel, (("x-shoal-tenant", tenant),)
        # The state: calls under way, and what became of the others, by name.
        self._flying: set[asyncio.Task[None]] = set()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)

    async def run(self, rate: float) -> None:
        """Until it is cancelled."""
        try:
            for attack, is_cancelled in zip(cycle(attacks()), cycle([False] * 12 + [True] * 12), strict=False):
                task = asyncio.create_task(self.ask(attack, is_cancelled=is_cancelled))
                self._flying.add(task)
                task.add_done_callback(self._flying.discard)
                await asyncio.sleep(1 / rate)
        finally:
            for task in list(self._flying):
                task.cancel()

    async def ask(self, attack: Attack, *, is_cancelled: bool = False) -> None:
        """Notes what became of it."""
        method = self._channel.unary_unary(f"/shoal.v1.InferenceService/{attack.method}", bytes, bytes)
        call = method(attack.body, timeout=DEADLINE_SECONDS, metadata=self._metadata)
        if is_cancelled:
            asyncio.get_running_loop().call_later(CANCEL_SECONDS, call.cancel)
        why = _reason(await call.code(), await call.trailing_metadata())
        self.outcomes[f"{attack.name}, {'legal' if attack.legal else 'too large'}"][why] += 1


def _reason(code: grpc.StatusCode, metadata: grpc.aio.Metadata | None) -> str:
    """Of a refusal the mesh's own word for it, such as RATE_LIMITED; else the code."""
    details = dict(list(metadata or ())).get("grpc-status-details-bin", b"")
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(details if isinstance(details, bytes) else b"").details:
        if detail.Unpack(info):
            return str(info.reason)
    return code.name


async def main(address: str, rate: float) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        hostile = Hostile(channel)
        running = asyncio.create_task(hostile.run(rate))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        running.cancel()
        await asyncio.wait([running])
    print(json.dumps(hostile.outcomes))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))

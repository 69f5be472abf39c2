"""Fair order of preparation, checked by the order in which jobs finish: independent of the
machine's speed.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import pytest
from shoal.v1 import inference_pb2, worker_pb2

from libs.documents.text_size import PDF_PAGE_BYTES
from services.worker.jobs.held import HeldJob, Lease
from services.worker.jobs.pulling import preparing
from services.worker.jobs.pulling.preparing import (
    BLOCKED_SECONDS,
    MAX_AWAY,
    MAX_SLOW_AWAY,
    SMALL_BYTES,
    GiveWay,
    Preparation,
    Preparers,
)
from services.worker.jobs.pulling.reading import (
    PAGE_BYTES,
    PIXELS_A_BYTE,
    InputSizes,
    estimate_input_sizes,
    estimated_tokens,
    read_bytes,
)
from services.worker.memory.resident import Resident
from services.worker.scheduling.batcher import Caller
from services.worker.scheduling.turns import REMEMBERED_SECONDS
from tests.support.waiting import wait_until
from tests.worker.fakes import (
    CREEPING,
    HANG_SECONDS,
    FakeLanes,
    FakeModel,
    encode_job,
    routers,
    until,
    vector,
    vectors,
)
from tests.worker.running import MODEL, RunningWorker, worker

LANE: Final = worker_pb2.Lane(model="org/fake")
LARGE: Final = SMALL_BYTES + 1


class Bench:
    """Prepares a job in `slices`. The first slice of each job of `held_up` waits for its event."""

    def __init__(self, threads: ThreadPoolExecutor, count: int, *, is_slow: bool = False) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.held_up: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}
        self.slices: dict[str, int] = {}
        self.rests: list[float] = []
        self.computed_for: Caller | None = None
        """The caller of the batch on the device."""
        self.yielding: set[str] = set()
        """Jobs that do not end before another, but yield until then."""
        preparers = Preparers(
            threads, count, MAX_SLOW_AWAY if is_slow else MAX_AWAY, is_slow=is_slow
        )
        self.preparation = Preparation(
            preparers,
            self._prepare,
            clock=lambda: self.now,
            serves_others=lambda caller: self.computed_for not in (None, caller),
            rest=self.rests.append,
        )
        self._resident = Resident("org/fake", FakeModel(), 0.0, 0.0, 0.0)

    def held(self, name: str, tenant: str, read_bytes: int = 100) -> HeldJob:
        job = encode_job(name, "a")
        job.tenant = tenant
        held = HeldJob(
            id(job), job, Lease(LANE, "1", 15.0), self._resident, received_at=0.0, queue_seconds=0.0
        )
        held.read_bytes, held.estimated_tokens = read_bytes, read_bytes
        self.begun[name] = threading.Event()
        return held

    def large(self, name: str, tenant: str, slices: int = 100) -> HeldJob:
        self.slices[name] = slices
        self.held_up[name] = threading.Event()
        return self.held(name, tenant, LARGE)

    def _prepare(self, jobs: list[HeldJob], give_way: GiveWay) -> None:
        for held in jobs:
            name = held.job.job_id
            self.begun[name].set()
            if name in self.held_up:
                assert self.held_up[name].wait(HANG_SECONDS)
            for _ in range(self.slices.get(name, 1)):
                self.now += 0.01
                give_way()
            end = time.monotonic() + HANG_SECONDS
            while not self.done and name in self.yielding:
                assert time.monotonic() < end, f"{name} gives way, and no other job is done"
                give_way()
                time.sleep(0.001)
            self.done.append(name)


@contextmanager
def bench(count: int, *, is_slow: bool = False) -> Iterator[Bench]:
    with ThreadPoolExecutor(count + MAX_AWAY) as threads:
        one = Bench(threads, count, is_slow=is_slow)
        yield one
        for event in one.held_up.values():
            event.set()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_small_job_finishes_before_large_ones_that_occupy_all_threads(count: int) -> None:
    with bench(count) as one:
        names = [f"large {number}" for number in range(count * 3)]
        one.yielding.update(names)
        for name in names:
            one.preparation.add([one.large(name, "heavy")])
        wait_until(lambda: sum(one.begun[name].is_set() for name in names) == count)
        one.preparation.add([one.held("small", "light")])
        for name in names:
            one.held_up[name].set()
        wait_until(lambda: len(one.done) == len(names) + 1)
        assert one.done[0] == "small"


@pytest.mark.parametrize("count", [1, 2])
def test_text_that_does_not_yield_blocks_no_other_caller(count: int) -> None:
    """One 4 MiB word takes the tokenizer seconds. Another thread replaces the blocked one, but not
    for the same caller.
    """
    with bench(count) as one:
        heavy = [f"large {number}" for number in range(count + 3)]
        for name in heavy:
            one.preparation.add([one.large(name, "heavy")])
        wait_until(lambda: sum(one.begun[name].is_set() for name in heavy) == count)
        one.preparation.add([one.held("small", "light")])
        assert one.preparation.relieve()
        assert not one.done, "they have not been held for long"
        one.now += 2 * BLOCKED_SECONDS
        assert one.preparation.relieve()
        wait_until(lambda: one.done == ["small"])
        assert sum(one.begun[name].is_set() for name in heavy) == count
        for name in heavy:
            one.held_up[name].set()
        wait_until(lambda: len(one.done) == len(heavy) + 1)
        one.preparation.add([one.held(name, "light") for name in ("one", "more")])
        wait_until(lambda: len(one.done) == len(heavy) + 3)
        assert not one.preparation.relieve()
        wait_until(lambda: one.preparation._idle == count, what="every thread is idle again")


@pytest.mark.parametrize("is_queued_before", [True, False])
def test_batch_of_several_callers_does_not_wait_for_a_blocked_one(
    is_queued_before: bool,
) -> None:
    """The heavy caller has had no service yet, so a batch with its jobs is queued in its line."""
    with bench(1) as one:
        one.preparation.add([one.large("large", "heavy")])
        wait_until(one.begun["large"].is_set)
        mixed = [
            one.held("own", "heavy"),
            one.held("light 1", "light"),
            one.held("light 2", "light"),
            one.held("other", "other"),
        ]
        if is_queued_before:
            one.preparation.add(mixed)
        else:
            one.preparation.add([one.held("light 0", "light")])
        one.now += 2 * BLOCKED_SECONDS
        assert one.preparation.relieve()
        if not is_queued_before:
            wait_until(lambda: one.done == ["light 0"])
            one.done.clear()
            one.preparation.add(mixed)
        wait_until(lambda: set(one.done) == {"light 1", "light 2", "other"})
        assert not one.begun["own"].is_set(), (
            "its caller has one portion at a time while a thread is away with it"
        )
        one.held_up["large"].set()
        wait_until(lambda: len(one.done) == 5)
        wait_until(lambda: one.preparation._idle == 1, what="every thread is idle again")


def test_slow_job_does_not_wait_for_slow_jobs_of_other_callers() -> None:
    with bench(1, is_slow=True) as one:
        one.preparation.add(
            [one.large("slow 1", "heavy"), one.large("slow 2", "heavy"), one.held("light", "light")]
        )
        wait_until(one.begun["slow 1"].is_set)
        one.now += 2 * BLOCKED_SECONDS
        one.preparation.relieve()
        wait_until(lambda: one.done == ["light"])
        assert not one.begun["slow 2"].is_set()
        one.held_up["slow 2"].set()
        one.held_up["slow 1"].set()
        wait_until(lambda: one.done == ["light", "slow 1", "slow 2"])


def test_slow_job_that_yields_between_pages_keeps_its_thread_and_counts_as_away() -> None:
    """A job prepared within its yield would delay it by that job's duration."""
    with bench(1, is_slow=True) as one:
        one.preparation.add([one.large("pages", "light", slices=3)])
        wait_until(one.begun["pages"].is_set)
        one.preparation.add([one.large("slow", "heavy")])
        one.held_up["pages"].set()
        wait_until(lambda: one.done == ["pages"])
        wait_until(one.begun["slow"].is_set)


def test_caller_of_slow_documents_is_served_after_one_of_fast_documents() -> None:
    """None of the waiting documents is opened yet: the cost of the callers' previous ones
    decides.
    """
    with bench(1, is_slow=True) as one:

        def document(name: str, tenant: str, processor_seconds: float) -> HeldJob:
            held = one.held(name, tenant)
            held.pages = 1
            held.document_seconds.add(processor_seconds, 0.0)
            return held

        for number in range(4):
            one.preparation.add(
                [
                    document(f"slow {number}", "heavy", 10.0),
                    document(f"quick {number}", "light", 0.05),
                ]
            )
            wait_until(lambda: not one.preparation.waiting())
        first = one.large("first", "another")
        one.preparation.add([first])
        wait_until(one.begun["first"].is_set)
        one.done.clear()
        for number in range(4, 7):
            one.preparation.add(
                [
                    document(f"slow {number}", "heavy", 10.0),
                    document(f"quick {number}", "light", 0.05),
                ]
            )
        one.held_up["first"].set()
        wait_until(lambda: len(one.done) == 7)
        assert one.done == ["first", "quick 4", "quick 5", "quick 6", "slow 4", "slow 5", "slow 6"]


def test_slow_document_is_charged_after_its_caller_was_forgotten() -> None:
    """A caller without backlog is forgotten after REMEMBERED_SECONDS, including its advance
    charge.
    """
    with bench(1, is_slow=True) as one:
        turns = one.preparation._turns
        document = one.large("document", "heavy", slices=1)
        document.pages = 1
        document.document_seconds.add(10.0, 0.0)
        one.preparation.add([document])
        wait_until(one.begun["document"].is_set)
        one.now += 2 * REMEMBERED_SECONDS
        turns.forget(one.now)
        one.held_up["document"].set()
        wait_until(lambda: not one.preparation.waiting())
        assert (
            turns.tag(document.flow.caller)
            > turns.tag(one.held("light", "light").flow.caller) + 5.0
        )


def test_thread_declared_away_at_its_last_step_returns() -> None:
    with bench(1) as one:
        one.preparation.add([one.large("first", "heavy", slices=0)])
        wait_until(one.begun["first"].is_set)
        one.preparation.add([one.held("light", "light")])
        one.now += 2 * BLOCKED_SECONDS
        one.preparation.relieve()
        wait_until(lambda: one.done == ["light"])
        one.held_up["first"].set()
        wait_until(lambda: one.done == ["light", "first"])
        one.preparation.add([one.held("second", "heavy")])
        wait_until(lambda: one.done == ["light", "first", "second"])
        wait_until(lambda: one.preparation._idle == 1, what="every thread is idle again")


def test_number_of_blocked_callers_is_limited() -> None:
    with bench(1) as one:
        for number in range(MAX_AWAY + 3):
            one.preparation.add([one.large(f"large {number}", f"heavy {number}")])
        wait_until(one.begun["large 0"].is_set)
        for number in range(1, MAX_AWAY + 1):
            one.now += 2 * BLOCKED_SECONDS
            one.preparation.relieve()
            wait_until(one.begun[f"large {number}"].is_set)
        one.now += 2 * BLOCKED_SECONDS
        assert one.preparation.relieve()
        for event in one.held_up.values():
            event.set()
        wait_until(lambda: len(one.done) == MAX_AWAY + 3)
        wait_until(lambda: one.preparation._idle == 1, what="every thread is idle again")


def test_third_tenant_is_not_blocked_by_two_large_jobs_on_one_thread() -> None:
    with bench(1) as one:
        one.preparation.add([one.large("first", "a", slices=3000)])
        wait_until(one.begun["first"].is_set)
        one.preparation.add([one.large("second", "b", slices=3000)])
        one.held_up["first"].set()
        wait_until(one.begun["second"].is_set)
        one.preparation.add([one.held("small", "c")])
        one.held_up["second"].set()
        wait_until(lambda: len(one.done) == 3)
        assert one.done[0] == "small"


def test_least_served_caller_is_next() -> None:
    with bench(1) as one:
        one.preparation.add([one.large("first", "heavy")])
        wait_until(one.begun["first"].is_set)
        for number in range(3):
            one.preparation.add([one.held(f"heavy {number}", "heavy", LARGE)])
        for number in range(3):
            one.preparation.add([one.held(f"light {number}", "light")])
        one.held_up["first"].set()
        wait_until(lambda: len(one.done) == 7)
        assert one.done == [
            "light 0",
            "light 1",
            "light 2",
            "first",
            "heavy 0",
            "heavy 1",
            "heavy 2",
        ]


def test_small_batch_of_any_callers_is_prepared_together() -> None:
    calls: list[list[str]] = []

    def prepare(jobs: list[HeldJob], _: GiveWay) -> None:
        calls.append([held.job.job_id for held in jobs])

    with bench(1) as one, ThreadPoolExecutor(1) as threads:
        preparation = Preparation(
            Preparers(threads, 1), prepare, clock=lambda: 0.0, serves_others=lambda _: False
        )
        preparation.add([one.held("a", "first"), one.held("b", "second"), one.held("c", "first")])
        wait_until(lambda: not preparation.waiting())
        preparation.add(
            [one.held("a", "first", LARGE), one.held("b", "second"), one.held("c", "first")]
        )
        wait_until(lambda: not preparation.waiting())
    assert calls == [["a", "b", "c"], ["a", "c"], ["b"]]


def test_waiting_tokens_are_reported_by_tenant() -> None:
    with bench(1) as one:
        one.preparation.add([one.large("large", "heavy")])
        wait_until(one.begun["large"].is_set)
        one.preparation.add([one.held("small", "light")])
        waiting = one.preparation.waiting()
        assert waiting.keys() == {("org/fake", "")}
        assert {flow.tenant: tokens for flow, tokens in waiting["org/fake", ""].items()} == {
            "heavy": LARGE,
            "light": 100,
        }
        one.held_up["large"].set()
        wait_until(lambda: not one.preparation.waiting())


def test_shared_text_counts_for_each_item() -> None:
    """24 KB with an instruction of 16 KiB and 600 items are 10 MB: not a small job that others may
    wait for.
    """
    encode = encode_job("j", *["a"] * 600)
    encode.encode.instruction = "i" * 16_384
    assert read_bytes(encode, encode.ByteSize()) == encode.ByteSize() + 599 * 16_384
    pairs = worker_pb2.Job(
        score=inference_pb2.ScoreRequest(query=inference_pb2.Item(text="q" * 1000))
    )
    pairs.score.documents.extend([inference_pb2.Item(text="d")] * 5)
    assert read_bytes(pairs, pairs.ByteSize()) == pairs.ByteSize() + 4 * 1000
    task = inference_pb2.ClassifyTask(labels=["ab", "cd"], hypothesis="it is {}")
    classify = worker_pb2.Job(
        extract=inference_pb2.ExtractRequest(
            items=[inference_pb2.Item(text="t")] * 3, classify=task
        )
    )
    assert read_bytes(classify, 100) == 100 + 2 * (4 + 2 * 8)
    turns = [inference_pb2.Turn(role=inference_pb2.Turn.ROLE_USER, text="abcd")] * 2
    text = inference_pb2.TextTask(instruction="it", turns=turns)
    written = worker_pb2.Job(
        extract=inference_pb2.ExtractRequest(items=[inference_pb2.Item(text="t")] * 3, text=text)
    )
    assert read_bytes(written, 100) == 100 + 2 * (2 + 2 * 4)
    assert read_bytes(worker_pb2.Job(), 7) == 7


def test_pages_and_pixels_count_for_a_job() -> None:
    """A WebP of 34 bytes and 49 megapixels is not a small job that others may wait for."""
    job = encode_job("j", "a")
    assert estimate_input_sizes(job, 20, has_images=True) == InputSizes(20)
    size = struct.pack("<I", 6999 | 6999 << 14)
    webp = b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f" + size
    job.encode.items.add(image=inference_pb2.Image(data=webp))
    found = estimate_input_sizes(job, 100, has_images=True)
    assert found == InputSizes(100 + 49_000_000 // PIXELS_A_BYTE, kind="images")
    assert estimate_input_sizes(job, 100, has_images=False) == InputSizes(100)
    document = inference_pb2.Document(data=b"%PDF-1.7", first_page=2, last_page=4)
    for items in (job.encode.items, job.extract.items):
        del items[:]
        items.add(parts=[inference_pb2.Part(document=document), inference_pb2.Part(text="a")])
        items.add(parts=[inference_pb2.Part(document=inference_pb2.Document(file=0))])
        found = estimate_input_sizes(job, 100, has_images=True)
        assert (found.pages, found.kind, found.bytes) == (19, "documents", 100 + 19 * PAGE_BYTES)


def test_documents_in_chunks_count_by_their_text() -> None:
    """Their files are not tokenised, so an image of 20 MB in a document does not hold up pulls."""
    job = encode_job("j", "a")
    job.encode.chunking.SetInParent()
    assert estimate_input_sizes(job, 20, has_images=False) == InputSizes(20)
    data = b"%PDF-1.7" + bytes(1 << 20)
    document = inference_pb2.Document(data=data, first_page=2, last_page=4)
    job.encode.items.add(parts=[inference_pb2.Part(document=document)])
    job.encode.items.add(parts=[inference_pb2.Part(document=inference_pb2.Document(file=0))])
    job.encode.files.append(b"# Markdown")
    payload = 100 + len(data) + 10
    found = estimate_input_sizes(job, payload, has_images=False)
    assert found == InputSizes(100 + 3 * PDF_PAGE_BYTES + 10, 3 + 16, "documents")
    assert estimated_tokens(job, found.bytes, 512) == found.bytes // 4 + 1
    job.encode.items[-1].parts[0].document.file = 7
    assert estimate_input_sizes(job, payload, has_images=False).bytes == 100 + 3 * PDF_PAGE_BYTES


def test_preparing_thread_releases_the_interpreter_lock() -> None:
    """NumPy releases the lock for microseconds, so CPython never forces a release: the loop waited
    for the whole job.
    """
    with bench(1) as one:
        large = one.large("large", "heavy", slices=10)
        one.held_up["large"].set()
        one.preparation.add([large])
        wait_until(lambda: one.done == ["large"])
    assert one.rests == [preparing.GIL_RELEASE_SECONDS] * 10, "a slice takes 10 ms here"


@pytest.mark.parametrize("is_own", [False, True])
def test_thread_rests_while_the_device_computes_for_another_caller(is_own: bool) -> None:
    with bench(1) as one:
        large = one.large("large", "heavy", slices=10)
        one.computed_for = large.flow.caller if is_own else ("light", False)
        one.held_up["large"].set()
        one.preparation.add([large])
        wait_until(lambda: one.done == ["large"])
    rest = preparing.GIL_RELEASE_SECONDS if is_own else preparing.REST_SECONDS
    # A slice takes 10 ms here, and the first 50 ms are a small job's.
    assert one.rests == [preparing.GIL_RELEASE_SECONDS] * 4 + [rest] * 6


def test_estimated_tokens_are_at_most_the_models_maximum() -> None:
    """Otherwise a job with a long instruction would use up the pull budget."""
    job = encode_job("j", "a", "b")
    job.encode.instruction = "x" * 2_000_000
    assert estimated_tokens(job, job.ByteSize(), 512) <= 2 * 512 + 1
    assert estimated_tokens(encode_job("j", "a" * 400), 420, 512) == 420 // 4 + 1
    pairs = worker_pb2.Job(
        score=inference_pb2.ScoreRequest(documents=[inference_pb2.Item(text="a")] * 3)
    )
    assert estimated_tokens(pairs, 1 << 20, 512) == 4 * 512 + 1
    assert estimated_tokens(worker_pb2.Job(), 1 << 20, 512) == 1


# In a whole worker with a single preparing thread


@asynccontextmanager
async def busy(
    root: Path, *, seconds: float = 600.0
) -> AsyncIterator[tuple[FakeLanes, RunningWorker]]:
    """Run a worker that prepares an endless job with more tokens than a lane may have here."""
    lanes = FakeLanes()
    async with (
        routers(lanes) as running,
        worker(root, running, threads=2, grace_seconds=0.0) as bay,
    ):
        heavy = encode_job("heavy", CREEPING * 1000, seconds=seconds)
        heavy.tenant = "heavy"
        lanes.put(MODEL, heavy)
        await until(lambda: bool(bay.models) and bay.model.creeping == 1)
        yield lanes, bay


async def test_light_tenant_is_answered_while_a_heavy_ones_job_is_prepared(tmp_path: Path) -> None:
    async with busy(tmp_path) as (lanes, bay):
        await until(lambda: any(list(pull.except_tenants) == ["heavy"] for pull in lanes.pulls))
        light = encode_job("light", "a")
        light.tenant = "light"
        lanes.put(MODEL, light)
        await until(lambda: "light" in lanes.answers)
        assert vectors(lanes.answer_of("light")) == [vector("a")]
        assert bay.model.creeping == 1


async def test_preparation_of_a_cancelled_job_is_abandoned(tmp_path: Path) -> None:
    async with busy(tmp_path) as (lanes, bay):
        (batch,) = (batch for batch, jobs in lanes.leased.items() if "heavy" in jobs)
        cancelled = worker_pb2.CancelledJobs(batch_id=batch, job_ids=["heavy"])
        lanes.next_response = worker_pb2.HeartbeatResponse(cancelled=[cancelled])
        await until(lambda: not bay.model.creeping)
        assert not lanes.answers


async def test_preparation_of_an_expired_job_is_abandoned(tmp_path: Path) -> None:
    async with busy(tmp_path, seconds=120.0) as (lanes, bay):
        lanes.advance_clock(300.0)
        await until(lambda: "heavy" in lanes.answers)
        assert "deadline" in lanes.answer_of("heavy").failure.message
        assert not bay.model.creeping

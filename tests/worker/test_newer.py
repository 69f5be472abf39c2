"""Unknown content from a newer router is skipped or reported as an error, and stops nothing
else.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from shoal.v1 import worker_pb2

from libs.versions import WIRE_VERSION
from tests.worker.fakes import FakeLanes, encode_job, routers, until, vector, vectors
from tests.worker.running import MODEL, worker

UNKNOWN_FIELD = bytes([0xBA, 0x3E, 0x03]) + b"new"
"""Number 999, three bytes."""


async def test_unknown_order_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running, "org/a"):
        await until(lambda: bool(lanes.heartbeats))
        strange = worker_pb2.Directive.FromString(
            worker_pb2.Directive(seq=1).SerializeToString() + UNKNOWN_FIELD
        )
        known = worker_pb2.Directive(seq=2, load_model="org/a")
        with caplog.at_level(logging.WARNING):
            lanes.next_response = worker_pb2.HeartbeatResponse(
                directives=[strange, known], wire_version=WIRE_VERSION + 7
            )
            await until(lambda: lanes.heartbeats[-1].directive_seq == 2)
        (record,) = [one for one in caplog.records if "skipping an unknown order" in one.message]
        reported = vars(record)["shoal_fields"]
        assert reported == {
            "seq": 1,
            "wire_version": WIRE_VERSION,
            "router_wire_version": WIRE_VERSION + 7,
        }
        await until(lambda: "org/a" in lanes.states())


async def test_job_with_an_unknown_operation_fails_with_the_version(
    tmp_path: Path,
) -> None:
    lanes = FakeLanes()
    strange = encode_job("strange", "a")
    strange.ClearField("encode")
    async with routers(lanes) as running, worker(tmp_path, running):
        lanes.put_payload(MODEL, "strange", strange.SerializeToString() + UNKNOWN_FIELD)
        lanes.put(MODEL, encode_job("known", "abc"))
        await until(lambda: {"strange", "known"} <= lanes.answers.keys())
        failure = lanes.answer_of("strange").failure
        assert failure.reason == "TASK_NOT_SUPPORTED"
        assert f"wire version {WIRE_VERSION}" in failure.message
        assert vectors(lanes.answer_of("known")) == [vector("abc")]


async def test_workers_report_their_version(tmp_path: Path) -> None:
    lanes = FakeLanes()
    async with routers(lanes) as running, worker(tmp_path, running):
        await until(lambda: bool(lanes.heartbeats) and bool(lanes.pulls))
        assert (lanes.heartbeats[0].wire_version, lanes.pulls[0].wire_version) == (
            WIRE_VERSION,
            WIRE_VERSION,
        )

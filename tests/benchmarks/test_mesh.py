"""`make bench` computes shares of texts, rates of streams, ratios and targets."""

from __future__ import annotations

import os
import socket
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from benchmarks.common.processes import Vectors, cpu_seconds, listening_port
from benchmarks.common.report import (
    BATCHES,
    SORTED,
    STEADY,
    ClosedLoop,
    IdleQuery,
    Latency,
    MeasuredTarget,
    Name,
    RunReport,
    RunUsage,
    SpeedSeries,
    forward_shares,
    print_report,
    targets,
    to_json,
    usage,
)
from benchmarks.mesh.throughput import STEADY_CALLERS, seconds_once, singly, steadily, timed_singles
from benchmarks.peers.engine import balanced_shares
from benchmarks.peers.padding import padded

USED = RunUsage(
    {"client": 100.0, "router": 400.0, "redis": 90.0, "worker": 700.0, "forward": 1500.0},
    starved=0.01,
    turnaround=0.02,
)


def series(
    engine: str, dtype: str, seconds: float, shape: str = BATCHES, layout: str = "2 x 1"
) -> SpeedSeries:
    return SpeedSeries(Name(engine, dtype, layout, shape), [seconds, seconds])


def mesh(shape: str, seconds: float) -> SpeedSeries:
    return SpeedSeries(
        Name("mesh", "bfloat16", "2 x 1", shape),
        [seconds, seconds],
        beside=[1.0, 0.5],
        usage=[USED, USED],
    )


def by_text(found: list[MeasuredTarget], part: str) -> MeasuredTarget:
    (target,) = [one for one in found if part in one.text]
    return target


def test_processes_get_equal_tokens_and_no_text_twice() -> None:
    lengths = [4 + number % 90 for number in range(512)]
    shares = balanced_shares(range(512), lengths, 2)
    tokens = [sum(lengths[index] for batch in share for index in batch) for share in shares]
    assert max(tokens) < 1.05 * min(tokens)
    assert sorted(index for share in shares for batch in share for index in batch) == [*range(512)]
    assert {len(batch) for share in shares for batch in share} == {32}


def test_batches_follow_the_order_that_is_given() -> None:
    order = sorted(range(100), key=lambda index: -index)
    (share,) = balanced_shares(order, [1] * 100, 1)
    assert [*share[0]] == [*range(99, 67, -1)]
    assert len(share[-1]) == 4


def test_batch_is_padded_to_its_longest_text() -> None:
    ids, mask = padded([[7, 8], [9]])
    assert ids.tolist() == [[7, 8], [9, 0]]
    assert mask.tolist() == [[1, 1], [1, 0]]


def test_steady_stream_is_timed_between_its_answers() -> None:
    """Neither the wait for the first answer nor the end counts."""
    steady = [(10.0 + number, 100) for number in range(9)]
    end = [(18.0 + 5 * number, 100) for number in range(1, STEADY_CALLERS)]
    assert seconds_once(steady + end, 400) == pytest.approx(4.0)


async def test_closed_loops_send_every_text() -> None:
    sent: list[str] = []

    async def encode(texts: list[str]) -> Vectors:
        sent.extend(texts)
        return np.array([[float(text)] for text in texts], np.float32)

    texts = [str(number) for number in range(16)]
    assert (await singly(encode, texts, 4)).ravel().tolist() == [*map(float, range(16))]
    sent.clear()
    await timed_singles(encode, texts, 4, turns=8)
    assert sorted(sent) == sorted(texts * 2)
    assert await steadily(encode, texts * 32, 1.0) > 0


def test_mesh_is_compared_with_the_forward_of_the_same_run() -> None:
    assert forward_shares(mesh("1 x all", 1.0)) == (1.0, 0.5)


def test_usage_of_a_text() -> None:
    counted = {
        "shoal_device_cpu_seconds_total": 1.5,
        "shoal_device_busy_seconds_total": 1.6,
        "shoal_device_stalled_seconds_total/starved": 0.3,
        "shoal_device_stalled_seconds_total/turnaround": 0.1,
        "shoal_tenant_tokens_total": 50_000.0,
    }
    found = usage({"router": 0.4, "worker": 2.0}, counted, texts_a_token=1 / 50)
    assert found.micros == pytest.approx({"router": 400.0, "worker": 500.0, "forward": 1500.0})
    assert (found.starved, found.turnaround) == pytest.approx((0.15, 0.05))


def whole() -> list[SpeedSeries]:
    return [
        series("sentence-transformers", "float32", 7.0, layout="1 x 2"),
        series("sentence-transformers", "bfloat16", 2.7, layout="1 x 2"),
        *(
            series("OpenVINO", dtype, 1.3, SORTED, layout)
            for dtype in ("float32", "bfloat16")
            for layout in ("1 x 2", "2 x 1")
        ),
        *(
            series("forward alone", dtype, 1.0, layout=layout)
            for dtype in ("float32", "bfloat16")
            for layout in ("1 x 2", "2 x 1")
        ),
        *(mesh(shape, 1.0) for shape in ("1 x all", "64 at once", "256 at once", STEADY)),
        series("Infinity", "bfloat16", 4.5, "64 at once", "1 x 2"),
    ]


def idle() -> Latency:
    return Latency(
        "mesh",
        "bfloat16",
        [[IdleQuery(0.006, {"forward": 0.004})] * 99 + [IdleQuery(0.016, {"forward": 0.004})] * 2]
        * 2,
    )


def test_targets_show_which_are_met() -> None:
    found = targets(whole(), [idle()], {64: [2600.0]}, "1 x 2", "2 x 1")
    assert by_text(found, "sentence-transformers float32").met
    assert not by_text(found, "sentence-transformers bfloat16").met
    assert len([one for one in found if "OpenVINO bfloat16 sorted" in one.text and one.met]) == 2
    assert by_text(found, "mesh, 1 x all").value == pytest.approx(0.75)
    assert not by_text(found, "mesh, 1 x all").met
    assert by_text(found, "mesh, 256").met
    assert by_text(found, "Infinity").value == pytest.approx(4.5)
    assert by_text(found, "p50").value == pytest.approx(2.0)
    assert by_text(found, "p99").value == pytest.approx(12.0)
    assert by_text(found, "CPU of the router").met
    assert not by_text(found, "CPU of the worker").met
    assert by_text(found, "stalled devices, 1 x all").value == pytest.approx(3.0)
    assert by_text(found, "a router alone").met


def test_missing_measurement_has_no_target() -> None:
    found = targets(
        [one for one in whole() if one.name.engine in ("forward alone", "mesh")],
        [],
        {},
        "1 x 2",
        "2 x 1",
    )
    assert not [
        one
        for one in found
        if "OpenVINO" in one.text or "Infinity" in one.text or "idle" in one.text
    ]
    assert not [one for one in targets(whole(), [], {}, "1 x 2", "1 x 2") if "worker" in one.text]


def test_report_is_printed_and_written_as_json() -> None:
    turn = ClosedLoop(64, 3000, 3.0, {"router": 400.0, "redis": 100.0}, 9.0)
    assert (turn.rate, turn.per_core) == pytest.approx((1000.0, 2500.0))
    found = targets(whole(), [idle()], {64: [turn.per_core]}, "1 x 2", "2 x 1")
    report = RunReport({"cpu": "none"}, ["a note"], 512, 25_000, whole(), [idle()], [turn], found)
    console = Console(width=200, record=True, file=StringIO())
    print_report(report, console)
    shown = console.export_text()
    assert "0.75 (0.50-1.00)" in shown
    assert "a note" in shown
    reported = to_json(report)
    assert reported["router_alone"] == [
        {
            "callers": 64,
            "answers": 3000,
            "seconds": 3.0,
            "micros": {"router": 400.0, "redis": 100.0},
            "jobs_a_pull": 9.0,
        }
    ]


def test_process_is_read_from_proc() -> None:
    assert cpu_seconds(os.getpid()) > 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening_port(os.getpid()) <= server.getsockname()[1]

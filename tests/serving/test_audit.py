"""Log lines for calls that change the location of models, and for refused calls."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from shoal.v1 import models_pb2

from libs.serving import Identity, Security
from libs.serving.security.audit import Audit, AuditRecord
from tests.router.parts import until
from tests.serving.parts import (
    ADMIN,
    CLIENT,
    LIST,
    LOAD,
    Calls,
    connected,
    running_server,
    write_tokens,
)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens.yaml")


async def test_changes_and_refusals_are_logged_with_caller_and_method(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = models_pb2.LoadModelRequest(model="org/name")
    async with running_server(Calls(), Security(tokens=tokens)) as server:
        async with connected(server.address, token=ADMIN) as admin:
            admin.metadata.append(("x-request-id", "r-1"))
            await admin.call(LOAD, request)
            await admin.call(LIST)
            for odd in ("org/name@../../x", "\x1b[2J", "a" * 300):  # not validated yet
                await admin.call(LOAD, models_pb2.LoadModelRequest(model=odd))
        async with connected(server.address, token=CLIENT) as client:
            assert await client.code(LOAD, request) == grpc.StatusCode.PERMISSION_DENIED
        async with connected(server.address, token="wrong-token-0123456789") as stranger:
            assert await stranger.code(LIST) == grpc.StatusCode.UNAUTHENTICATED
        await until(lambda: caplog.text.count("refused") >= 2)
    assert not any(
        odd in str([vars(record) for record in caplog.records])
        for odd in ("../x", "\\x1b", "a" * 100)
    )
    lines = [record for record in caplog.records if record.name == "shoal.audit"]
    said = [record.shoal_fields for record in lines]  # type: ignore[attr-defined]
    peers = [fields.pop("peer") for fields in said]
    ids = [fields.pop("request_id") for fields in said]
    assert [record.message for record in lines] == ["change"] * 4 + ["refused"] * 2
    assert [fields["model"] for fields in said[1:4]] == [""] * 3
    assert [said[0], *said[4:]] == [
        {
            "subject": "ops",
            "role": "admin",
            "tenant": "acme",
            "method": LOAD,
            "model": "org/name",
            "outcome": "OK",
        },
        {
            "subject": "frontend",
            "role": "client",
            "tenant": "acme",
            "method": LOAD,
            "model": "",
            "outcome": "PERMISSION_DENIED",
        },
        {
            "subject": "",
            "role": "anonymous",
            "tenant": "",
            "method": LIST,
            "model": "",
            "outcome": "UNAUTHENTICATED",
        },
    ]
    assert all(peer.startswith("ipv4:127.0.0.1:") for peer in peers)
    assert ids[0] == "r-1"
    assert all(ids)
    text = caplog.text + str([vars(record) for record in caplog.records])
    assert not any(token in text for token in (ADMIN, CLIENT, "wrong-token"))


async def test_flood_of_unauthenticated_calls_is_counted_but_not_logged(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with (
        running_server(Calls(), Security(tokens=tokens)) as server,
        connected(server.address) as stranger,
    ):
        stranger.metadata.append(("x-request-id", "not an id"))
        codes = await asyncio.gather(*(stranger.code(LIST) for _ in range(300)))
        # On a slow machine the calls take several seconds, each of which has a line with its count.
        await until(lambda: sum(map(sum, audited(caplog))) == 300)
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}
    written, left_out = audited(caplog)
    assert written
    assert left_out
    assert [record for record in caplog.records if record.message == "call"] == []


def audited(caplog: pytest.LogCaptureFixture) -> tuple[list[int], list[int]]:
    """Return the calls in each line: one of a refused call, several of those left out."""
    lines = [record for record in caplog.records if record.name == "shoal.audit"]
    written = [1 for record in lines if record.message == "refused"]
    left_out = [record.shoal_fields["count"] for record in lines if record.message != "refused"]  # type: ignore[attr-defined]
    return written, left_out


def test_audit_log_is_rate_limited_with_exact_counts(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    due: list[tuple[float, Any]] = []
    audit = Audit(
        lambda seconds, call: due.append((now + seconds, call)), clock=lambda: now, most_a_second=3
    )
    record = AuditRecord(Identity("s", "client", "t"), "peer", LIST, "PERMISSION_DENIED")
    for _ in range(10):
        audit.refused(record)
    assert [record.message for record in caplog.records] == ["refused"] * 3
    now = 6.0
    audit.refused(record)
    assert len(caplog.records) == 4
    assert [at for at, _ in due] == [6.0]
    due.pop()[1]()
    assert caplog.records[-1].shoal_fields == {"count": 7}  # type: ignore[attr-defined]
    audit.refused(record)
    assert due == []

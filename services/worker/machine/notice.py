"""Preemption notices of spot machines, in time for a graceful shutdown.

Not on the request path. A thread polls a source every few seconds; the first notice counts.
`app.py` then notifies routers, loads no new models, keeps serving, and shuts down as on SIGTERM
early enough for held jobs to finish.

Sources: AWS, EC2 User Guide, "Spot Instance interruption notices" (IMDSv2, `spot/instance-action`,
two minutes ahead); Google Cloud, "Preemption process" (`instance/preempted`, 30 seconds ahead, with
an immediate ACPI G2). Any other machine, or a node's termination handler, can write a file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Final, Protocol
from urllib.error import HTTPError

from libs.telemetry.logs import fields
from services.worker.machine.threads import in_thread

log = logging.getLogger(__name__)

NOTICE_POLL_SECONDS: Final = 2.0
NOTICE_STOP_SECONDS: Final = 12.0
"""A worker with a notice starts to shut down this long before its machine stops, or its grace
period if that is less.
"""
LAST_SECONDS: Final = 5.0
"""The part of this reserved for returning unfinished jobs and for the last heartbeat."""

GOOGLE_SECONDS: Final = 30.0
"""Time from Google's notice until the machine is off."""

_TIMEOUT_SECONDS: Final = 2.0
_TOKEN_SECONDS: Final = 21600
_SECONDS: Final = re.compile(r"\d+(\.\d+)?")


def stops_at(gone_at: float, grace_seconds: float) -> float:
    """Return when to shut down, on the clock of `gone_at`, when the machine stops."""
    return gone_at - min(grace_seconds, NOTICE_STOP_SECONDS)


def grace_left(gone_at: float, now: float, grace_seconds: float) -> float:
    """Return how long held jobs may take once the worker shuts down."""
    return max(0.0, min(grace_seconds, gone_at - now - LAST_SECONDS))


class NoticeSource(Protocol):
    """A source of preemption notices."""

    def gone_at(self) -> float | None:
        """Return when the machine stops (Unix time), None without a notice. Blocking. Raises
        OSError or ValueError.
        """


def parse_source(spec: str) -> NoticeSource | None:
    """Return the source that SHOAL_SPOT sets: none, aws, gcp or file:/path."""
    match spec:
        case "none":
            return None
        case "aws":
            return AwsSource()
        case "gcp":
            return GoogleSource()
        case path:
            return FileSource(Path(path.removeprefix("file:")))


class AwsSource:
    """The instance metadata service, version 2. It requires a token, and returns 404 without a
    notice.
    """

    def __init__(self, base: str = "http://169.254.169.254") -> None:
        self._base = base
        self._token = ""

    def gone_at(self) -> float | None:
        try:
            answer = self._get()
        except HTTPError as error:
            if error.code == 404:
                return None
            if error.code != 401:
                raise
            self._token = ""  # it has expired
            answer = self._get()
        return unix_time(_parse_time(answer))

    def _get(self) -> str:
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            self._token = _fetch(f"{self._base}/latest/api/token", ttl, "PUT")
        return _fetch(
            f"{self._base}/latest/meta-data/spot/instance-action",
            {"X-aws-ec2-metadata-token": self._token},
        )


def _parse_time(answer: str) -> str:
    try:
        return str(json.loads(answer)["time"])
    except (TypeError, KeyError) as error:
        raise ValueError("the instance action of the metadata service has no time") from error


class GoogleSource:
    """The metadata server. It returns TRUE once the machine is preempted."""

    def __init__(
        self,
        base: str = "http://metadata.google.internal",
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._base = base
        self._clock = clock

    def gone_at(self) -> float | None:
        answer = _fetch(
            f"{self._base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}
        )
        return self._clock() + GOOGLE_SECONDS if answer.strip() == "TRUE" else None


class FileSource:
    """A file with the notice: seconds since it was written, or an ISO 8601 time, by default in
    UTC.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def gone_at(self) -> float | None:
        try:
            text, written = self._path.read_text().strip(), self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        return written + float(text) if _SECONDS.fullmatch(text) else unix_time(text)


def unix_time(text: str) -> float:
    """Parse an ISO 8601 time. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# Never through a proxy, which would query the metadata service of the proxy's machine.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _fetch(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310  # a fixed address
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_SECONDS) as response:
            return str(response.read(4096).decode())
    except HTTPError as error:
        error.close()
        raise


async def noticed(source: NoticeSource, interval_seconds: float = NOTICE_POLL_SECONDS) -> float:
    """Wait for the first notice. Return when the machine stops (Unix time). Failing sources are
    polled again.
    """
    was_silent = False
    while True:
        try:
            gone_at = await in_thread(source.gone_at)
        except (OSError, ValueError, HTTPException) as error:
            if not was_silent:
                reason = f"{type(error).__name__}: {error}"
                log.warning(
                    "reading preemption notices failed; polling again",
                    extra=fields({"error": reason}),
                )
            was_silent, gone_at = True, None
        else:
            was_silent = False
        if gone_at is not None:
            return gone_at
        await asyncio.sleep(interval_seconds)

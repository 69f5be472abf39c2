"""Runs one submitted job in its own process: `python -m services.edge.jobs.child`.

The edge writes lines of JSON to stdin: first the order, then requests to pause or cancel, and new
tokens. The process writes lines of JSON to stdout: its progress every second, and finally its
result. If the edge is killed, stdin ends, and the process ends without waiting for chunks in
flight.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

from shoal.bulk.engine import JobRun, create
from shoal.bulk.failures import Busy, JobError, without_credentials
from shoal.bulk.manifest import Manifest, load
from shoal.bulk.matching import find_input
from shoal.bulk.places import absolute, place
from shoal.bulk.progress import JobProgress
from shoal.bulk.spec import BulkLimits, recipe_from
from shoal.calls.retry import RetryPolicy
from shoal.client import AsyncClient
from shoal.errors import PermissionDenied, ShoalError, Unauthenticated
from shoal.transport.trust import Tls

from services.edge.jobs.roots import check_files, check_location

MAX_ORDER_BYTES: Final = 1 << 20
MAX_JOB_ERROR_CHARACTERS: Final = 2000
"""Longer errors are cut off, because the edge limits the length of a line."""
NICENESS: Final = 5
"""Lowers the priority of the process (Unix `nice`): the edge on the same machine also answers
interactive requests, which are more urgent.
"""
_JOB_REPORT_SECONDS: Final = 1.0
_reports: TextIO = sys.stdout
_ATTEMPTS: Final = 3
"""Attempts of one request by the client. Further attempts are made by the bulk engine, which sends
less after an overload.
"""


def main() -> None:
    global _reports  # noqa: PLW0603
    # Packages that print write to stderr instead.
    _reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.nice(NICENESS)
    with suppress(OSError):  # If memory is short, this process ends rather than the edge.
        Path("/proc/self/oom_score_adj").write_text("1000")
    asyncio.run(_main())


async def _main() -> None:
    reader = asyncio.StreamReader(limit=MAX_ORDER_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    order = json.loads(await reader.readline())
    most = order["process_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    _report(end=await _run(order, reader))


async def _run(order: dict[str, Any], reader: asyncio.StreamReader) -> dict[str, Any]:
    """Run a job, and return its result as the fields of the last line."""
    state, error, reason, token = "failed", "", "", [str(order["token"])]
    manifest = found = None
    try:
        client = AsyncClient(
            order["routers"],
            tenant=order["tenant"],
            token=(lambda: token[0]) if token[0] else "",
            # The edge has checked the connection to its routers.
            token_without_tls=True,
            tls=Tls(*order["tls"]) if order["tls"] else False,
            retry=RetryPolicy(attempts=_ATTEMPTS),
        )
        async with client:
            manifest = await asyncio.to_thread(_manifest, order)
            # The process may have been killed after the end of the job.
            if manifest.state != "completed" or order["retry"]:
                await _price(manifest, client)
                where = place(order["output"])
                job = JobRun(where, manifest, client, on_progress=_reporter())
                obeying = asyncio.create_task(_obey(reader, job, token))
                try:
                    manifest = await job.run(retry=order["retry"])
                finally:
                    obeying.cancel()
            state, error = manifest.state, manifest.error
    except Busy as failure:
        error, reason = str(failure), "BUSY"
    except ShoalError as failure:
        error, reason = failure.message, failure.reason
    except JobError as failure:
        error = str(failure)
    except ImportError as failure:
        error = f"the edge needs the package of the store, or pyarrow: {failure}"
    except MemoryError:
        traceback.print_exc()
        error = (
            f"the process of the job needs more memory than {order['process_bytes']:,} bytes: "
            "submit it again with fewer rows in a chunk"
        )
    except Exception as failure:
        traceback.print_exc()
        error = without_credentials(f"{type(failure).__name__}: {failure}")
    if manifest is not None:  # Otherwise the output may be one that the client must not name.
        with suppress(JobError):
            found = await asyncio.to_thread(lambda: load(place(order["output"])))
    error = error[:MAX_JOB_ERROR_CHARACTERS]
    return {"state": state, "error": error, "reason": reason, **_summary(found)}


def _manifest(order: dict[str, Any]) -> Manifest:
    """Return the manifest of the order's job. Raises JobError if its files are not below the roots,
    or if the input is too large.
    """
    roots, source, limits = order["roots"], order["input"], BulkLimits(**order["limits"])
    check_location(source, roots, "input")
    check_location(order["output"], roots, "output")
    # All files that the input matches: the job may later adopt another manifest that names them.
    check_files((file.uri for file in find_input(absolute(source)).files), roots)
    manifest = create(place(order["output"]), source, recipe_from(order["recipe"]), limits)
    size, most = manifest.input.size, order["input_bytes"]
    if size > most:
        raise JobError(
            f"the input has {size:,} bytes, and at most {most:,} are allowed: submit several jobs"
        )
    return manifest


async def _price(manifest: Manifest, client: AsyncClient) -> None:
    """Remove the prices per worker from the manifest if the tenant may not see the workers."""
    if not manifest.limits.prices:
        return
    try:
        await client.mesh()
    except (PermissionDenied, Unauthenticated):
        manifest.limits = replace(manifest.limits, prices={})
    except ShoalError:
        pass  # The mesh may be starting.


async def _obey(reader: asyncio.StreamReader, job: JobRun, token: list[str]) -> None:
    """Follow the requests of the edge until cancelled."""
    while line := await reader.readline():
        request = json.loads(line)
        token[0] = request.get("token", token[0])
        if request.get("request") == "pause":
            job.pause()
        elif request.get("request") == "cancel":
            job.cancel()
    job.pause()
    job.pause()  # Another edge runs the job soon, so chunks in flight are not waited for.


def _reporter() -> Any:
    """Return a function that reports progress from time to time."""
    reported_at = 0.0

    def report(progress: JobProgress) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= _JOB_REPORT_SECONDS:
            reported_at = time.monotonic()
            counts = {
                "rows": progress.rows,
                "failed_rows": progress.failed,
                "total_rows": progress.total,
                "tokens": progress.tokens,
                "bytes": progress.size,
            }
            _report(
                progress=progress.rates(),
                counts=counts,
                cost=dict(progress.cost),
                overdue_seconds=progress.overdue_seconds,
            )

    return report


def _report(**content: Any) -> None:
    with suppress(OSError):  # The edge was killed, which `_obey` notices.
        _reports.write(json.dumps(content) + "\n")
        _reports.flush()


def _summary(manifest: Manifest | None) -> dict[str, Any]:
    """Return the fields of a manifest that are also in the record of a job."""
    if manifest is None:
        return {}
    counts = {
        "rows": manifest.rows,
        "failed_rows": manifest.failed,
        "total_rows": manifest.total,
        "tokens": manifest.tokens,
        "parts": len(manifest.parts),
        "bytes": manifest.size,
    }
    return {
        "counts": counts,
        "cost": manifest.cost,
        "embedding_id": manifest.embedding_id,
        "revision": manifest.revision,
    }


if __name__ == "__main__":
    main()

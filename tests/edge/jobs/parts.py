"""Submitted jobs, as clients send them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet
from shoal.v1 import inference_pb2 as pb

from libs.errors import InvalidInput
from services.edge.batches.settings import BatchSettings
from services.edge.jobs.settings import JobSettings
from tests.bulk.jobs import write_parquet
from tests.edge.batches.parts import named
from tests.edge.parts import MODEL, Http, Reply, dense, vectors

EMBEDDING_ID = "0123456789abcdef.float32"
STOPPED = ("paused", "failed", "expired", "cancelled", "completed")


@dataclass(frozen=True)
class Files:
    """The folders of a test: one for inputs and outputs, and the storage of the edge."""

    root: Path
    storage: Path

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "batches": BatchSettings(url=str(self.storage)),
            "jobs": JobSettings(roots=(str(self.root),)),
        }

    def write(self, rows: int, name: str = "in.parquet") -> Path:
        return write_parquet(self.root / name, rows)

    def request(self, output: str = "out", **changes: Any) -> dict[str, Any]:
        """Return a job of small chunks."""
        recipe = {"verb": "encode", "model": MODEL, "keep": ["id"], "chunk_rows": 10}
        recipe |= changes.pop("recipe", {})
        source = str(self.root / "in.parquet")
        return {
            "recipe": recipe,
            "input": source,
            "output": output if "://" in output else str(self.root / output),
            **changes,
        }

    def ids(self, output: str = "out") -> list[str]:
        """Return the ids of all rows of an output, in the order of its parts."""
        parts = sorted((self.root / output).glob("part-*"))
        return [one for part in parts for one in parquet.read_table(part)["id"].to_pylist()]


def encode(request: pb.EncodeRequest) -> pb.EncodeResponse:
    """Refuse texts with the word "bad"."""
    for index, item in enumerate(request.items):
        if "bad" in item.text:
            field = f"items[{index}].text"
            raise InvalidInput(f"{field} is bad", field=field)
    return pb.EncodeResponse(
        dense=dense(vectors(len(request.items))),
        usage=pb.Usage(input_tokens=len(request.items)),
        embedding_id=EMBEDDING_ID,
    )


async def submit(http: Http, body: dict[str, Any], tenant: str = "", **headers: str) -> Any:
    """Submit a job and return it."""
    reply = await send(http, body, tenant, **headers)
    assert reply.status == 200, reply.body
    return reply.json


async def send(http: Http, body: dict[str, Any], tenant: str = "", **headers: str) -> Reply:
    return await http.post("/v1/jobs", body, **named(tenant), **headers)


async def act(http: Http, job: dict[str, Any], action: str, body: Any = b"", **headers: str) -> Any:
    """Ask for a change of a job and return it."""
    reply = await http.post(f"/v1/jobs/{job['id']}/{action}", body, **headers)
    assert reply.status == 200, reply.body
    return reply.json


async def wait_for(
    http: Http, job: dict[str, Any], statuses: Sequence[str] = STOPPED, **headers: str
) -> Any:
    """Return a job once it has one of these states."""
    end = time.monotonic() + 300.0
    while True:
        reply = await http.get(f"/v1/jobs/{job['id']}", **headers)
        assert reply.status == 200, reply.body
        if reply.json["status"] in statuses:
            return reply.json
        assert time.monotonic() < end, reply.json
        await asyncio.sleep(0.05)

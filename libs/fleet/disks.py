"""The lists of models on workers' disks, separate from their heartbeats.

A worker may have a thousand models on its disk, and every router and scheduler reads every changed
heartbeat. So workers send the list only when it has changed, and readers read it only when its tag
is new to them. The tag is a digest of the list: workers with the same disk, container image or
volume have the same tag, and only one of their lists is read. Redis keeps one list for each worker,
so that a faulty worker cannot fill the memory with many lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from itertools import islice
from typing import Final, cast

from redis.asyncio import Redis
from shoal.v1 import worker_pb2

from libs.fleet.scripts import DISKS
from libs.fleet.snapshot import WorkerModelRecord
from libs.queue.connection.client import translated

READ_LISTS: Final = 64
"""Number of lists that are read at a time: a list of 10,000 models has up to 5 MB."""

ModelsOnDisk = Mapping[str, WorkerModelRecord]
"""The models of a list by name."""


class Disks:
    """The lists that this process has read."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lists: dict[str, ModelsOnDisk] = {"": {}}

    def find(self, tag: str) -> ModelsOnDisk | None:
        """Return the list with this tag, or None if it was not read. The empty tag has an empty
        list.
        """
        return self._lists.get(tag)

    async def read(self, tags: Iterable[tuple[str, str]]) -> None:
        """Read the lists of unknown tags. A tag stays unknown if the worker's list in Redis is
        missing or has another tag by now. Raises NoCapacity while Redis is unavailable.

        Args:
            tags: Pairs of a tag and the id of a worker with that list.
        """
        unknown = {tag: worker_id for tag, worker_id in tags if tag not in self._lists}
        workers = iter(unknown.values())
        while part := [*islice(workers, READ_LISTS)]:
            with translated():
                found = cast(list[bytes | None], await self._redis.hmget(DISKS, part))
            for value in found:
                if value is not None:
                    tag, _, content = value.partition(b" ")
                    models = worker_pb2.HeartbeatRequest.FromString(content).on_disk
                    self._lists[tag.decode()] = models_on_disk(models)

    def keep(self, tags: Collection[str]) -> None:
        """Forget the lists of all other tags."""
        self._lists = {tag: models for tag, models in self._lists.items() if tag in tags or not tag}


def models_on_disk(models: Iterable[worker_pb2.WorkerModel]) -> ModelsOnDisk:
    """Return the records of a list's models, by name."""
    return {model.model: WorkerModelRecord.from_proto(model) for model in models}


def content_tag(content: bytes) -> str:
    """Return the tag of a list: the bytes of a HeartbeatRequest with `on_disk` alone."""
    return blake2b(content, digest_size=16).hexdigest()

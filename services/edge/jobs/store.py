"""A tenant's submitted jobs in the storage of batches. Everything here blocks and raises
StorageError.

    active/TENANT.JOB              a job that waits or runs, and its lease
    TENANT/records/JOB.json        a job, rewritten while it runs
    TENANT/records/JOB.NUMBER.json a job that stopped or was run again, written once
    TENANT/JOB/cancel.json         a request to cancel it
    TENANT/JOB/pause.json          a request to pause it

The last of the numbered records counts, and JOB.json only if it has the same number. So an edge
that was frozen while it wrote changes nothing once another edge has ended the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec
from shoal.bulk.failures import StorageError
from shoal.bulk.places import OutputPlace

from services.edge.batches.runner import CANCEL
from services.edge.batches.store import RECORDS, BatchStore
from services.edge.jobs.objects import FINAL, JOB_ID, JobRecord

PAUSE: Final = "pause.json"
MAX_CHANGES: Final = 1000
"""Maximum number of numbered records of a job, which are kept as long as the job."""
_JSON: Final = ".json"


class JobStore:
    """The jobs of one tenant.

    Attributes:
        key: The name of the tenant's folder.
    """

    def __init__(self, store: BatchStore, key: str) -> None:
        self._store, self.key = store, key

    def job(self, identity: str) -> JobRecord | None:
        """Return a job as it was last saved."""
        if not JOB_ID.fullmatch(identity):
            return None
        last = found = self._read(identity + _JSON)
        while found is not None:
            last, found = found, self._read(_changed_name(identity, found.changes + 1))
        return last

    def ids(self) -> list[str]:
        """Return the ids of all jobs, oldest first."""
        names = (name.removesuffix(_JSON) for name in self._records().names())
        return sorted(name for name in names if JOB_ID.fullmatch(name))

    def jobs(self, ids: Iterable[str]) -> Iterator[JobRecord]:
        """Yield those of these jobs that still exist."""
        return filter(None, map(self.job, ids))

    def bytes_of_others(self, job: JobRecord) -> int:
        """Return the size of the tenant's outputs but that of a job, which others may have written
        before it.
        """
        sizes: dict[str, int] = {}
        for record in filter(None, (self._read(one + _JSON) for one in self.ids())):
            output = record.output.rstrip("/")
            sizes[output] = max(sizes.get(output, 0), record.counts.bytes)
        sizes.pop(job.output.rstrip("/"), None)
        return sum(sizes.values())

    def active_ids(self) -> list[str]:
        """Return the ids of jobs that wait or run, and perhaps some that just stopped."""
        names = (name.partition(".") for name in self._store.active().names())
        return [one for key, _, one in names if key == self.key and JOB_ID.fullmatch(one)]

    def is_active(self, identity: str) -> bool:
        """Return whether edges find a job."""
        return self._store.active().read(self._marker(identity)) is not None

    def create(self, record: JobRecord) -> None:
        """Save a new job. Edges find it by its name in `active`, which is written first."""
        self.activate(record.id)
        self.save(record)

    def change(self, record: JobRecord) -> bool:
        """Save a job that has stopped or is run again, with the next number of changes. Return
        False, and change nothing, if another edge or request did so first.
        """
        content = msgspec.json.encode(record)
        name = _changed_name(record.id, record.changes)
        # A repeated write, after a lost response, finds itself.
        if not self._records().create(name, content) and self._records().read(name) != content:
            return False
        self.save(record)  # So that few numbers are tried to find it.
        return True

    def activate(self, identity: str) -> None:
        """Let edges find a job that runs again, after its record is saved: they remove the name of
        an ended one.
        """
        self._store.active().create(self._marker(identity), b"{}")

    def activate_lost(self) -> None:
        """Let edges find jobs that wait or run and have no name in `active`, because an edge died
        before it wrote the name, or was frozen before it removed that of an earlier end.
        """
        active = set(self.active_ids())  # Read first: a job ends before its name is removed.
        for record in self.jobs(one for one in self.ids() if one not in active):
            if not record.is_ended:
                self.activate(record.id)

    def deactivate(self, identity: str) -> None:
        self._store.active().delete(self._marker(identity))

    def save(self, record: JobRecord) -> None:
        """Save the progress of a job, which counts until its next change."""
        self._records().replace(record.id + _JSON, msgspec.json.encode(record))

    def requests(self, identity: str) -> OutputPlace:
        """Return the folder of requests to a job."""
        return self._store.folder(self.key, identity)

    def request(self, identity: str) -> str:
        """Return the request that counts: CANCEL, PAUSE or an empty text."""
        names = self.requests(identity).names()
        return next((name for name in (CANCEL, PAUSE) if name in names), "")

    def delete(self, identity: str) -> None:
        found = self.job(identity)
        self._store.remove_folder(self.key, identity)
        if found is not None:
            self.save(found)  # A frozen edge may have written progress, which counts no more.
            for number in range(found.changes):
                self._records().delete(_changed_name(identity, number + 1))
        self._records().delete(identity + _JSON)

    def forget(self, count: int) -> None:
        """Delete the oldest jobs that cannot be resumed, at most `count`. Their output stays."""
        final = (record for record in self.jobs(self.ids()) if record.status in FINAL)
        for record in islice(final, count):
            self.delete(record.id)

    def delete_expired(self, now: float, seconds: float) -> None:
        """Delete the records of jobs that stopped long ago. Their output stays."""
        for record in self.jobs(self.ids()):
            if record.is_ended and record.ended_at + seconds <= now:
                self.delete(record.id)

    def _read(self, name: str) -> JobRecord | None:
        content = self._records().read(name)
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=JobRecord)
        except msgspec.MsgspecError as error:
            raise StorageError(f"the record {name} is damaged: {error}") from error

    def _marker(self, identity: str) -> str:
        return f"{self.key}.{identity}"

    def _records(self) -> OutputPlace:
        return self._store.folder(self.key, RECORDS)


def _changed_name(identity: str, number: int) -> str:
    """Return the name of the record of a job's change."""
    return f"{identity}.{number:04}{_JSON}"

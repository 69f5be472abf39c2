"""Files and batches of tenants in a folder or an object store. Everything here blocks.

    active/TENANT.BATCH                   a batch that has not ended, and its lease
    TENANT/records/FILE.json              a file
    TENANT/records/BATCH.json             a batch, rewritten while it runs
    TENANT/records/BATCH.end.json         a batch that has ended, written once
    TENANT/FILE/00000000 …                the pieces of an uploaded file
    TENANT/BATCH/part-00000000 …          the parts of a batch
    TENANT/…/FILE.pieces.json             the list of a file's pieces

TENANT is a digest of the tenant's name, and all other names are ids that the edge made: names that
clients send are only content. A file exists once its record does, and an ended batch once its last
record does; both are written in one step.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final, TypeVar

import msgspec
from shoal.bulk.failures import StorageError
from shoal.bulk.places import Folder, OutputPlace, local_path, place

from services.edge.batches.objects import (
    BATCH_ID,
    BATCH_PREFIX,
    FILE_ID,
    FILE_PREFIX,
    BatchRecord,
    FilePiece,
    FileRecord,
    created_at,
)

FILE_PIECE_BYTES: Final = 4 << 20
"""The size of the pieces of an upload."""
MAX_CACHED_BYTES: Final = 64 << 20
"""The maximum size of all records in memory, as they are stored, with what their objects add."""
CACHED_RECORD_BYTES: Final = 512
"""The approximate memory of a small record in addition to its size."""
ORPHAN_SECONDS: Final = 86_400
"""The age at which data without a record is deleted."""
ACTIVE: Final = "active"
RECORDS: Final = "records"
_END: Final = ".end.json"
_JSON: Final = ".json"
_TENANT: Final = re.compile(r"t-[0-9a-f]{32}")
_PRIVATE: Final = 0o700
_PROBE: Final = "probe"

S = TypeVar("S", bound=msgspec.Struct)


def tenant_key(tenant: str) -> str:
    """Return the name of a tenant's folder."""
    return f"t-{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


class BatchStore:
    """The storage of an edge. All methods raise StorageError."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        # The state: records that never change and their sizes, by tenant and name, oldest first,
        # and the sum of these sizes. Several threads use them.
        self._lock = threading.Lock()
        self._cache: dict[tuple[str, str], tuple[msgspec.Struct, int]] = {}
        self._cached_bytes = 0

    def prepare(self) -> None:
        """Check that files can be written."""
        self.active().replace(_PROBE, b"")
        self.active().delete(_PROBE)

    def folder(self, *names: str) -> OutputPlace:
        """Return a folder, which need not exist."""
        url = "/".join((self._url, *names))
        path = local_path(url)
        return _Directory(path) if path is not None else place(url)

    def tenants(self) -> list[TenantStore]:
        """Return the tenants with data."""
        names = self.folder().names()
        return [TenantStore(self, name) for name in names if _TENANT.fullmatch(name)]

    def tenant(self, key: str) -> TenantStore:
        """Return the store of a tenant, by the name of its folder."""
        return TenantStore(self, key)

    def active(self) -> OutputPlace:
        """Return the folder of batches that have not ended."""
        return self.folder(ACTIVE)

    def remove_folder(self, *names: str) -> None:
        """Delete a folder and its files."""
        found = self.folder(*names)
        for name in found.names():
            found.delete(name)
        path = local_path(found.uri)
        if path is not None:
            with suppress(OSError):
                path.rmdir()

    def cached(self, tenant: str, name: str) -> msgspec.Struct | None:
        found = self._cache.get((tenant, name))
        return found[0] if found is not None else None

    def cache(self, tenant: str, name: str, record: msgspec.Struct, size: int) -> None:
        """Keep a record that never changes, of `size` bytes, and drop the oldest ones for it."""
        size += CACHED_RECORD_BYTES
        with self._lock:
            self._remove(tenant, name)
            self._cache[tenant, name] = record, size
            self._cached_bytes += size
            while self._cached_bytes > MAX_CACHED_BYTES:
                self._remove(*next(iter(self._cache)))

    def forget(self, tenant: str, name: str) -> None:
        with self._lock:
            self._remove(tenant, name)

    def _remove(self, tenant: str, name: str) -> None:
        removed = self._cache.pop((tenant, name), None)
        if removed is not None:
            self._cached_bytes -= removed[1]


class _Directory(Folder):
    """A directory that is created with its first file, for this user alone."""

    def create(self, name: str, data: bytes) -> bool:
        self._make()
        return super().create(name, data)

    def replace(self, name: str, data: bytes) -> None:
        self._make()
        super().replace(name, data)

    def _make(self) -> None:
        try:
            self.path.mkdir(_PRIVATE, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be created: {error.strerror}") from error


class TenantStore:
    """The files and batches of one tenant. All methods raise StorageError.

    Attributes:
        key: The name of the tenant's folder.
    """

    def __init__(self, store: BatchStore, key: str) -> None:
        self._store, self.key = store, key

    def file(self, identity: str, now: float) -> FileRecord | None:
        """Return a file; None if it does not exist or has expired."""
        if not FILE_ID.fullmatch(identity):
            return None
        found = self._read(identity + _JSON, FileRecord)
        return found if found is not None and found.expires_at > now else None

    def input_file(self, identity: str) -> FileRecord | None:
        """Return the input of a batch, which is kept beyond its expiry until the batch has ended;
        None if it does not exist.
        """
        return self._read(identity + _JSON, FileRecord) if FILE_ID.fullmatch(identity) else None

    def unfinished_ids(self) -> list[str]:
        """Return the ids of batches that have not ended, and perhaps some that just did."""
        names = (name.partition(".") for name in self._store.active().names())
        return [one for key, _, one in names if key == self.key and BATCH_ID.fullmatch(one)]

    def unfinished(self) -> Iterator[BatchRecord]:
        """Yield the batches that have not ended."""
        found = filter(None, map(self.batch, self.unfinished_ids()))
        return (batch for batch in found if not batch.is_ended)

    def inputs_in_use(self) -> dict[str, str]:
        """Return the batch that reads each input, for batches that have not ended."""
        return {batch.input_file_id: batch.id for batch in self.unfinished()}

    def file_ids(self) -> list[str]:
        """Return the ids of all files, oldest first."""
        return self._names(FILE_PREFIX)

    def files(self, ids: Iterable[str]) -> Iterator[FileRecord]:
        """Yield those of these files that still exist."""
        return (found for one in ids if (found := self._load(one + _JSON, FileRecord)))

    def all_files(self) -> Iterator[FileRecord]:
        """Yield all files, oldest first."""
        return self.files(self.file_ids())

    def batch(self, identity: str) -> BatchRecord | None:
        """Return a batch as it was last saved."""
        if not BATCH_ID.fullmatch(identity):
            return None
        return self._read(identity + _END, BatchRecord) or self._read(identity + _JSON, BatchRecord)

    def batch_ids(self) -> list[str]:
        """Return the ids of all batches, oldest first."""
        return self._names(BATCH_PREFIX)

    def batches(self, ids: Iterable[str]) -> Iterator[BatchRecord]:
        """Yield those of these batches that still exist."""
        return filter(None, map(self._listed_batch, ids))

    def all_batches(self) -> Iterator[BatchRecord]:
        """Yield all batches, oldest first."""
        return self.batches(self.batch_ids())

    def count(self) -> int:
        """Return the number of files and batches."""
        return len(self.file_ids()) + len(self.batch_ids())

    def forget_batches(self, count: int) -> None:
        """Delete the oldest ended batches without files, at most `count`."""
        ended = (
            batch for batch in self.all_batches() if batch.is_ended and not self._has_files(batch)
        )
        for batch in islice(ended, count):
            self._delete_batch(batch)

    def stored_bytes(self, without: str = "") -> int:
        """Return the size of all data of the tenant.

        Args:
            without: A batch that does not count.
        """
        uploads = sum(found.bytes for found in self.all_files() if not found.batch)
        folders = set(self._store.folder(self.key).names())
        results = sum(
            found.stored_bytes
            for found in self.all_batches()
            if found.id != without and (found.id in folders or not found.is_ended)
        )
        return uploads + results

    def data(self, folder: str) -> OutputPlace:
        """Return the folder of a file's or a batch's data."""
        return self._store.folder(self.key, folder)

    def create_file(self, record: FileRecord, pieces: Iterable[FilePiece]) -> None:
        """Commit a file. Its data must be stored; a file that exists is left as it is."""
        self.data(record.folder).create(
            f"{record.id}.pieces{_JSON}", msgspec.json.encode(list(pieces))
        )
        self._records().create(record.id + _JSON, msgspec.json.encode(record))

    def pieces(self, record: FileRecord) -> list[FilePiece]:
        """Return the pieces of a file's data. Raises StorageError if they are gone."""
        content = self.data(record.folder).read(f"{record.id}.pieces{_JSON}")
        if content is None:
            raise StorageError(f"the data of {record.id} is missing")
        return msgspec.json.decode(content, type=list[FilePiece])

    def delete_file(self, record: FileRecord) -> None:
        """Delete a file, and its data unless another file shares it."""
        self._records().delete(record.id + _JSON)
        self._store.forget(self.key, record.id + _JSON)
        if record.batch:
            batch = self.batch(record.batch)
            if batch is not None:
                others = {batch.output_id, batch.errors_id} - {record.id}
                if not batch.is_ended or any(
                    self._read(other + _JSON, FileRecord) for other in others
                ):
                    return
        self._store.remove_folder(self.key, record.folder)

    def create_batch(self, record: BatchRecord) -> None:
        """Commit a batch. Edges find it by its name in `active`, which is written first."""
        self._store.active().create(self.marker(record.id), b"{}")
        self._records().create(record.id + _JSON, msgspec.json.encode(record))

    def save_batch(self, record: BatchRecord) -> None:
        """Replace the record of a batch that has not ended."""
        self._records().replace(record.id + _JSON, msgspec.json.encode(record))

    def end_batch(self, record: BatchRecord) -> bool:
        """Commit the end of a batch. Return False, and change nothing, if it has ended before."""
        return self._records().create(record.id + _END, msgspec.json.encode(record))

    def deactivate(self, identity: str) -> None:
        """Remove the name by which edges find a batch."""
        self._store.active().delete(self.marker(identity))

    def marker(self, identity: str) -> str:
        """Return the name in `active` of a batch."""
        return f"{self.key}.{identity}"

    def delete_expired(self, now: float, batch_seconds: float) -> None:
        """Delete expired files that no batch needs, batches that ended long ago, and data that
        belongs to no file.

        An edge may have been frozen while it wrote the record of a batch. If it was new, edges find
        it from now on; otherwise the batch has ended and was deleted, and its record is deleted.
        """
        active = set(self.unfinished_ids())  # Read first: it ends before its name is removed.
        in_use = self.inputs_in_use()
        for record in self.all_files():
            if record.expires_at <= now and record.id not in in_use:
                self.delete_file(record)
        folders = set(self._store.folder(self.key).names())
        for batch in self.all_batches():
            if batch.is_ended and batch.created_at + batch_seconds <= now:
                self._delete_batch(batch)
            elif batch.is_ended and batch.id in folders and not self._has_files(batch):
                self._store.remove_folder(self.key, batch.id)
            elif batch.is_ended or batch.id in active:
                continue
            elif batch.status == "validating":
                self._store.active().create(self.marker(batch.id), b"{}")
            elif batch.created_at + ORPHAN_SECONDS <= now:
                self._delete_batch(batch)
        known = {*self.file_ids(), *self.batch_ids()}
        for name in self._store.folder(self.key).names():
            is_data = FILE_ID.fullmatch(name) or BATCH_ID.fullmatch(name)
            if is_data and name not in known and created_at(name) + ORPHAN_SECONDS <= now:
                self._store.remove_folder(self.key, name)

    def _delete_batch(self, batch: BatchRecord) -> None:
        if self._has_files(batch):
            return  # they are kept longer
        self._store.remove_folder(self.key, batch.id)
        for suffix in (_JSON, _END):
            self._records().delete(batch.id + suffix)
            self._store.forget(self.key, batch.id + suffix)

    def _has_files(self, batch: BatchRecord) -> bool:
        files = (batch.output_id, batch.errors_id)
        return any(self._read(identity + _JSON, FileRecord) for identity in files)

    def _records(self) -> OutputPlace:
        return self._store.folder(self.key, RECORDS)

    def _names(self, prefix: str) -> list[str]:
        """Return the ids of all records with a prefix, oldest first."""
        names = self._records().names()
        found = {name.partition(".")[0] for name in names if name.endswith(_JSON)}
        return sorted(name for name in found if name.startswith(prefix))

    def _listed_batch(self, identity: str) -> BatchRecord | None:
        return self._load(identity + _END, BatchRecord) or self._read(identity + _JSON, BatchRecord)

    def _load(self, name: str, kind: type[S]) -> S | None:
        """Return a record that never changes, of which the name was just listed."""
        cached = self._store.cached(self.key, name)
        if isinstance(cached, kind):
            return cached
        content = self._records().read(name)
        if content is None:
            return None
        found = self._decode(name, kind, content)
        self._store.cache(self.key, name, found, len(content))
        return found

    def _read(self, name: str, kind: type[S]) -> S | None:
        content = self._records().read(name)
        return None if content is None else self._decode(name, kind, content)

    def _decode(self, name: str, kind: type[S], content: bytes) -> S:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise StorageError(f"{self.key}/{RECORDS}/{name} is damaged: {error}") from error


class FileContent:
    """Reads ranges of a file, in several threads at a time. It keeps the last piece, because ranges
    are read in order.
    """

    def __init__(self, store: TenantStore, record: FileRecord) -> None:
        self._place = store.data(record.folder)
        self._pieces = store.pieces(record)
        self._last: tuple[str, bytes] = ("", b"")

    @property
    def max_object_bytes(self) -> int:
        """The size of the largest object that is read as a whole."""
        return max((piece.object_bytes for piece in self._pieces), default=0)

    def read(self, offset: int, size: int) -> bytes:
        """Return a range of the file."""
        found, start = [], 0
        for piece in self._pieces:
            first = max(offset - start, 0)
            last = min(offset + size - start, piece.bytes)
            if first < last:
                found.append(self._piece(piece)[first:last])
            start += piece.bytes
        return b"".join(found)

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole file."""
        return map(self._piece, self._pieces)

    def lines(self, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the content of each line. A line of more than `max_bytes` is cut to
        one more than that.
        """
        kept, start, position = bytearray(), 0, 0
        for data in self.pieces():
            begin = 0
            while begin < len(data):
                found = data.find(b"\n", begin)
                end = found if found >= 0 else len(data)
                kept += data[begin : min(end, begin + max_bytes + 1 - len(kept))]
                begin = end + 1
                if found >= 0:
                    yield start, bytes(kept)
                    start = position + begin
                    kept.clear()
            position += len(data)
        if kept:
            yield start, bytes(kept)

    def _piece(self, piece: FilePiece) -> bytes:
        name, data = self._last  # read once: another thread may replace it at any time
        if name != piece.name:
            found = self._place.read(piece.name)
            if found is None:
                raise StorageError(f"the data of a file is missing: {piece.name}")
            data = found
            self._last = piece.name, data
        return data[piece.offset : piece.offset + piece.bytes]

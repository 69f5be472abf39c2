"""The parts that handlers and runners of batches share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import msgspec
from shoal.bulk.failures import StorageError
from shoal.errors import ShoalError
from shoal.transport.channels import ANY_ANSWER
from shoal.transport.wire import Metadata

from libs.serving.calls.call import REQUEST_ID_HEADER, TENANT_HEADER, new_request_id
from libs.telemetry.logs import fields
from services.edge.batches.leases import BATCH_RENEW_SECONDS, BatchLease
from services.edge.batches.objects import make_id
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import BatchStore, TenantStore, tenant_key
from services.edge.credentials import AUTHORIZATION
from services.edge.intake.served import ServedRequest
from services.edge.messages.base import Answer, HttpError

log = logging.getLogger(__name__)

THREADS: Final = 4
"""Threads that wait for the storage, in addition to those that decode requests."""
VALIDATION_THREADS: Final = 2
"""Threads that check inputs, which takes seconds for a large one."""
LEASE_THREADS: Final = 4
"""Threads that renew leases, whatever else waits for the storage."""
QUOTA_SECONDS: Final = 10.0
"""Time for which the measured size of a tenant's files is reused while its batch writes results.
Without this cache, each written chunk would read all records of the tenant.
"""
MAX_RECORDS: Final = 10_000
"""The maximum number of files and batches of a tenant."""
MAX_CREDENTIALS_BYTES: Final = 16 << 20
"""The maximum size in memory of the credentials of all tenants, with the metadata sent with
them.
"""
CREDENTIAL_BYTES: Final = 512
"""The assumed size in memory of a tenant's entry without its metadata."""

Identify = Callable[[Metadata], Awaitable[str]]
"""Asks a router for the tenant of a call with this metadata. Raises ShoalError if it is refused."""
Work = Callable[[], Coroutine[Any, Any, None]]
P = ParamSpec("P")
T = TypeVar("T")


class QuotaExceeded(Exception):
    """The files of a tenant have reached their limit."""


@dataclass(frozen=True, slots=True)
class BatchCaller:
    """The caller of a request, whom a router has just identified.

    Attributes:
        store: The files and batches of the tenant.
        tenant: The tenant that the caller named; empty if it named none.
        needs_token: Routers accept this caller only with a token.
        identified: The tenant that the router found for the credential.
    """

    store: TenantStore
    tenant: str
    needs_token: bool
    identified: str


class Credentials:
    """The newest credential of each tenant, by the tenant's key. Credentials are only in memory.

    The oldest are forgotten when all together exceed MAX_CREDENTIALS_BYTES.
    """

    def __init__(self) -> None:
        self._newest: dict[str, Metadata] = {}
        self._bytes = 0

    def newest(self, key: str) -> Metadata | None:
        return self._newest.get(key)

    def keep(self, key: str, metadata: Metadata) -> None:
        self.forget(key)
        self._newest[key] = metadata
        self._bytes += _entry_bytes(metadata)
        while self._bytes > MAX_CREDENTIALS_BYTES:
            self.forget(next(iter(self._newest)))

    def forget(self, key: str) -> None:
        metadata = self._newest.pop(key, None)
        if metadata is not None:
            self._bytes -= _entry_bytes(metadata)


def _entry_bytes(metadata: Metadata) -> int:
    """Return the bytes of a tenant's entry."""
    return CREDENTIAL_BYTES + sum(len(name) + len(value) for name, value in metadata)


class Context:
    """The storage with its threads, quotas, and the tokens of callers.

    Args:
        settings: The storage, the quotas and the limits of batches.
        identify: Returns the tenant of a call.
        vouches: Whether routers would accept calls without a token because of the edge's
            certificate.
    """

    def __init__(self, settings: BatchSettings, identify: Identify, *, vouches: bool) -> None:
        self.settings = settings
        self.store = BatchStore(settings.location)
        self._identify = identify
        self._vouches = vouches
        self._threads = ThreadPoolExecutor(THREADS, "batches")
        self._validation = ThreadPoolExecutor(VALIDATION_THREADS, "batches-validation")
        self._leases = ThreadPoolExecutor(LEASE_THREADS, "batches-leases")
        # The state: by batch, the size of its tenant's other files and the time of the measurement;
        # by the tenant's key, the bytes that are written but not in a record yet, and the newest
        # credential, which is never stored.
        self._sizes: dict[str, tuple[int, float]] = {}
        self._pending: Counter[str] = Counter()
        self._credentials = Credentials()
        # Locks of tenants for which batches are being created.
        self._creations: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        for threads in (self._threads, self._validation, self._leases):
            threads.shutdown(wait=False, cancel_futures=True)

    async def io(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that uses the storage, in a thread. Raises StorageError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(act, *args, **kwargs))

    async def validate(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that checks an input, which may take seconds, in a thread reserved for
        that. Raises StorageError.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._validation, partial(act, *args, **kwargs))

    async def renew(self, lease: BatchLease) -> None:
        """Renew a lease in a thread reserved for that. Raises LeaseLost, StorageError."""
        await asyncio.get_running_loop().run_in_executor(self._leases, lease.renew)

    async def run_leased(
        self, lease: BatchLease, work: Work, watch: Work, is_ended: Callable[[], bool]
    ) -> None:
        """Run `work` to its end while the lease is renewed. Raises LeaseLost, and the errors of
        `work` and `watch`.

        Args:
            watch: Runs concurrently, and is cancelled when `work` ends.
            is_ended: Returns whether the end of the batch is recorded: a missing lease was then
                deleted, not lost.
        """
        working = asyncio.create_task(work())
        others = [asyncio.create_task(self._renew_forever(lease)), asyncio.create_task(watch())]
        try:
            await asyncio.wait((working, *others), return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                if task.done() and not is_ended():
                    await task
            await working
        finally:
            for task in (working, *others):
                task.cancel()
            await asyncio.gather(working, *others, return_exceptions=True)

    async def _renew_forever(self, lease: BatchLease) -> None:
        while True:
            await asyncio.sleep(BATCH_RENEW_SECONDS)
            await self.renew(lease)

    async def caller(self, request: ServedRequest) -> BatchCaller:
        """Identify the caller of a request by asking a router. Raises HttpError."""
        await request.payer.identify()
        try:
            tenant = await self._identify(_with_new_id(request.metadata))
        except ShoalError as error:
            raise HttpError(
                error.reason, error.message, field=error.field, retry_after=error.retry_after
            ) from None
        key = tenant_key(tenant)
        kept = tuple(pair for pair in request.metadata if pair[0] != REQUEST_ID_HEADER)
        needs_token = any(name == AUTHORIZATION for name, _ in kept)
        if needs_token:
            self._credentials.keep(key, kept)
        named = next((str(value) for name, value in kept if name == TENANT_HEADER), "")
        return BatchCaller(self.store.tenant(key), named, needs_token, tenant)

    async def credential(self, key: str, tenant: str, *, needs_token: bool) -> Metadata | None:
        """Return the metadata with which requests of a batch are sent, or None if the tenant must
        send a token first.

        1. A batch of a caller without a token needs none.
        2. Otherwise the newest token of the tenant that this edge has received is used.
        3. If a router accepts the tenant without a token, as an open mesh does, none is needed. The
           edge's certificate does not replace the token of a caller.
        """
        named: Metadata = (*ANY_ANSWER, *(((TENANT_HEADER, tenant),) if tenant else ()))
        if not needs_token:
            return named
        if (newest := self._credentials.newest(key)) is not None:
            return newest
        if self._vouches:
            return None
        try:
            found = await self._identify(_with_new_id(named))
        except ShoalError:
            return None
        return named if tenant_key(found) == key else None

    def forget_credential(self, key: str, refused: Metadata) -> None:
        """Forget a token that a router has refused, unless a newer one has arrived."""
        if self._credentials.newest(key) == refused:
            self._credentials.forget(key)

    async def check_quota(self, store: TenantStore, more: int = 0, without: str = "") -> None:
        """Check that a tenant may store `more` bytes. Raises QuotaExceeded, StorageError.

        Args:
            without: The id of a running batch; `more` includes its results so far. The size of the
                tenant's other files may then be up to QUOTA_SECONDS old, unless the quota seems
                exceeded.
        """
        now = time.monotonic()
        if without and without in self._sizes:
            size, read_at = self._sizes[without]
            if now - read_at < QUOTA_SECONDS and self._fits(store.key, size + more):
                return
        size = await self.io(store.stored_bytes, without)
        if without:
            self._sizes = {
                batch: recent
                for batch, recent in self._sizes.items()
                if now - recent[1] < QUOTA_SECONDS
            }
            self._sizes[without] = size, now
        if not self._fits(store.key, size + more):
            raise QuotaExceeded(
                f"the files of this tenant would have more than {self.settings.tenant_bytes:,} "
                "bytes: delete files"
            )

    def _fits(self, key: str, size: int) -> bool:
        return size + self._pending[key] <= self.settings.tenant_bytes

    async def check_records(self, store: TenantStore) -> None:
        """Check that a tenant may have another file or batch. At the limit, its oldest ended
        batches without files are deleted, because no request deletes a batch. Raises HttpError.
        """
        if await self.io(store.count) < MAX_RECORDS:
            return
        await self.io(store.forget_batches, max(1, MAX_RECORDS // 100))
        if await self.io(store.count) >= MAX_RECORDS:
            raise HttpError(
                "STORAGE_QUOTA_EXCEEDED",
                f"this tenant has {MAX_RECORDS:,} files and batches: delete files",
            )

    def creating_batch(self, key: str) -> asyncio.Lock:
        """Return the lock to hold from the check of a tenant's batch quotas until the batch is
        stored. It does not exclude other edges: they may exceed a quota by one batch each.
        """
        return self._creations.setdefault(key, asyncio.Lock())

    async def check_batch_quotas(self, store: TenantStore, requests: int) -> None:
        """Check that a tenant may start a batch of `requests` requests.

        Raises StorageError, and HttpError without a time to retry, because batches may take hours.
        """
        settings = self.settings
        unfinished = len(await self.io(store.unfinished_ids))
        if unfinished >= settings.tenant_batches:
            raise HttpError(
                "BATCH_QUOTA_EXCEEDED",
                f"{unfinished:,} batches of this tenant have not ended, and at most "
                f"{settings.tenant_batches:,} may be in progress: wait, or cancel some",
            )
        if unfinished * settings.lines + requests <= settings.tenant_requests:
            return  # however many requests these batches have, so that no record is read
        waiting = await self.io(lambda: sum(one.waiting for one in store.unfinished()))
        if waiting + requests > settings.tenant_requests:
            raise HttpError(
                "REQUEST_QUOTA_EXCEEDED",
                f"{waiting:,} requests of this tenant's batches wait for a result, and with the "
                f"{requests:,} of this one they would be more than "
                f"{settings.tenant_requests:,}: wait, or cancel some batches",
            )

    def add_pending(self, key: str, size: int) -> None:
        """Add to the bytes that are written but not in a record yet; a negative size subtracts."""
        self._pending[key] += size
        if not self._pending[key]:
            del self._pending[key]


def _with_new_id(metadata: Metadata) -> Metadata:
    """Return the metadata with a new request id, for a call that only identifies the caller."""
    kept = (pair for pair in metadata if pair[0] != REQUEST_ID_HEADER)
    return (*kept, (REQUEST_ID_HEADER, new_request_id()))


async def read_body(request: ServedRequest, limit: int) -> bytes:
    """Return the body of a request. Raises HttpError if it has more than `limit` bytes or if the
    edge lacks memory for it.
    """
    body = await request.intake.body(
        request.receive,
        request.headers,
        request.payer,
        is_whole=request.is_whole,
        limit=limit,
    )
    if body:
        await request.intake.admit(body, request.payer, is_msgpack=False)
    return body


@contextmanager
def storage_errors() -> Iterator[None]:
    """Convert errors of the storage and of quotas within the context to HttpError."""
    try:
        yield
    except StorageError as error:
        log.warning("storage failed", extra=fields({"error": str(error)}))
        raise HttpError(
            "INTERNAL", "the storage of files failed: try again later", status=503
        ) from None
    except QuotaExceeded as error:
        raise HttpError("STORAGE_QUOTA_EXCEEDED", str(error)) from None


def new_id(prefix: str) -> tuple[str, int]:
    """Return a new id and its Unix time. Ids sort in the order in which an edge makes them, because
    lists of objects are sorted by id.
    """
    now, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    return make_id(prefix, now, f"{microseconds:05x}{secrets.token_hex(14)[1:]}"), now


def json_answer(content: Any) -> Answer:
    """Return an object as JSON."""
    return Answer(msgspec.json.encode(content))


def list_page(objects: list[Any], *, has_more: bool) -> Answer:
    """Return a page of a list."""
    ids = [one["id"] for one in objects]
    return json_answer(
        {
            "object": "list",
            "data": objects,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": has_more,
        }
    )


def missing(kind: str, identity: str) -> HttpError:
    """Return the error for an object that does not exist, or is another tenant's."""
    return HttpError("NO_SUCH_OBJECT", f"No such {kind} object: {identity[:100]}", field="id")

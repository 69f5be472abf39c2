"""Supervises one model load: fetch, reserve memory, read from disk or resume from host memory,
measure, and register with `space.py`.

Not on the request path; called by `residency.py`. Each load has its own thread for reading files
and building the model, so that other models are served during a load. A thread that exceeds the
time limit is abandoned, and its memory stays reserved until it ends. A load that runs out of memory
is repeated after memory is freed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Protocol, TypeVar, runtime_checkable

from libs.errors import ModelBroken, ModelNotFound, NoCapacity
from libs.models import Model
from libs.models.embedding_recipe import EmbeddingIdentity, identity_maker
from libs.store import Copy, DownloadProgress
from libs.store.digests import FilesChanged, FilesDigest
from libs.telemetry.logs import fields
from services.worker.machine.device import Device
from services.worker.machine.shortage import is_out_of_memory
from services.worker.machine.tasks import Tasks
from services.worker.machine.threads import begin, begin_without_loop, in_thread
from services.worker.memory.budget import LedgerClaim, ModelSize
from services.worker.memory.files import ModelFiles
from services.worker.memory.host import Warm
from services.worker.memory.resident import Resident
from services.worker.memory.space import MemoryRequest, Space

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

RELIEFS_FOR_A_LOAD: Final = 2
"""Maximum times that `Space.relieve` frees memory for a load that ran out of it: all CUDA graphs,
then the first idle model.
"""

UNMEASURED_ACTIVATION_BYTES_PER_TOKEN: Final = 32 << 10
"""Activations reserved for a model with a failed probe: about the need of a BERT-large in
bfloat16.
"""


@dataclass(slots=True, eq=False)
class Loading:
    """A model that is being loaded onto the device. `requested_at` is in seconds of the worker's
    monotonic clock.
    """

    model: str
    requested_at: float
    bytes: int = 0
    """Device memory reserved for the model; 0 before it is reserved."""
    is_fetched: bool = True
    """False while the store fetches the model."""
    progress: DownloadProgress | None = None
    """Progress of the download."""
    is_from_host: bool = False
    """The model is warm, and is only copied back to the device."""


@runtime_checkable
class TakesImages(Protocol):
    """A model that may process images."""

    def image_bytes(self, tokens: int) -> int:
        """Return the activation bytes of a batch of `tokens` image tokens, or of the largest image
        alone. Blocking.
        """


@dataclass(frozen=True, slots=True)
class Measured:
    """Sizes measured at a load, for planning later loads. `stored_bytes` is from its files'
    headers.
    """

    stored_bytes: int
    bytes: int
    activation_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class _Hashing:
    """The digest of files that were listed before they are loaded. Another thread computes it."""

    digest: Future[FilesDigest]
    stop: threading.Event


@dataclass(slots=True)
class _FromFiles:
    """A model that was read, and what its identity is made of; `hashing` is None without one."""

    model: Model
    hashing: _Hashing | None
    make_identity: Callable[[str], EmbeddingIdentity]


class Loader:
    """Loads models into `space`.

    Args:
        load_seconds: Time limit of a load, without the download and the wait for memory. The wait
            for the digest of the files has the same limit, after which the model has no identity.
        clock: Monotonic seconds.
        changed: Called when a download begins or ends.
    """

    def __init__(
        self,
        files: ModelFiles,
        device: Device,
        space: Space,
        tasks: Tasks,
        *,
        load_seconds: float,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._files = files
        self._device = device
        self._space = space
        self._tasks = tasks
        self._load_seconds = load_seconds
        self._clock = clock
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self.measured: dict[str, Measured] = {}

    async def load(self, loading: Loading) -> Resident:
        """Make a model resident. Raises ShoalError.

        Any exception releases the reserved memory, after a hanging load when its thread ends.
        """
        if loading.model in self._space.unloading:
            await asyncio.wait([self._space.unloading[loading.model]])
        warm = self._space.host.models.get(loading.model)
        loading.is_from_host = warm is not None
        return await (self._from_disk(loading) if warm is None else self._from_host(loading, warm))

    # From disk

    async def _from_disk(self, loading: Loading) -> Resident:
        with ExitStack() as held:
            copy = await self._on_disk(loading)
            held.callback(copy.close)
            stored = await in_thread(
                partial(self._files.device_bytes, loading.model, copy.directory, copy.base)
            )
            while True:
                size = self._size(loading.model, stored)
                claim = await self._space.reserve(
                    MemoryRequest(loading.model, size, loading.requested_at)
                )
                held.callback(self._space.release, claim)
                loading.bytes = size.bytes
                started = self._clock()
                found = await self._with_memory(
                    loading.model, partial(self._read, copy, loading.model, stored), claim, held
                )
                seconds = self._clock() - started
                model, hashing, make_identity = found.model, found.hashing, found.make_identity
                del found
                try:
                    identity = await self._identify(loading.model, hashing, make_identity)
                except NoCapacity:
                    del model
                    await in_thread(self._device.trim)
                    raise
                grown = MemoryRequest(
                    loading.model, self._size(loading.model, stored), loading.requested_at
                )
                if await self._space.grow(claim, grown):
                    break
                # The model is larger than estimated and does not fit: free its memory before
                # waiting.
                del model
                await in_thread(self._device.trim)
                loading.bytes = 0
                held.pop_all()
                self._space.release(claim)
                held.callback(copy.close)
            rate = self.measured[loading.model].activation_bytes_per_token
            resident = await self._space.admit(
                model, claim, copy, load_seconds=seconds, activation=rate
            )
            resident.identity = identity
            held.pop_all()
            return resident

    async def _identify(
        self,
        name: str,
        hashing: _Hashing | None,
        make_identity: Callable[[str], EmbeddingIdentity],
    ) -> EmbeddingIdentity | None:
        """Return the identity of a model's vectors once its files are hashed; None, and a line in
        the log, if they cannot be hashed or not in time.

        Raises NoCapacity if they changed during the load.
        """
        if hashing is None:
            return None
        try:
            async with asyncio.timeout(self._load_seconds):
                digest = await asyncio.wrap_future(hashing.digest)
            await in_thread(digest.check_current)
            return make_identity(digest.hex)
        except FilesChanged as error:
            raise NoCapacity(
                f"the files of {name} changed while it was loaded; try again"
            ) from error
        except Exception as error:  # a model without an id is better than none
            _log_missing_identity(name, error)
            return None

    def _size(self, model: str, stored_bytes: int) -> ModelSize:
        """Return the measured size, or the stored one if the model was never measured or has
        changed.
        """
        known = self.measured.get(model)
        if known is None or known.stored_bytes != stored_bytes:
            return ModelSize(stored_bytes)
        return ModelSize(
            known.bytes, int(known.activation_bytes_per_token * self._device.batch_tokens)
        )

    def _read(self, copy: Copy, name: str, stored_bytes: int) -> _FromFiles:
        """Read the model and measure it, while another thread hashes its files. Runs on a separate
        thread.
        """
        hashing = self._begin_hashing(copy, name)
        try:
            model = self._device.load(copy.directory, name, copy.base)
            self._measure(model, name, stored_bytes)
        except BaseException:
            if hashing is not None:
                hashing.stop.set()
            raise
        return _FromFiles(model, hashing, identity_maker(model, model.card))

    def _begin_hashing(self, copy: Copy, name: str) -> _Hashing | None:
        """List the files of a model and begin to hash them; None if it has no vectors or they
        cannot be listed.
        """
        if not self._files.can_encode(copy, name):
            return None
        try:
            listed = self._files.list_files(copy)
        except Exception as error:
            _log_missing_identity(name, error)
            return None
        stop = threading.Event()
        digest = begin_without_loop(partial(self._files.hash_files, listed, stop))
        return _Hashing(digest, stop)

    def _measure(self, model: Model, name: str, stored_bytes: int) -> None:
        known = self.measured.get(name)
        is_new = known is None or known.stored_bytes != stored_bytes
        rate = (
            self._probe(model, name, self._device.batch_tokens)
            if known is None or is_new
            else known.activation_bytes_per_token
        )
        self.measured[name] = Measured(stored_bytes, model.bytes, rate)

    def _probe(self, model: Model, name: str, batch_tokens: int) -> float:
        """Return the bytes per token of a full batch, of texts or images, whichever is larger.
        Raises only out-of-memory errors.
        """
        try:
            rate = model.probe()
            if batch_tokens and isinstance(model, TakesImages):
                rate = max(rate, model.image_bytes(batch_tokens) / batch_tokens)
            return rate
        except Exception as error:
            if is_out_of_memory(error):
                raise
            known = (one.activation_bytes_per_token for one in self.measured.values())
            rate = max(known, default=float(UNMEASURED_ACTIVATION_BYTES_PER_TOKEN))
            message = (
                "measuring a model's activations failed; reserving as much as for the "
                "largest other model"
            )
            log.warning(
                message, exc_info=True, extra=fields({"model": name, "bytes_per_token": rate})
            )
            return rate

    async def _on_disk(self, loading: Loading) -> Copy:
        """Return the model's directory on a shelf or in the store, fetching it if necessary."""
        try:
            return await in_thread(partial(self._files.find, loading.model))
        except ModelNotFound:
            if not self._files.can_fetch:
                raise
        loading.is_fetched = False
        try:
            return await in_thread(
                partial(self._files.fetch, loading.model, partial(self._downloading, loading))
            )
        finally:
            loading.is_fetched, loading.progress = True, None
            self._changed()

    def _downloading(self, loading: Loading, progress: DownloadProgress) -> None:
        """Record the progress of a download. Called on a thread of the store."""
        is_news = loading.progress is None
        loading.progress = progress
        if is_news:
            self._loop.call_soon_threadsafe(self._changed)

    # From host memory

    async def _from_host(self, loading: Loading, warm: Warm) -> Resident:
        with ExitStack() as held:
            self._space.host.take(warm)
            held.push(partial(self._leave, warm))
            claim = await self._space.reserve(
                MemoryRequest(loading.model, warm.size, loading.requested_at), warm
            )
            held.callback(self._space.release, claim)
            loading.bytes = warm.size.bytes
            started = self._clock()
            model = await self._with_memory(loading.model, warm.parked.resume, claim, held)
            seconds = self._clock() - started
            known = self.measured.get(loading.model)
            rate = 0.0 if known is None else known.activation_bytes_per_token
            held.pop_all()
            return self._space.readmit(warm, model, claim, seconds=seconds, activation=rate)

    def _leave(
        self, warm: Warm, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End a failed resume. Keep the host copy if only device memory was lacking."""
        if isinstance(error, NoCapacity):
            self._space.host.put_back(warm)
        else:
            self._space.host.forget(warm)

    # Memory that is missing

    async def _with_memory(
        self, model: str, work: Callable[[], _Answer], claim: LedgerClaim, held: ExitStack
    ) -> _Answer:
        """Run `work` like `_in_time`, and retry when it runs out of memory: after trimming caches,
        dropping CUDA graphs, and evicting an idle model.

        The ledger has room for the model, but allocators cannot always use it, and other processes
        may take it. Raises NoCapacity if the retries fail.
        """
        relieve: Callable[[], Awaitable[bool]] = partial(self._space.relieve, model)
        reliefs = iter([self._trim, *[relieve] * RELIEFS_FOR_A_LOAD])
        while True:
            try:
                return await self._in_time(model, work, claim, held)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # The exception's frames refer to the weights read so far: free them before the next
                # try.
                error.__traceback__ = error.__cause__ = error.__context__ = None
                reason = str(error).partition("\n")[0][:200]
            relief = next(reliefs, None)
            log.warning(
                "a load ran out of memory",
                extra=fields({"model": model, "error": reason, "is_last_attempt": relief is None}),
            )
            if relief is None or not await relief():
                raise NoCapacity(
                    f"{model} ran out of memory on its worker although its budget has "
                    f"room: {reason}"
                )

    async def _trim(self) -> bool:
        await in_thread(self._device.trim)
        return True

    # Threads that may hang

    async def _in_time(
        self, model: str, work: Callable[[], _Answer], claim: LedgerClaim, held: ExitStack
    ) -> _Answer:
        """Run `work` on a new thread. After a timeout, the load keeps its memory until the thread
        ends.
        """
        future = begin(work)
        await asyncio.wait([future], timeout=self._load_seconds)
        if future.done():
            return future.result()
        claim.is_stuck = True
        self._tasks.start(self._release_when_over(model, future, held.pop_all()))
        raise ModelBroken(f"{model} failed to load within {self._load_seconds:g} seconds")

    async def _release_when_over(
        self, model: str, future: asyncio.Future[_Answer], held: ExitStack
    ) -> None:
        """Wait for the thread of a load that timed out, drop its result and release the load's
        memory.
        """
        with held:
            await asyncio.wait([future])
            is_loaded = future.exception() is None
            del future
            await in_thread(self._device.trim)
            log.warning(
                "a load that exceeded its time limit has ended",
                extra=fields({"model": model, "loaded": is_loaded}),
            )


def _log_missing_identity(model: str, error: Exception) -> None:
    reason = "the time limit was exceeded" if isinstance(error, TimeoutError) else str(error)
    log.warning(
        "the files of a model cannot be hashed, so its vectors have no id",
        extra=fields({"model": model, "error": f"{type(error).__name__}: {reason}"}),
    )

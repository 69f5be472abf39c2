"""`ModelStore.get`: the directory of a model, from this node's copies or from the first source that
has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from libs.catalog.checkpoint import adapter as lora
from libs.conversion import TorchCheckpoints, base_model, convert, plan_steps
from libs.errors import ModelBroken, ModelNotFound, ModelUnreachable, NoCapacity, ShoalError
from libs.names import is_model_id
from libs.store.base import with_base_model
from libs.store.cache import Cache, Copy, Listing
from libs.store.download import Transfer, download, patiently
from libs.store.local import LocalCopies, Report
from libs.store.select import select
from libs.store.source import ModelSource, OutOfReach
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)


class ModelStore:
    """Thread-safe and single-flight: however many threads and processes of this node ask for a
    model, it is fetched once.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        cache: Cache,
        budget_bytes: int,
        transfer: Transfer | None = None,
        torch_checkpoints: TorchCheckpoints = "convert",
    ) -> None:
        self._sources = sources
        self._cache = cache
        self._budget_bytes = budget_bytes
        self._torch_checkpoints: TorchCheckpoints = torch_checkpoints
        self._local = LocalCopies(cache.root, lambda: budget_bytes, torch_checkpoints)
        self._transfer = transfer or Transfer()
        self._mutex = threading.Lock()
        # Mutable state: fetches in progress in this process; each results in None, or in a
        # directory outside the store.
        self._fetches: dict[str, Future[Path | None]] = {}

    @property
    def models(self) -> Path:
        """The folder of complete copies, laid out `<org>/<name>[@revision]/`."""
        return self._cache.models

    def get(self, model: str, report: Report, *, is_adapter: bool = False) -> Copy:
        """Block until the model is on this node. `report` is called from any thread, first when a
        download is known to be needed; of several threads that ask at the same time only one gets
        reports. `is_adapter`: accept only a LoRA adapter.

        Raises ModelNotFound, ModelUnreachable (a source cannot be connected to, and no other has
        the model), ModelBroken (with advice) or NoCapacity (a source is busy or fell silent during
        a download, or the disk budget is in use).
        """
        if not is_model_id(model):
            raise ModelNotFound(f"{model!r} is not a model id of the form org/name", field="model")
        try:
            while True:
                copy = self._copy(model)
                if copy is not None:
                    return copy
                directory = self._fetch_once(model, report, is_adapter)
                if directory is not None:
                    return self._local.find(directory, report)
        except OSError as error:  # usually a full disk: not a fault of the model
            raise NoCapacity(
                f"{model} cannot be written to this worker's disk: {error.strerror}"
            ) from error

    def _copy(self, model: str) -> Copy | None:
        """Return the complete copy, locked against eviction. None also while another process
        removes it.
        """
        lock = self._cache.lock(model)
        directory = self._cache.directory(model) if lock.try_shared() else None
        if directory is None:
            lock.close()
            return None
        self._cache.touch(model)
        return Copy(directory, lock)

    def _fetch_once(self, model: str, report: Report, is_adapter: bool) -> Path | None:
        with self._mutex:
            others = self._fetches.get(model)
            mine: Future[Path | None] = others or Future()
            self._fetches[model] = mine
        if others is not None:
            return others.result()
        try:
            mine.set_result(self._fetch(model, report, is_adapter))
        except BaseException as error:
            mine.set_exception(error)
        finally:
            with self._mutex:
                del self._fetches[model]
        return mine.result()

    def _fetch(self, model: str, report: Report, is_adapter: bool) -> Path | None:
        with self._alone(model, report):
            if self._cache.directory(model) is not None:
                return None
            errors: list[ShoalError] = []
            for source in self._sources:
                try:
                    return self._fetch_from(source, model, report, is_adapter)
                except (ModelNotFound, ModelUnreachable, ModelBroken, NoCapacity) as error:
                    errors.append(error)
        raise _worst(model, errors)

    def _fetch_from(
        self, source: ModelSource, model: str, report: Report, is_adapter: bool
    ) -> Path | None:
        pauses = self._transfer.retry_seconds
        # Clients wait to learn whether any source has the model: an unreachable one is tried twice,
        # and not five times.
        try:
            found = patiently(lambda: source.find(model), pauses, most_unreached=1)
        except OutOfReach as error:
            raise ModelUnreachable(error.message, field="model") from error
        if isinstance(found, Path):
            return found
        if is_adapter and all(file.path != lora.FILE for file in found.files):
            raise ModelNotFound(
                f"{model} in {found.origin} is not an adapter: it has no {lora.FILE}",
                field="adapter",
            )
        remote = (
            found
            if is_adapter
            else patiently(partial(with_base_model, model, found, source), pauses)
        )
        files = patiently(
            lambda: select(
                model, remote, is_adapter=is_adapter, torch_checkpoints=self._torch_checkpoints
            ),
            pauses,
        )
        directory = remote.on_disk(files)
        if directory is not None:
            return directory
        started = time.monotonic()
        listing = Listing.from_remote(remote, files)
        incoming = self._cache.begin(model, listing, self._budget_bytes)
        if not self._cache.is_converted(model):
            download(remote, files, incoming, self._transfer, report)
            steps = plan_steps(file.path for file in files)
            if steps:
                convert(incoming, incoming, steps, lambda name, done, total: None)
            needs_base = base_model.is_needed(incoming)
            if needs_base:
                base_model.complete(incoming)
            if steps or needs_base:
                self._cache.finish_conversion(model, listing, steps)
        self._cache.publish(model)
        seconds = time.monotonic() - started
        reported = fields(
            {
                "model": model,
                "origin": remote.origin,
                "revision": remote.revision,
                "bytes": listing.bytes,
                "seconds": seconds,
            }
        )
        log.info("model fetched", extra=reported)
        return None

    @contextmanager
    def _alone(self, model: str, report: Report) -> Iterator[None]:
        """Hold the model's exclusive lock; while another process of this node fetches the model,
        reports its progress.
        """

        def report_progress() -> None:
            progress = self._cache.progress(model)
            if progress is not None:
                report(progress)

        lock = self._cache.lock(model)
        try:
            lock.wait_exclusive(report_progress)
            yield
        finally:
            lock.close()


def _worst(model: str, errors: Sequence[ShoalError]) -> ShoalError:
    """Return the error to raise if no source gave the model: ModelBroken before NoCapacity,
    ModelUnreachable and ModelNotFound.

    A ModelUnreachable says what each source answered.
    """
    for kind in (ModelBroken, NoCapacity):
        for error in errors:
            if isinstance(error, kind):
                return error
    if any(isinstance(error, ModelUnreachable) for error in errors):
        return ModelUnreachable("; ".join(error.message for error in errors), field="model")
    if errors:
        return errors[0]
    return ModelNotFound(f"no store is configured that could have {model}", field="model")

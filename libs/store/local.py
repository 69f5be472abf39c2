"""Converted copies of directories outside the store: models of SHOAL_MODELS, of `shoal models check
DIR`, of the Hugging Face cache.

An operator's directory is never written to. One that holds weights only as torch checkpoints is
read through a copy in the store's folder, `<root>/models/.converted/<name>-<key>/`: its small files
and safetensors, linked where the disk allows it, and the converted weights. The key is a digest of
the files' paths, sizes and times, so a changed directory gets another copy; copies count against
the disk budget and are evicted as models are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from libs.catalog.checkpoint.files import locate
from libs.conversion import ConversionRecord, ConversionStep, TorchCheckpoints, convert, plan_steps
from libs.conversion.convert import OnProgress
from libs.conversion.plan import GGUF_SETTINGS, find_vocabulary, foreign_steps, is_torch
from libs.errors import InvalidInput, ModelBroken, NoCapacity
from libs.store.cache import Cache, Copy, Listing
from libs.store.select import (
    is_readable_by_loader,
    is_root_text,
    is_served,
    named_folders,
    select,
)
from libs.store.source import DownloadProgress, RemoteFile
from libs.telemetry.logs import fields

log = logging.getLogger(__name__)

_AREA: Final = ".converted"
"""The folder in place of an organisation: no model id begins with a dot, so no id leads here."""

_MAX_MODEL_FILES: Final = 10_000
_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")

Report = Callable[[DownloadProgress], None]


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory of this machine as a `Remote`."""

    path: Path
    files: tuple[RemoteFile, ...]
    revision: str

    @property
    def origin(self) -> str:
        return str(self.path)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        with self.locate(file).open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    def on_disk(self, files: Sequence[RemoteFile]) -> Path | None:
        return self.path

    def locate(self, file: RemoteFile) -> Path:
        """Return the path of a file. Raises ModelBroken for a link that leads out of the
        directory, as every reader of checkpoints does.
        """
        found = locate(self.path, file.path)
        if found is None:
            raise ModelBroken(f"{file.path}: missing from {self.path}")
        return found


class LocalCopies:
    """Thread-safe; processes of a node that use the same `root` convert a directory once.
    `budget_bytes`: of the whole store.
    """

    def __init__(
        self, root: Path, budget_bytes: Callable[[], int], torch_checkpoints: TorchCheckpoints
    ) -> None:
        self._root = root
        self._budget_bytes = budget_bytes
        self._torch_checkpoints: TorchCheckpoints = torch_checkpoints

    def existing(self, directory: Path) -> Path:
        """Return the converted copy of a directory if there is one, else the directory."""
        plan = self._plan(directory)
        if plan is None:
            return directory
        copy = self._root / "models" / plan.name
        return copy if copy.is_dir() else directory

    def find(self, directory: Path, report: Report) -> Copy:
        """Return the directory to read instead of `directory`: itself, or its converted copy, which
        is made if need be. Blocks.

        Raises ModelBroken naming a file that cannot be converted, NoCapacity where the disk is
        full.
        """
        plan = self._plan(directory)
        if plan is None:
            return Copy(directory)
        cache = Cache(self._root)
        while True:
            lock = cache.lock(plan.name)
            found = cache.directory(plan.name) if lock.try_shared() else None
            if found is not None:
                cache.touch(plan.name)
                return Copy(found, lock)
            lock.close()
            self._make(plan, cache, report)

    def _plan(self, directory: Path) -> _Plan | None:
        """Return the plan to convert the directory; None if it is read in place. Raises ModelBroken
        if it has no readable weights.
        """
        has_torch = self._torch_checkpoints == "convert" and any(
            is_torch(name) for name in _names(directory)
        )
        if not has_torch and not find_vocabulary([path.name for path in directory.glob("*")]):
            return None
        found = _read(directory)
        try:
            files = select(
                directory.name, found, is_adapter=False, torch_checkpoints=self._torch_checkpoints
            )
        except ModelBroken:
            if not has_torch or any(file.path.endswith(".safetensors") for file in found.files):
                return None  # it may be of a layout that is read where it lies
            raise
        if not plan_steps(file.path for file in files):
            return None
        listing = Listing(found.origin, found.revision, files)
        key = hashlib.sha256(
            f"{directory.resolve()}\n{listing}\n{_marks(found, files)}".encode()
        ).hexdigest()[:16]
        name = _NAME.sub("-", directory.resolve().name)[:80]
        return _Plan(found, listing, f"{_AREA}/{name}-{key}")

    def _make(self, plan: _Plan, cache: Cache, report: Report) -> None:
        lock = cache.lock(plan.name)
        try:
            lock.wait_exclusive()
            if cache.directory(plan.name) is not None:
                return
            started = time.monotonic()
            incoming = cache.begin(plan.name, plan.listing, self._budget_bytes())
            steps = plan_steps(file.path for file in plan.listing.files)
            if not cache.is_converted(plan.name):
                sources = {step.source for step in steps}
                for file in plan.listing.files:
                    if file.path not in sources:
                        _place(plan.found.locate(file), incoming / file.path)
                convert(
                    plan.found.path,
                    incoming,
                    steps,
                    lambda name, done, total: report(DownloadProgress(done, total)),
                )
                cache.finish_conversion(plan.name, plan.listing, steps)
            cache.publish(plan.name)
            seconds = time.monotonic() - started
            log.info(
                "torch checkpoints converted",
                extra=fields({"directory": str(plan.found.path), "seconds": seconds}),
            )
        except OSError as error:
            raise NoCapacity(
                f"{plan.found.path} cannot be converted on this machine's disk: {error.strerror}"
            ) from error
        finally:
            lock.close()


def write_converted(
    directory: Path, output: Path, on_progress: OnProgress
) -> tuple[ConversionRecord, ...]:
    """Write a copy of a model's directory with its torch checkpoints, GGUF or ONNX file converted;
    `output` must not exist. Returns the conversions; for safetensors weights it returns none and
    writes nothing.

    Raises ModelBroken naming a file that cannot be converted, InvalidInput if `output` exists,
    NoCapacity if it cannot be written.
    """
    if output.exists():
        raise InvalidInput(
            f"{output} is there already: name a directory that is not", field="output"
        )
    found = _read(directory)
    steps = _foreign(found)
    if steps:
        files = tuple(file for file in found.files if is_root_text(file))
        steps = (*steps, *plan_steps(file.path for file in files if steps[0].kind != "gguf"))
    else:
        files = select(directory.resolve().name, found, is_adapter=False)
        steps = plan_steps(file.path for file in files)
    if not steps:
        return ()
    sources = {step.source for step in steps}
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as folder:
            made = Path(folder) / "made"
            for file in files:
                if file.path not in sources:
                    target = made / file.path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(found.locate(file), target)
            done = convert(found.path, made, steps, on_progress)
            _unpack_settings(made)
            made.rename(output)
    except OSError as error:
        raise NoCapacity(f"{output} cannot be written: {error.strerror}") from error
    return done


def served_files(directory: Path, *, is_adapter: bool = False) -> tuple[str, ...]:
    """Return the paths of the files that decide a model's outputs, in order: of those that the
    store would fetch, the ones that a loader may read. If the store does not know the layout, these
    are all weights and texts.

    `is_adapter`: see `select`. Raises OSError if a file cannot be read, ModelBroken if a directory
    with very many files names its folders in no valid way.
    """
    try:
        found = _read(directory)
    except ModelBroken:  # too many files: it has other contents in folders
        found = _read_named(directory)
    try:
        files: Sequence[RemoteFile] = select(directory.name, found, is_adapter=is_adapter)
    except ModelBroken:
        files = [file for file in found.files if is_served(file)]
    return tuple(sorted(file.path for file in files if is_readable_by_loader(file.path)))


def _read_named(directory: Path) -> _Directory:
    """Return the files of the root and of the folders that its configuration names."""
    folders: set[str] = set()
    found = _read(directory, ("*",), limit=sys.maxsize)
    while more := named_folders(found) - folders:  # a Router names folders in its own one
        folders |= more
        patterns = ("*", *(f"{folder}/*" for folder in sorted(folders)))
        found = _read(directory, patterns, limit=sys.maxsize)
    return found


def _foreign(found: _Directory) -> tuple[ConversionStep, ...]:
    """Return the conversion of a directory that has its weights only as GGUF or ONNX; empty for
    others. Raises ModelBroken.
    """
    paths = [file.path for file in found.files]
    if any(path.endswith(".safetensors") or is_torch(path) for path in paths):
        return ()
    steps = foreign_steps(paths)
    if not steps:
        return ()
    if steps[0].kind == "gguf" and find_spec("gguf") is None:
        raise ModelBroken(
            f"{steps[0].source}: needs the gguf package: pip install 'shoal-mesh[gguf]'"
        )
    if steps[0].kind == "onnx" and "config.json" not in paths:
        raise ModelBroken(
            f"{steps[0].source}: config.json is missing in its folder; an ONNX file does not say "
            "which model of transformers it is of"
        )
    return steps


def _unpack_settings(made: Path) -> None:
    """Write the files that a GGUF file says the settings of; those that the directory has stay."""
    bundle = made / GGUF_SETTINGS
    if not bundle.is_file():
        return
    for name, text in json.loads(bundle.read_bytes()).items():
        target = made / Path(name).name
        if not target.exists():
            target.write_text(text, encoding="utf-8")
    bundle.unlink()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files to copy and convert, and the name of the copy in the cache."""

    found: _Directory
    listing: Listing
    name: str


def _names(directory: Path) -> Iterator[str]:
    for pattern in ("*", "*/*"):
        yield from (path.name for path in directory.glob(pattern))


def _read(
    directory: Path,
    patterns: Sequence[str] = ("*", "*/*", "*/*/*"),
    *,
    limit: int = 0,
) -> _Directory:
    files, limit = [], limit or _MAX_MODEL_FILES
    for pattern in patterns:
        for path in directory.glob(pattern):
            if path.is_file() and not path.name.startswith("."):
                files.append(
                    RemoteFile(path.relative_to(directory).as_posix(), path.stat().st_size)
                )
            if len(files) > limit:
                raise ModelBroken(
                    f"{directory}: has more than {limit:,} files; it is not a model's directory"
                )
    return _Directory(directory, tuple(sorted(files, key=lambda file: file.path)), "local")


def _marks(found: _Directory, files: Sequence[RemoteFile]) -> str:
    """Return the times of the files' last change, and their identity on their disk."""
    stats = [(file.path, (found.path / file.path).stat()) for file in files]
    return "\n".join(
        f"{path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}" for path, stat in stats
    )


def _place(source: Path, target: Path) -> None:
    """Link a file, or copy it where the disk or its permissions forbid links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
    part.rename(target)

"""Run each target in separate processes that are watched from outside: a crash or a hang costs one
process and identifies its input.

The process writes each input to a memory page that it shares with its watcher, then tries it. The
watcher observes the count rise, the process end, or neither.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import re
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tests.fuzz.mutate import MAX_BYTES
from tests.fuzz.target import Broken, Internal, Target, Try, targets_of

ROOT: Final = Path(__file__).parents[2]
CORPUS: Final = Path(__file__).parent / "corpus"
KEPT: Final = ROOT / ".cache/fuzz/corpus"
"""Inputs with new coverage, in addition to the committed corpus."""
FINDINGS: Final = ROOT / ".cache/fuzz/findings"

Kind = Literal["crash", "hang", "internal", "wrong"]
Engine = Literal["chance", "coverage"]

_PAGE: Final = 4 * MAX_BYTES
_HEAD: Final = struct.Struct("<QQ")
_LOOK_SECONDS: Final = 0.1
_OPEN_SECONDS: Final = 120.0
_MAX_FINDINGS: Final = 25
_MAX_STARTS: Final = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. Next to the input at `path` a .txt file describes it."""

    target: str
    kind: Kind
    what: str
    path: str


@dataclass(slots=True)
class Row:
    """The results of a target's slice of a run."""

    target: str
    engine: Engine
    inputs: int = 0
    seconds: float = 0.0
    corpus: int = 0
    findings: list[Finding] = field(default_factory=list)

    def count(self, *kinds: Kind) -> int:
        return sum(one.kind in kinds for one in self.findings)

    @property
    def rate(self) -> float:
        return self.inputs / self.seconds if self.seconds else 0.0


class Page:
    """The number of started inputs and the last input; shared by a process and its watcher."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_PAGE + _HEAD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @property
    def count(self) -> int:
        return int(_HEAD.unpack_from(self._memory)[0])

    @property
    def input(self) -> bytes:
        length = _HEAD.unpack_from(self._memory)[1]
        return bytes(self._memory[_HEAD.size : _HEAD.size + length])

    def write(self, data: bytes) -> None:
        data = data[:_PAGE]
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, 0, self.count + 1, len(data))


Progress = Callable[[Row, float], None]
"""Called with a row and the completed fraction of the run."""


def run(
    targets: Sequence[Target],
    seconds: float,
    seed: int,
    findings: Path,
    progress: Progress,
    *,
    fork: bool = True,
) -> list[Row]:
    """Try all targets for `seconds` in total. With `fork` this process must have a single thread
    and the targets' imports.
    """
    plan = [(target, engine) for target in targets for engine in _engines(target)]
    shares = sum(_share(target, engine) for target, engine in plan)
    rows: list[Row] = []
    done = 0.0
    for target, engine in plan:
        slice_seconds = seconds * _share(target, engine) / shares
        begun = done

        def render(row: Row, begun: float = begun, length: float = slice_seconds) -> None:
            progress(row, (begun + min(row.seconds, length)) / seconds)

        rows.append(_Slice(target, engine, slice_seconds, seed, findings, fork).run(render))
        done += slice_seconds
        progress(rows[-1], done / seconds)
    return rows


def _share(target: Target, engine: Engine) -> float:
    """Return the engine's share of time. Coverage goes deeper but is slower, so it gets a third if
    available.
    """
    return target.share * (
        1.0 if len(_engines(target)) == 1 else 2 / 3 if engine == "chance" else 1 / 3
    )


def _engines(target: Target) -> Sequence[Engine]:
    return ("chance", "coverage") if target.guided and has_atheris() else ("chance",)


def has_atheris() -> bool:
    from importlib.util import find_spec

    return find_spec("atheris") is not None


class _Slice:
    """One target's time with one engine."""

    def __init__(
        self, target: Target, engine: Engine, seconds: float, seed: int, findings: Path, fork: bool
    ) -> None:
        self._fork = fork and engine == "chance"
        self._target, self._engine, self._seconds, self._seed, self._folder = (
            target,
            engine,
            seconds,
            seed,
            findings,
        )
        self._row = Row(target.name, engine, corpus=len(corpus(target.name)))

    def run(self, render: Callable[[Row], None]) -> Row:
        left, starts = self._seconds, 0
        while left > 0.2 and starts < _MAX_STARTS and self._row.count("crash", "hang") < 5:
            left -= self._start(left, starts, render)
            starts += 1
        self._row.findings = list(_read(self._folder, self._target.name)) or self._row.findings
        return self._row

    def _start(self, seconds: float, number: int, render: Callable[[Row], None]) -> float:
        """Run one process; return how long it worked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        place = self._folder / f"{self._target.name}.page"
        place.unlink(missing_ok=True)
        page = Page(place)
        arguments = (self._engine, str(seconds), f"{self._seed}.{number}", str(self._folder))
        before = self._row.inputs
        process = (
            _forked(self._target, *arguments) if self._fork else _spawned(self._target, *arguments)
        )
        try:
            return self._watch(process, page, before, render)
        finally:
            process.kill()
            self._row.inputs = before + page.count
            place.unlink()

    def _watch(
        self, process: Process, page: Page, before: int, render: Callable[[Row], None]
    ) -> float:
        launched = moved = time.monotonic()
        begun, seen, worked = 0.0, 0, self._row.seconds
        while (code := process.poll()) is None:
            time.sleep(_LOOK_SECONDS)
            now, count = time.monotonic(), page.count
            if count != seen:
                begun, moved, seen = begun or now - _LOOK_SECONDS, now, count
            self._row.inputs, self._row.seconds = (
                before + count,
                worked + (now - begun if begun else 0.0),
            )
            render(self._row)
            if now - moved > (self._target.hang_seconds if seen else _OPEN_SECONDS):
                process.kill()
                self._found("hang", f"no answer within {self._target.hang_seconds:g} s", page.input)
                return now - (begun or launched)
        if code:
            name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            self._found(
                "crash", f"the process ended with {name}; see {self._target.name}.log", page.input
            )
        return time.monotonic() - (begun or launched)

    def _found(self, kind: Kind, what: str, data: bytes) -> None:
        self._row.findings.append(save(self._folder, self._target.name, kind, what, data, what))


class Process:
    """A child process that leads its own session."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def _forked(target: Target, engine: str, seconds: str, seed: str, folder: str) -> Process:
    """Fork this process, which has already imported all targets. It has one thread, so the fork is
    complete.
    """
    pid = os.fork()
    if pid:
        return Process(pid)
    code = 1
    try:
        os.setsid()
        log = os.open(f"{folder}/{target.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(target, engine, seconds, seed, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _spawned(target: Target, engine: str, seconds: str, seed: str, folder: str) -> Process:
    """Start a new interpreter, because coverage instruments code when it is imported."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'libs/api'}"}
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.run",
        f"{target.module}:{target.name}",
        engine,
        seconds,
        seed,
        folder,
    ]
    with open(f"{folder}/{target.name}.log", "ab") as log:
        streams = [(os.POSIX_SPAWN_DUP2, log.fileno(), number) for number in (1, 2)]
        return Process(
            os.posix_spawn(sys.executable, command, environment, file_actions=streams, setsid=True)
        )


def corpus(target: str) -> list[bytes]:
    """Return the committed inputs and those kept from earlier local runs."""
    return [
        path.read_bytes()
        for folder in (CORPUS, KEPT)
        for path in sorted((folder / target).glob("*"))
        if path.is_file()
    ]


def save(folder: Path, target: str, kind: Kind, what: str, data: bytes, reported: str) -> Finding:
    """Write a finding's input and its description."""
    name = hashlib.sha256(f"{kind} {what}".encode() if kind != "hang" else data).hexdigest()[:12]
    path = folder / target / f"{name}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    finding = Finding(target, kind, what, str(path))
    replay = f"python -m tests.fuzz --replay {path} --target {target}"
    path.with_suffix(".txt").write_text(f"{json.dumps([kind, what])}\n{replay}\n\n{reported}\n")
    return finding


def _read(folder: Path, target: str) -> Iterator[Finding]:
    for path in sorted((folder / target).glob("*.txt")):
        kind, what = json.loads(path.read_text().partition("\n")[0])
        yield Finding(target, kind, what, str(path.with_suffix(".bin")))


# The following code runs in the watched process.


class Tries:
    """Tries inputs, and saves one finding for each place in the code."""

    def __init__(self, target: Target, attempt: Try, page: Page, folder: Path) -> None:
        self._target, self._attempt, self._page, self._folder = target, attempt, page, folder
        self._seen: set[str] = set()

    def one(self, data: bytes) -> None:
        self._page.write(data)
        try:
            self._attempt(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            what = signature(error)
            if what not in self._seen and len(self._seen) < _MAX_FINDINGS:
                self._seen.add(what)
                kind: Kind = "internal" if isinstance(error, Internal) else "wrong"
                own = error.data if isinstance(error, Broken) and error.data is not None else data
                save(
                    self._folder, self._target.name, kind, what, own, traceback.format_exc()[-8000:]
                )


def signature(error: BaseException) -> str:
    """Return the exception's type and the last place in Shoal's code in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if frame.filename.startswith(str(ROOT)) and ".venv" not in frame.filename
    ]
    product = [frame for frame in ours if "/tests/" not in frame.filename] or ours
    place = (
        f"{Path(product[-1].filename).relative_to(ROOT)}:{product[-1].lineno}" if product else "?"
    )
    reported = (
        re.sub(r"\d+|'[^']*'", "#", str(error).partition("\n")[0])[:120]
        if isinstance(error, Broken)
        else ""
    )
    return f"{type(error).__name__} at {place} {reported}".strip()


def by_chance(target: Target, tries: Tries, seconds: float, seed: str) -> None:
    chance, known = random.Random(seed), corpus(target.name)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        tries.one(target.make(chance, known))


def by_coverage(target: Target, tries: Tries, seconds: float, seed: str) -> None:
    """Run libFuzzer, which ends the process."""
    import atheris

    known = corpus(target.name)

    def change(data: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        if chance.random() < 0.5:
            return target.make(chance, [data, *known])[:most]
        return bytes(atheris.Mutate(data, most))

    (KEPT / target.name).mkdir(parents=True, exist_ok=True)
    (CORPUS / target.name).mkdir(parents=True, exist_ok=True)
    limits = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-max_len={MAX_BYTES}",
        "-rss_limit_mb=0",
        "-timeout=3600",
        "-verbosity=0",
    ]
    number = int(hashlib.sha256(seed.encode()).hexdigest()[:7], 16)
    arguments = [
        "fuzz",
        *limits,
        f"-seed={number}",
        str(KEPT / target.name),
        str(CORPUS / target.name),
    ]
    atheris.Setup(arguments, tries.one, custom_mutator=change)
    atheris.Fuzz()


@contextmanager
def limited(extra: int) -> Iterator[None]:
    """Limit the process to `extra` more bytes of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main(place: str, engine: str, seconds: str, seed: str, folder: str) -> None:
    """Run the process that `_spawned` starts. `place` is the module and name of the target."""
    module, _, name = place.partition(":")
    if engine == "coverage":
        import atheris

        with atheris.instrument_imports(include=["libs", "services", "shoal"]):
            targets = targets_of(module)
    else:
        targets = targets_of(module)
    work(next(target for target in targets if target.name == name), engine, seconds, seed, folder)


def work(target: Target, engine: str, seconds: str, seed: str, folder: str) -> None:
    page = Page(Path(folder) / f"{target.name}.page")
    with target.open() as attempt, limited(target.memory_bytes):
        tries = Tries(target, attempt, page, Path(folder))
        (by_coverage if engine == "coverage" else by_chance)(target, tries, float(seconds), seed)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs a conversion in a child process, from one file to another, and reads its report. See
`child.py` for its limits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Final

from libs.conversion.plan import Kind
from libs.errors import ModelBroken, NoCapacity

_CHILD: Final = Path(__file__).with_name("child.py")
_MAX_ANSWER_BYTES: Final = 16 << 20
_SILENT_SECONDS: Final = 300.0
"""Time after which a child that reports nothing is ended. It reports twice a second, less often on
a busy machine.
"""

_END_SECONDS: Final = 10.0
"""Maximum time from a child's last report to its end."""

_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

OnProgress = Callable[[int, int], None]
"""Called with the bytes written and those of the whole output."""


def run(
    kind: Kind, name: str, source: BinaryIO, output: BinaryIO, on_progress: OnProgress
) -> Mapping[str, object]:
    """Return the report of the conversion of `source`, the file `name` of a checkpoint, into the
    empty file `output`.

    Raises ModelBroken naming the file where it is refused or goes beyond a limit, NoCapacity where
    the child was ended from outside.
    """
    child = subprocess.Popen(  # noqa: S603 # our program
        [
            sys.executable,
            "-I",
            "-S",
            str(_CHILD),
            _paths(),
            kind,
            str(source.fileno()),
            str(output.fileno()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT,
        pass_fds=(source.fileno(), output.fileno()),
        start_new_session=True,
    )
    try:
        message = _listen(child, name, on_progress)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)
    finally:
        child.kill()
        code = child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if isinstance(report := message.get("report"), dict):
        return report
    if refused := message.get("refused"):
        raise ModelBroken(f"{name}: {str(refused)[:400]}")
    raise _ended(name, code)


def _paths() -> str:
    # An editable install finds the package of our errors by a hook, which the child does not have.
    spec = find_spec("shoal")
    parents = [] if spec is None else [str(Path(folder).parent) for folder in _folders(spec)]
    return json.dumps([str(Path(entry).resolve()) for entry in (*sys.path, *parents) if entry])


def _folders(package: ModuleSpec) -> Sequence[str]:
    return package.submodule_search_locations or ()


def _listen(
    child: subprocess.Popen[bytes], name: str, on_progress: OnProgress
) -> Mapping[str, object]:
    """Report the child's lines of progress and return its last line, or an empty object if it ends
    without one.
    """
    if child.stdout is None:
        raise RuntimeError("a process was started without a pipe")
    buffer, pipe = b"", child.stdout.fileno()
    silent_until = time.monotonic() + _SILENT_SECONDS
    while True:
        if not select.select([pipe], [], [], max(0.0, silent_until - time.monotonic()))[0]:
            raise ModelBroken(
                f"{name}: its conversion made no progress for {_SILENT_SECONDS:.0f} s"
            )
        part = os.read(pipe, 1 << 16)
        silent_until = time.monotonic() + _SILENT_SECONDS
        buffer += part
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            message = _object(line)
            match message:
                case {"done": int(done), "total": int(total)}:
                    on_progress(done, total)
                case _:
                    return message
        if not part or len(buffer) > _MAX_ANSWER_BYTES:
            return {}


def _object(line: bytes) -> dict[str, object]:
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _ended(name: str, code: int) -> ModelBroken | NoCapacity:
    if code == -signal.SIGXCPU:
        return ModelBroken(f"{name}: its conversion took more processor time than its size allows")
    if code == -signal.SIGXFSZ:
        return ModelBroken(f"{name}: its conversion wrote more than the file has")
    if code == -signal.SIGKILL:
        return NoCapacity(
            f"{name}: its conversion was ended by the system, which may be out of memory"
        )
    how = signal.Signals(-code).name if code < 0 else f"status {code}"
    return ModelBroken(f"{name}: the process that converted it ended ({how})")

"""Rendering of chat templates: Jinja of untrusted checkpoints runs in a reused subprocess with
resource limits (`rendering.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from select import POLLIN, poll
from threading import Lock
from typing import IO, Any, Final

from libs.errors import ModelBroken
from libs.models.text.tokenising.text import special_token

NAME: Final = "the chat template"
RENDER_SECONDS: Final = 30.0
"""Wall-clock limit of a rendering, which includes a slow start of Python on a busy machine.
`rendering.py` limits the computation.
"""
_PROGRAM = Path(__file__).with_name("rendering.py")
SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class Rendering:
    """The result of a rendering: a text, or an error."""

    text: str = ""
    error: str = ""


class Renderer:
    """Renders one template.

    The process starts with the first call and again after one that exceeded its limits, and ends
    with this object. Thread-safe: calls take turns."""

    def __init__(self, template: str) -> None:
        """Raise ModelBroken for an invalid template, and if Jinja is not installed."""
        if find_spec("jinja2") is None:
            raise ModelBroken(
                "the model's chat template needs the package jinja2, which is not installed"
            )
        self._template = template
        # Guarded by the lock: the process, if it is running.
        self._lock = Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _end, self._processes)
        self.names = self._start()
        """Names of the values that the template reads."""

    def render(self, values: Sequence[Mapping[str, object]]) -> list[Rendering]:
        """Render the template with each of the values. Raises ModelBroken if it exceeds its
        limits."""
        asked = _line(values)
        with self._lock:
            if not self._processes or self._processes[0].poll() is not None:
                self._start()
            found = self._exchange(asked)
        return [Rendering(one.get("text", ""), one.get("error", "")) for one in found]

    def _start(self) -> frozenset[str]:
        _end(self._processes)
        # Our program, without arguments from the checkpoint.
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            process_group=0,  # the worker handles a terminal's Ctrl-C and drains
        )
        self._processes.append(process)
        found = self._exchange(_line(self._template))
        if error := found.get("error"):
            raise ModelBroken(f"{NAME}: {error}")
        return frozenset(found["names"])

    def _exchange(self, line: bytes) -> Any:
        """Return the process's answer to a line. If it has ended or does not answer, end it and
        raise ModelBroken.
        """
        (process,) = self._processes
        try:
            stdin, stdout = _pipe(process.stdin), _pipe(process.stdout)
            stdin.write(line)
            stdin.flush()
            ready = poll()
            ready.register(stdout, POLLIN)
            if not ready.poll(RENDER_SECONDS * 1000):
                raise TimeoutError
            return json.loads(stdout.readline())
        except (OSError, EOFError, ValueError) as error:
            _end(self._processes)
            raise ModelBroken(f"{NAME}: rendering exceeds the limits of time and memory") from error


def rendered(template: str, values: Sequence[Mapping[str, object]]) -> list[Rendering]:
    """Render the template with each of the values, once. Raises ModelBroken as `Renderer` does."""
    renderer = Renderer(template)
    try:
        return renderer.render(values)
    finally:
        renderer.close()


def rendered_text(found: Rendering) -> str:
    """Return the rendered text. Raises ModelBroken with the template's error."""
    if found.error:
        raise ModelBroken(f"{NAME}: {found.error}")
    return found.text


def special_tokens(root: Path) -> dict[str, str]:
    """Return the special tokens that templates name, from a tokenizer's directory."""
    return {role: token for role in SPECIAL_TOKENS if (token := special_token(root, role))}


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise EOFError
    return pipe


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        process = processes.pop()
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # unwritten output is discarded
                _pipe(pipe).close()
        process.wait()

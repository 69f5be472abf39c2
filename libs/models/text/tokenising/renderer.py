"""Renders chat templates: Jinja of untrusted checkpoints, in a subprocess with resource limits
(`rendering.py`), which is kept.
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
"""By the clock; `rendering.py` limits what it computes. Starting Python on a busy machine takes its
time.
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
    """What a template made of its values: a text, or an error."""

    text: str = ""
    error: str = ""


class Renderer:
    """Renders one template. Its process starts with the first call and again after one that
    exceeded its limits, and ends with this object. Thread-safe: calls take turns."""

    def __init__(self, template: str) -> None:
        """Raises ModelBroken for a text that is no template, and where Jinja is not installed."""
        if find_spec("jinja2") is None:
            raise ModelBroken(
                "the model has a chat template, for which the package jinja2 is needed: it is not installed"
            )
        self._template = template
        # Guarded by the lock: the process, if there is one.
        self._lock = Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _end, self._processes)
        self.names = self._start()
        """The values that the template looks for."""

    def render(self, values: Sequence[Mapping[str, object]]) -> list[Rendering]:
        """What the template makes of each of the values. Raises ModelBroken if it exceeds its
        limits.
        """
        asked = _line(values)
        with self._lock:
            if not self._processes or self._processes[0].poll() is not None:
                self._start()
            found = self._answer(asked)
        return [Rendering(one.get("text", ""), one.get("error", "")) for one in found]

    def _start(self) -> frozenset[str]:
        _end(self._processes)
        process = subprocess.Popen(  # noqa: S603  # our own program; nothing of the checkpoint is in its arguments
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            process_group=0,  # a terminal's Ctrl-C is for the worker, which drains
        )
        self._processes.append(process)
        found = self._answer(_line(self._template))
        if error := found.get("error"):
            raise ModelBroken(f"{NAME}: {error}")
        return frozenset(found["names"])

    def _answer(self, line: bytes) -> Any:
        """What the process makes of a line. Raises ModelBroken, and ends it, if it has ended or
        does not answer.
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
            raise ModelBroken(
                f"{NAME}: rendering it takes more time or memory than a template may have"
            ) from error


def rendered(template: str, values: Sequence[Mapping[str, object]]) -> list[Rendering]:
    """Renders the template with each of the values, once. Raises ModelBroken as `Renderer`."""
    renderer = Renderer(template)
    try:
        return renderer.render(values)
    finally:
        renderer.close()


def rendered_text(found: Rendering) -> str:
    """What was rendered. Raises ModelBroken with the template's error."""
    if found.error:
        raise ModelBroken(f"{NAME}: {found.error}")
    return found.text


def special_tokens(root: Path) -> dict[str, str]:
    """The special tokens that templates name, of a tokenizer's directory."""
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
            with suppress(OSError):  # what could not be written any more
                _pipe(pipe).close()
        process.wait()

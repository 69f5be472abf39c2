"""Reports of failures of commands: a message on stderr and exit status 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TextIO, cast

import typer

from shoal.cli.console import print_error
from shoal.errors import (
    CannotConnect,
    DeadlinePassed,
    InputTooLong,
    InternalError,
    ModelBroken,
    ModelNotFound,
    ModelUnreachable,
    NoCapacity,
    Overloaded,
    PermissionDenied,
    ShoalError,
    TaskNotSupported,
    TlsFailed,
    Unauthenticated,
)

_STDOUT: Final = "stdout"
# Subclasses before their base classes: the first match counts.
_ADVICE: tuple[tuple[type[ShoalError], str], ...] = (
    (
        TlsFailed,
        (
            "--tls-ca names the authority to trust, --tls-name the name in its certificate; "
            "without "
            "such options TLS is not used"
        ),
    ),
    (
        CannotConnect,
        "is it running? Start one with `shoal up`, or name another with --address host:port "
        "(--tls or --tls-ca if it uses TLS, "
        "with --tls-cert and --tls-key if it requires a client certificate)",
    ),
    (ModelNotFound, "`shoal models` lists the models that workers have"),
    (
        ModelUnreachable,
        (
            "`shoal models` lists the models that workers have on disk; `shoal up --model` adds a "
            "folder"
        ),
    ),
    (ModelBroken, "`shoal models show MODEL` shows why it cannot be loaded"),
    (InputTooLong, "truncate it with --truncation end, or choose a model for longer texts"),
    (TaskNotSupported, "`shoal models show MODEL` lists its tasks"),
    (Overloaded, "the mesh is overloaded: try again later, or with a longer --timeout"),
    (NoCapacity, "`shoal status` shows the workers; without one, nothing can be answered"),
    (DeadlinePassed, "allow more time with --timeout SECONDS"),
    (
        Unauthenticated,
        (
            "give a token in the environment variable SHOAL_TOKEN, or a certificate with "
            "--tls-cert "
            "and --tls-key"
        ),
    ),
    (
        PermissionDenied,
        (
            "use another token or certificate: `models load`, `evict`, `pin`, `alias set`, "
            "`migrate`, `status`, `top` and `explain` require the role admin"
        ),
    ),
    (InternalError, "this is a fault of the mesh; its logs say more under the request id"),
)


class InputError(Exception):
    """A file or argument of the command cannot be used; the message says which and why."""


@contextmanager
def exit_on_failure() -> Iterator[None]:
    """Print a ShoalError, InputError or OSError with advice to stderr, and exit with status 1."""
    try:
        yield
        sys.stdout.flush()  # A full disk behind stdout is an error of the command.
    except BrokenPipeError:
        raise  # The reader of stdout has gone; typer ends quietly.
    except ShoalError as error:
        details = [f"reason {error.reason}"]
        details += [f"field {error.field}"] if error.field else []
        details += [f"request {error.request_id}"] if error.request_id else []
        print_error(
            error.message, [*getattr(error, "__notes__", []), ", ".join(details)], _advice(error)
        )
        raise typer.Exit(1) from None
    except InputError as error:
        print_error(str(error), [], "")
        raise typer.Exit(1) from None
    except OSError as error:
        report_os_error(error)
        raise typer.Exit(1) from None


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Surround the whole program: exit with status 1 and one line on stderr if stdout cannot be
    written. That includes pages of help, and output that is still buffered when a command exits.
    """
    if sys.stderr is None:  # Closed by the caller; libraries write there without looking.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print_error("stdout is closed", [], "")
        sys.exit(1)
    sys.stdout = cast("TextIO", _NamedStdout(sys.stdout))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        if error.filename != _STDOUT:
            raise
        report_os_error(error)
        sys.exit(1)


class _NamedStdout:
    """Writes to stdout, and raises OSError with its name, as errors of files have theirs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _naming_stdout():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with _naming_stdout():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with _naming_stdout():
            self._stream.flush()


@contextmanager
def _naming_stdout() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = _STDOUT
        raise


def report_os_error(error: OSError) -> None:
    """Print an error with the name of its file, without its number."""
    print_error(
        f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error),
        getattr(error, "__notes__", []),
        "",
    )
    if error.filename == _STDOUT:
        _discard_stdout()


def _discard_stdout() -> None:
    """Let the flush at the end of the program succeed, which would report the error again."""
    with suppress(OSError, ValueError):  # stdout may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _advice(error: ShoalError) -> str:
    if error.field.endswith(".labels"):
        return "give each label with --label; `shoal models show MODEL` lists a model's own labels"
    return next((advice for kind, advice in _ADVICE if isinstance(error, kind)), "")

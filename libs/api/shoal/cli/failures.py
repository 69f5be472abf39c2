"""Reports of failures of commands: a message on stderr and exit status 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
        if not _is_of_stdout(error):
            # Without the error number.
            print_error(
                f"{error.filename}: {error.strerror}"
                if error.filename and error.strerror
                else str(error),
                getattr(error, "__notes__", []),
                "",
            )
            raise typer.Exit(1) from None
        _report_stdout(error)
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
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        _report_stdout(error)
        sys.exit(1)


def _is_of_stdout(error: OSError) -> bool:
    """Return whether stdout caused an error: files name themselves, and stdout keeps the output
    that it could not write, so that it fails again.
    """
    if error.filename is not None:
        return False
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False


def _report_stdout(error: OSError) -> None:
    print_error(f"stdout: {error.strerror or error}", getattr(error, "__notes__", []), "")
    _discard_stdout()


def _discard_stdout() -> None:
    """Let the interpreter's own flush at its end succeed, which would print the error again."""
    with suppress(OSError, ValueError):  # stdout may not be a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _advice(error: ShoalError) -> str:
    if error.field.endswith(".labels"):
        return "give each label with --label; `shoal models show MODEL` lists a model's own labels"
    return next((advice for kind, advice in _ADVICE if isinstance(error, kind)), "")

"""What every command that talks to the mesh has in common: its connection options, and how its errors are told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer

from shoal.addresses import DEFAULT_ADDRESS
from shoal.cli.console import complain
from shoal.client import Client
from shoal.errors import (
    CannotConnect,
    DeadlinePassed,
    InputTooLong,
    InternalError,
    ModelBroken,
    ModelNotFound,
    NoCapacity,
    Overloaded,
    PermissionDenied,
    ShoalError,
    TaskNotSupported,
    TlsFailed,
    Unauthenticated,
)
from shoal.trust import Tls, TokenFile

PANEL = "Connection"
# How long a router may take to say that it is there, before a command says that none is.
REACH_SECONDS = 3.0

# Most special first: the first class that fits speaks.
_ADVICE: tuple[tuple[type[ShoalError], str], ...] = (
    (
        TlsFailed,
        "--tls-ca names the authority to trust, --tls-name the name in its certificate; without such options TLS is not used",
    ),
    (
        CannotConnect,
        "is it running? Start one with `shoal up`, or name another with --address host:port (--tls or --tls-ca if it uses TLS, "
        "with --tls-cert and --tls-key if it wants to see a certificate)",
    ),
    (ModelNotFound, "`shoal models` lists the models that workers have"),
    (ModelBroken, "`shoal models show MODEL` says where it failed"),
    (InputTooLong, "cut it with --truncation end, or choose a model that takes longer texts"),
    (TaskNotSupported, "`shoal models show MODEL` lists what it can do"),
    (Overloaded, "the mesh is busy: try again later, or with a longer --timeout"),
    (NoCapacity, "`shoal status` shows the workers; without one, nothing can be answered"),
    (DeadlinePassed, "allow more time with --timeout SECONDS"),
    (Unauthenticated, "give a token in the environment variable SHOAL_TOKEN, or a certificate with --tls-cert and --tls-key"),
    (
        PermissionDenied,
        "another token or certificate may: `models load`, `evict`, `pin`, `status`, `top` and `explain` are for admins",
    ),
    (InternalError, "this is a fault of the mesh; its logs have more under the request id"),
)

Reach = Callable[[], Client]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class InputError(Exception):
    """A file or argument of the command cannot be used; the message says why and where."""


def connect(
    *,
    address: Annotated[
        str, typer.Option(envvar="SHOAL_ADDRESS", help="Router, host:port; several with commas.", rich_help_panel=PANEL)
    ] = DEFAULT_ADDRESS,
    tenant: Annotated[
        str, typer.Option(envvar="SHOAL_TENANT", help="Who is asking, for fair queueing.", rich_help_panel=PANEL)
    ] = "",
    timeout: Annotated[float, typer.Option(help="Seconds for one request.", rich_help_panel=PANEL)] = 60.0,
    token: Annotated[
        str, typer.Option(envvar="SHOAL_TOKEN", help="Bearer token; better in the environment.", rich_help_panel=PANEL)
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(envvar="SHOAL_TOKEN_FILE", help="File with the bearer token.", rich_help_panel=PANEL)
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", envvar="SHOAL_TLS", help="Encrypt, with the system's certificates.", rich_help_panel=PANEL)
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="SHOAL_TLS_CA", help="PEM file of the authority to trust.", rich_help_panel=PANEL)
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="SHOAL_TLS_CERT", help="PEM file of our certificate.", rich_help_panel=PANEL)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="SHOAL_TLS_KEY", help="PEM file of its key.", rich_help_panel=PANEL)
    ] = None,
    tls_name: Annotated[
        str,
        typer.Option(envvar="SHOAL_TLS_NAME", help="Name in the router's certificate, if not the address'.", rich_help_panel=PANEL),
    ] = "",
) -> Client:
    """A client of the mesh that the options name. Its parameters are the options of every command."""
    try:
        secured = Tls(tls_ca, tls_cert, tls_key, tls_name) if tls_ca or tls_cert or tls_key or tls_name else tls
        bearer = token or (TokenFile(token_file) if token_file else "")
        return Client(address, tenant=tenant, timeout=timeout, token=bearer, tls=secured)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter gives the client that the options of `connect`, which are added to its own, ask for.

    A command calls it when it has looked at its own options, so that wrong ones are told without a router.
    """
    theirs = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    ours = list(inspect.signature(connect, eval_str=True).parameters.values())

    @wraps(command)
    def run(**values: object) -> None:
        options = {parameter.name: values.pop(parameter.name) for parameter in ours}
        with told(), connect(**options) as client:  # type: ignore[arg-type]
            command(lambda: _reached(client), **values)

    del run.__wrapped__
    take_parameters(run, [*theirs, *ours])
    return run


def take_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Makes these the options of a command that takes keywords: typer reads them from the signature."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _reached(client: Client) -> Client:
    """Fails soon when no router is there; a call that was under way would be worth the retries of a whole timeout."""
    try:
        client.healthy(timeout=REACH_SECONDS)
    except CannotConnect:
        raise
    except DeadlinePassed as passed:
        if isinstance(passed.earlier, CannotConnect):
            raise passed.earlier from None  # The last try had too little time to find out why.
        raise CannotConnect(f"no router answers at {client.address} within {REACH_SECONDS:g} s") from None
    except ShoalError:
        pass  # Somebody is there. What it has against us, the command's own call will say better.
    return client


@contextmanager
def told() -> Iterator[None]:
    """Failures become words on stderr and exit code 1."""
    try:
        yield
    except BrokenPipeError:
        raise  # The reader of our output has gone; typer ends quietly.
    except ShoalError as error:
        details = [f"reason {error.reason}"]
        details += [f"field {error.field}"] if error.field else []
        details += [f"request {error.request_id}"] if error.request_id else []
        complain(error.message, [*getattr(error, "__notes__", []), ", ".join(details)], _advice(error))
        raise typer.Exit(1) from None
    except InputError as error:
        complain(str(error), [], "")
        raise typer.Exit(1) from None
    except OSError as error:
        # Without the number that only a C program can use.
        complain(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error), [], "")
        raise typer.Exit(1) from None


def _advice(error: ShoalError) -> str:
    return next((advice for kind, advice in _ADVICE if isinstance(error, kind)), "")

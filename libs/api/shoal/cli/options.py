"""The connection options of every command that talks to the mesh, and groups of options that
commands share.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, is_typeddict

import typer

from shoal.cli.failures import exit_on_failure
from shoal.client import AsyncClient, Client
from shoal.errors import (
    CannotConnect,
    DeadlinePassed,
    InvalidInput,
    ModelNotFound,
    ModelUnreachable,
    ShoalError,
)
from shoal.options import Option, declared_options
from shoal.transport.addresses import DEFAULT_ADDRESS, DEFAULT_PORT
from shoal.transport.trust import Tls, TokenFile

PANEL = "Connection"
FILES: Final = "Input and output"
SERVING: Final = "Serving"
# A command fails if every router refuses its connection for this time.
REACH_SECONDS = 3.0
# A router that accepts connections and is busy gets this much more time to answer.
BUSY_ROUTER_SECONDS = 7.0

_CALL_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "adapter": {"rich_help_panel": SERVING},
    "on_invalid": {"rich_help_panel": FILES},
    "pool": {"rich_help_panel": SERVING},
    "priority": {"rich_help_panel": SERVING},
    "truncation": {},
    "window_overlap": {"rich_help_panel": SERVING, "min": 0},
}
"""The options of `shoal.options` that commands have, and how their help shows them. The others are
for programs.
"""

C = TypeVar("C", Client, AsyncClient)
OpenClient = Callable[[], Client]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

TokenOption = Annotated[
    str,
    typer.Option(
        envvar="SHOAL_TOKEN",
        help="Bearer token; better in the environment.",
        rich_help_panel=PANEL,
    ),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="SHOAL_TOKEN_FILE", help="File with the bearer token.", rich_help_panel=PANEL
    ),
]


def given_token(token: str, file: Path | None) -> str | TokenFile:
    """Return the token of the options; empty without one. Raises ValueError."""
    return token or (TokenFile(file) if file else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The connection options."""

    address: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_ADDRESS",
            help="Router, host:port; several separated by commas.",
            rich_help_panel=PANEL,
        ),
    ] = DEFAULT_ADDRESS
    tenant: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_TENANT", help="Tenant, for fair queueing.", rich_help_panel=PANEL
        ),
    ] = ""
    timeout: Annotated[
        float, typer.Option(help="Seconds for one request.", rich_help_panel=PANEL)
    ] = 60.0
    token: TokenOption = ""
    token_file: TokenFileOption = None
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            envvar="SHOAL_TLS",
            help="Encrypt, with the system's certificates.",
            rich_help_panel=PANEL,
        ),
    ] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="SHOAL_TLS_CA", help="PEM file of the authority to trust.", rich_help_panel=PANEL
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="SHOAL_TLS_CERT",
            help="PEM file of the client certificate.",
            rich_help_panel=PANEL,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="SHOAL_TLS_KEY", help="PEM file of its key.", rich_help_panel=PANEL),
    ] = None
    tls_name: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_TLS_NAME",
            help="Name in the router's certificate, if not that of the address.",
            rich_help_panel=PANEL,
        ),
    ] = ""

    def open(self) -> Client:
        """Return a client with these options, not connected yet. Raises BadParameter."""
        return self._open(Client)

    def open_async(self, **options: Any) -> AsyncClient:
        """Return a client for asyncio, with further options. Raises BadParameter."""
        return self._open(AsyncClient, **options)

    def _open(self, kind: type[C], **options: Any) -> C:
        try:
            has_tls_options = self.tls_ca or self.tls_cert or self.tls_key or self.tls_name
            if not self.timeout > 0:
                raise ValueError(f"--timeout must be above 0 seconds, not {self.timeout:g}")
            tls = (
                Tls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)
                if has_tls_options
                else self.tls
            )
            return kind(
                self.address,
                tenant=self.tenant,
                timeout=self.timeout,
                token=given_token(self.token, self.token_file),
                tls=tls,
                **options,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of `ConnectionOptions` after its own; it reports failures
    as `exit_on_failure` does.

    Its first parameter is an OpenClient, to be called after the command has checked its own
    options, so that errors in them are reported without a router. A parameter of a dataclass type,
    or of options of calls, is a group: each field becomes an option of the command.
    """
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    groups = _groups(parameters)

    @wraps(command)
    def run(**values: Any) -> None:
        connection = _group(ConnectionOptions, values)
        arguments = {name: _group(group, values) for name, group in groups.items()}
        with exit_on_failure(), connection.open() as client:
            try:
                command(lambda: reachable(client), **values, **arguments)
            except (ModelNotFound, ModelUnreachable, InvalidInput) as error:
                if not isinstance(error, InvalidInput) or error.field == "model":
                    _suggest(client, values.get("model"), error)
                raise

    del run.__wrapped__
    set_parameters(run, _keywords([*_expanded(parameters, groups), *_options(ConnectionOptions)]))
    return run


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each field of its groups, as `connected` has them; it
    reports failures as `exit_on_failure` does.
    """
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    groups = _groups(parameters)

    @wraps(command)
    def run(**values: Any) -> None:
        arguments = {name: _group(group, values) for name, group in groups.items()}
        with exit_on_failure():
            command(**values, **arguments)

    del run.__wrapped__
    set_parameters(run, _keywords(_expanded(parameters, groups)))
    return run


def _groups(parameters: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """Return the parameters that are groups of options, with their types."""
    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    return {
        name: kind for name, kind in annotations.items() if is_dataclass(kind) or is_typeddict(kind)
    }


def _expanded(
    parameters: Sequence[inspect.Parameter], groups: dict[str, Any]
) -> Iterator[inspect.Parameter]:
    """Yield the parameters, with the fields of groups instead of the groups."""
    for parameter in parameters:
        if parameter.name in groups:
            yield from _options(groups[parameter.name])
        else:
            yield _shown(parameter)


def _keywords(parameters: Iterable[inspect.Parameter]) -> list[inspect.Parameter]:
    return [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]


def _options(group: type[Any]) -> Sequence[inspect.Parameter]:
    if not is_typeddict(group):
        return list(map(_shown, inspect.signature(group, eval_str=True).parameters.values()))
    return [
        _shown(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=Annotated[kind, option],
            )
        )
        for name, (kind, option) in declared_options(group).items()
        if name in _CALL_OPTIONS
    ]


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter that is an `Option` of calls as an option of typer; others as they are."""
    kind, *metadata = get_args(parameter.annotation) or (None,)
    if not metadata or not isinstance(metadata[0], Option):
        return parameter
    name = f"--{parameter.name.replace('_', '-')}"
    option = typer.Option(name, help=metadata[0].help, **_CALL_OPTIONS[parameter.name])
    return parameter.replace(annotation=Annotated[kind, option])


def _group(group: type[Any], values: dict[str, Any]) -> Any:
    """Return the options of a group, which are removed from `values`."""
    if is_typeddict(group):
        return {name: values.pop(name) for name in declared_options(group) if name in values}
    return group(**{field.name: values.pop(field.name) for field in fields(group)})


def set_parameters(command: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Make these the options of a command that takes keywords: typer reads them from the
    signature.
    """
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def reachable(client: Client) -> Client:
    """Raise CannotConnect soon if no router answers, instead of retrying for the whole timeout of
    the command's request.
    """
    try:
        client.healthy(timeout=REACH_SECONDS)
    except CannotConnect as error:
        raise _explained(error, client.address) from None
    except DeadlinePassed as passed:
        if isinstance(
            passed.earlier, CannotConnect
        ):  # The last try had too little time to find the cause.
            raise _explained(passed.earlier, client.address) from None
        _wait_for_answer(client)
    except ShoalError:
        pass  # A router answers. The command's own request reports its error better.
    return client


def _wait_for_answer(client: Client) -> None:
    """Wait longer for a server that refuses no connection, because a busy router answers late.

    Raises CannotConnect if it does not answer, or is a web server.
    """
    silent = CannotConnect(
        f"no router answers at {client.address} within {REACH_SECONDS + BUSY_ROUTER_SECONDS:g} s"
    )
    explained = _explained(silent, client.address)
    if explained is not silent:
        raise explained from None
    try:
        client.healthy(timeout=BUSY_ROUTER_SECONDS)
    except (CannotConnect, DeadlinePassed):
        raise silent from None
    except ShoalError:
        pass


def _explained(error: CannotConnect, addresses: str) -> CannotConnect:
    """Return the error, or one that says that an address is a web server's."""
    for address in addresses.split(","):
        if _speaks_http(address):
            message = (
                f"{address} speaks HTTP, as the edge and the console do; name the router's port "
                "of gRPC"
            )
            return CannotConnect(f"{message}, {DEFAULT_PORT} where `shoal up` has chosen it")
    return error


def _speaks_http(address: str) -> bool:
    """Return True if a server answers HTTP/1.1 there, which a router does not."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return False
    with (
        suppress(OSError),
        socket.create_connection(
            (host.strip("[]"), int(port)), timeout=REACH_SECONDS
        ) as connection,
    ):
        connection.sendall(b"HEAD / HTTP/1.1\r\nHost: shoal\r\nConnection: close\r\n\r\n")
        return connection.recv(7) == b"HTTP/1."
    return False


def _suggest(client: Client, model: object, error: ShoalError) -> None:
    """Add the names that the mesh has and that are most like a model's that it does not know."""
    if not isinstance(model, str):
        return
    with suppress(ShoalError):
        names = {
            one.model.lower(): one.model
            for one in client.models.list()
            if one.model != model and one.state != "failed"
        }
        by_name = {name.rpartition("/")[2]: whole for name, whole in names.items()}
        found = get_close_matches(model.lower(), names, n=3) or get_close_matches(
            model.lower().rpartition("/")[2], by_name, n=3
        )
        if found:
            error.add_note(
                f"did you mean {' or '.join({**by_name, **names}[name] for name in found)}?"
            )

"""`shoal certs` and `shoal redis-acl`: certificates and Redis users, so that the parts of a mesh
trust only each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from shoal.cli.console import SafeConsole, emit
from shoal.cli.failures import report_os_error

from libs.errors import InvalidInput, ShoalError
from libs.queue.connection.acl import acl_file
from services.local.trust.certificates import (
    CALLERS,
    LEAF_DAYS,
    SERVERS,
    Issued,
    Party,
    caller_variables,
    edge_variables,
    issue_all,
    server_variables,
)

_HELP_NAME = (
    "A further certificate: a role, or role/name, such as client/search for the tenant `search`. "
    "May be repeated."
)
_HELP_HOST = (
    "A DNS name or IP address of router and scheduler, in addition to loopback. May be repeated."
)
_HELP_FORCE = (
    "Replace an existing authority: every process that trusts it then needs the new ca.pem."
)
_HELP_ADMIN = (
    "File with the password of the user `default`, who may run every command. Without it that "
    "user is disabled."
)


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory for certificates and keys.")
    ],
    name: Annotated[list[str] | None, typer.Option(help=_HELP_NAME)] = None,
    host: Annotated[list[str] | None, typer.Option(help=_HELP_HOST)] = None,
    days: Annotated[float, typer.Option(help="Validity of certificates, in days.")] = LEAF_DAYS,
    trust_domain: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_TRUST_DOMAIN", help="The same as SHOAL_TRUST_DOMAIN of the servers."
        ),
    ] = "shoal",
    force: Annotated[bool, typer.Option("--force", help=_HELP_FORCE)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Create a development authority and certificates for all parts of a mesh. When they exist,
    renew the certificates.
    """
    with _errors_on_stderr():
        directory = directory.absolute()
        parties = [Party.parse(text) for text in name or []]
        is_new, issued = issue_all(
            directory, parties, hosts=host or [], days=days, trust_domain=trust_domain, force=force
        )
        if as_json:
            emit(_document(directory, is_new, issued))
        else:
            _show(directory, is_new, issued)


def redis_acl(
    password_file: Annotated[
        Path | None, typer.Option(help="File with the password of router and scheduler.")
    ] = None,
    scheduler_password_file: Annotated[
        Path | None, typer.Option(help="File with the scheduler's password, if it differs.")
    ] = None,
    admin_password_file: Annotated[Path | None, typer.Option(help=_HELP_ADMIN)] = None,
) -> None:
    """Print the file for Redis' `aclfile`: the users shoal-router and shoal-scheduler, with no more
    rights than they need.
    """
    with _errors_on_stderr():
        router = _password(password_file)
        scheduler = _password(scheduler_password_file) or router
        typer.echo(
            acl_file(router=router, scheduler=scheduler, admin=_password(admin_password_file)),
            nl=False,
        )
        notes = SafeConsole(stderr=True, soft_wrap=True, highlight=False)
        if router is None:
            notes.print("Both users are disabled: set their password with --password-file.")
        else:
            notes.print(
                "Passwords are printed only as digests. Set aclfile in redis.conf. Routers and "
                "schedulers then need"
            )
            notes.print(
                (
                    "  SHOAL_REDIS_URL=rediss://shoal-router@HOST:PORT/0 (shoal-scheduler@ for "
                    "schedulers)"
                ),
                markup=False,
            )
            notes.print("  SHOAL_REDIS_PASSWORD_FILE=FILE")


def _document(directory: Path, is_new: bool, issued: Sequence[Issued]) -> dict[str, object]:
    return {
        "authority": str(directory / "ca.pem"),
        "is_new": is_new,
        "certificates": [
            {
                "role": one.party.role,
                "name": one.party.name,
                "uri": one.uri,
                "certificate": str(one.certificate),
                "key": str(one.key),
                "ends": one.ends.isoformat(timespec="seconds"),
                "environment": _variables(directory, one),
            }
            for one in issued
        ],
    }


def _variables(directory: Path, one: Issued) -> dict[str, str]:
    if one.party.role == "redis":
        return {}  # redis.conf has tls-cert-file, tls-key-file and tls-ca-cert-file
    if one.party.role == "edge":
        return server_variables(directory, one.party.stem) | edge_variables(directory, "client")
    make = server_variables if one.party.role in SERVERS else caller_variables
    return make(directory, one.party.stem)


def _show(directory: Path, is_new: bool, issued: Sequence[Issued]) -> None:
    console = SafeConsole(
        width=None if sys.stdout.isatty() else 200, markup=False, highlight=False, soft_wrap=True
    )
    table = Table("role", "identity", "certificate", "key")
    for one in issued:
        table.add_row(one.party.role, one.uri, one.certificate.name, one.key.name)
    console.print(f"{'New authority' if is_new else 'Existing authority'}: {directory / 'ca.pem'}")
    console.print(table)
    ends = min(one.ends for one in issued)
    console.print(
        f"The certificates expire on {ends:%Y-%m-%d %H:%M} UTC. Run `shoal certs {directory}` "
        "again before then: running"
    )
    console.print(
        "processes load the new ones by themselves. Use them for development only: ca.key can "
        "sign any certificate."
    )
    console.print("\nEnvironment")
    for role in (*SERVERS, *CALLERS):
        one = next(one for one in issued if one.party.role == role)
        console.print(f"  {role}")
        for variable, value in _variables(directory, one).items():
            console.print(f"    {variable}={value}")


def _password(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        password = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the password file {path} cannot be read: {error}") from None
    if not password:
        raise InvalidInput(f"the password file {path} is empty")
    return password


@contextmanager
def _errors_on_stderr() -> Iterator[None]:
    try:
        yield
    except ShoalError as error:
        SafeConsole(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(error.message)}")
        raise typer.Exit(1) from None
    except OSError as error:
        report_os_error(error)
        raise typer.Exit(1) from None

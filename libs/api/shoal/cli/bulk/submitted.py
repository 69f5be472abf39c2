"""Jobs that an edge runs: submits them, and asks for their state, over HTTP."""

from __future__ import annotations

import json
import os
import re
import ssl
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import typer
from rich.text import Text

from shoal.bulk.places import absolute
from shoal.bulk.spec import BulkRecipe
from shoal.cli.bulk.arguments import JobFiles, JobLimitOptions
from shoal.cli.bulk.running import cost_line, format_time, rows_of_total
from shoal.cli.console import emit, facts, note, show, table
from shoal.cli.failures import InputError
from shoal.cli.options import TokenFileOption, TokenOption, given_token
from shoal.transport.addresses import is_local
from shoal.transport.trust import Trust, flag

PANEL: Final = "Edge"
DEFAULT_EDGE: Final = "http://127.0.0.1:8080"
ACTIVE: Final = ("queued", "running")
MAX_PAGE: Final = 100
_ID: Final = re.compile(r"job_[0-9a-f]{40}")
_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeAccess:
    """The options of commands that call an edge."""

    edge: Annotated[
        str,
        typer.Option(
            envvar="SHOAL_EDGE",
            metavar="URL",
            help="URL of the edge that runs submitted jobs.",
            rich_help_panel=PANEL,
        ),
    ] = DEFAULT_EDGE
    edge_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="SHOAL_EDGE_CA",
            help="PEM file of the authority to trust for https.",
            rich_help_panel=PANEL,
        ),
    ] = None
    edge_token: TokenOption = ""
    edge_token_file: TokenFileOption = None
    edge_tenant: Annotated[
        str,
        typer.Option(envvar="SHOAL_TENANT", help="Tenant that pays.", rich_help_panel=PANEL),
    ] = ""

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Return the answer of the edge. Raises InputError."""
        if not self.edge.startswith(("http://", "https://")):
            raise typer.BadParameter(f"--edge is {self.edge!r}; it must be a URL of http or https")
        try:
            headers = self._headers()
        except ValueError as error:
            raise InputError(str(error)) from None
        context = None
        if self.edge.startswith("https://"):
            context = ssl.create_default_context(cafile=self.edge_ca)
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.edge.rstrip('/')}/v1/jobs{path}"
        # The scheme was checked, so that no file is read.
        request = Request(url, data, headers, method=method)  # noqa: S310
        try:
            opener = build_opener(_NoRedirects, HTTPSHandler(context=context))
            with opener.open(request, timeout=_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            with error:
                raise InputError(_message(error, self.edge)) from None
        except URLError as error:
            raise InputError(
                f"no edge answers at {self.edge}: {error.reason}. `shoal up` starts one; --edge or "
                "SHOAL_EDGE names another"
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"the edge at {self.edge} did not answer: {error}") from None

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        trust = Trust(token=given_token(self.edge_token, self.edge_token_file))
        if found := dict(trust.metadata()):
            if not self._is_private():
                raise InputError(
                    f"the token would be sent unencrypted to {self.edge}: use https, or set "
                    "SHOAL_TOKEN_WITHOUT_TLS=1 if something else protects the network"
                )
            headers |= found
        if self.edge_tenant:
            headers["x-shoal-tenant"] = self.edge_tenant
        return headers

    def _is_private(self) -> bool:
        """Return whether a token may be sent to the edge."""
        host = urlsplit(self.edge).hostname or ""
        return (
            self.edge.startswith("https://")
            or is_local(f"[{host}]" if ":" in host else host)
            or flag(os.environ, "SHOAL_TOKEN_WITHOUT_TLS")
        )


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirects, because the token would be sent to their targets."""

    def redirect_request(self, *_: Any) -> None:
        return None


def is_submitted(output: str) -> bool:
    """Return whether an argument is the id of a submitted job, and not an output location."""
    return _ID.fullmatch(output) is not None


def submit(
    made: BulkRecipe, files: JobFiles, limits: JobLimitOptions, edge: EdgeAccess, *, as_json: bool
) -> None:
    """Submit a job and print it. Raises InputError."""
    if limits.price is not None:
        raise typer.BadParameter(
            "the edge has the prices of submitted jobs (SHOAL_JOBS_PRICES)", param_hint="--price"
        )
    body = {
        "recipe": asdict(made),
        "input": absolute(files.source),
        "output": absolute(files.output),
        "limits": limits.given(),
    }
    job = edge.call("POST", "", body)
    if as_json:
        emit(job)
        return
    show(Text(job["id"]))
    note(f"the job waits for a free slot of the edge: shoal job watch {job['id']}")


def act(identity: str, action: str, edge: EdgeAccess, limits: JobLimitOptions | None = None) -> Any:
    """Ask for a change of a job, and return the job. Raises InputError."""
    body = None if limits is None else {"limits": limits.given()}
    return edge.call("POST", f"/{identity}/{action}", body)


def find(identity: str, edge: EdgeAccess) -> dict[str, Any]:
    """Return a submitted job. Raises InputError."""
    return edge.call("GET", f"/{identity}")


def print_job(job: dict[str, Any], *, as_json: bool) -> None:
    """Print the state of a submitted job to stdout."""
    if as_json:
        emit(job)
        return
    counts, progress = job["counts"], job["progress"]
    left = progress.get("seconds_left")
    rates = [
        f"{progress.get('rows_per_second', 0):,.0f} rows/s",
        f"{progress.get('tokens_per_second', 0):,.0f} tokens/s",
        "" if left is None else f"{timedelta(seconds=round(left))} left",
    ]
    rows = {
        "state": job["status"],
        "reason": job["error"] or "",
        "model": job["recipe"]["model"],
        "verb": job["recipe"]["verb"],
        "input": job["input"],
        "output": job["output"],
        "rows": rows_of_total(counts["rows"], counts["total_rows"]),
        "failed": f"{counts['failed_rows']:,}" if counts["failed_rows"] else "",
        "tokens": f"{counts['tokens']:,}",
        "cost": cost_line(job["cost"], progress.get("whole_cost")) if job["cost"] else "",
        "embedding id": job["embedding_id"] or "",
        "progress": ", ".join(filter(None, rates)) if progress else "",
        "submitted": format_time(job["created_at"]),
        "next": _advice(job),
    }
    made = facts(f"job {job['id']}")
    for name, value in rows.items():
        if value:
            made.add_row(name, value)
    show(made)


def print_submitted(edge: EdgeAccess, *, as_json: bool) -> None:
    """Print the newest submitted jobs of the caller's tenant. Raises InputError."""
    page = edge.call("GET", f"?limit={MAX_PAGE}")
    if as_json:
        emit(page["data"])
        return
    if not page["data"]:
        show(Text("no submitted jobs: shoal job submit makes one"))
        return
    made = table("", "job", "state", "rows", "failed", "model", "output", right=("rows", "failed"))
    for job in page["data"]:
        counts = job["counts"]
        made.add_row(
            job["id"],
            job["status"],
            rows_of_total(counts["rows"], counts["total_rows"]),
            f"{counts['failed_rows']:,}",
            job["recipe"]["model"],
            job["output"],
        )
    show(made)
    if page["has_more"]:
        note(f"these are the newest {MAX_PAGE}; GET /v1/jobs lists the others")


def _advice(job: dict[str, Any]) -> str:
    if job["status"] in ("paused", "failed", "expired"):
        return f"shoal job resume {job['id']}"
    if job["status"] == "completed" and job["counts"]["failed_rows"]:
        return f"shoal job results {job['id']} --failed; shoal job retry {job['id']}"
    return f"shoal job results {job['id']}" if job["status"] == "completed" else ""


def _message(error: HTTPError, edge: str) -> str:
    """Return the message of an answer that is an error."""
    try:
        if location := error.headers["location"]:
            found = urlsplit(urljoin(edge, location))
            target = f"{found.scheme}://{found.netloc.rpartition('@')[2]}"
            return (
                f"{edge} redirects to {target}, and no redirect is followed: name the edge itself "
                "with --edge or SHOAL_EDGE"
            )
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return f"the edge answered {error.code} {error.reason}"
    return f"the edge refuses this: {message}"

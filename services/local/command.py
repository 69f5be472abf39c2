"""`shoal up`: the mesh in the foreground until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from shoal.cli.console import SafeConsole

from libs.errors import NoCapacity, ShoalError
from services.local.devices import accelerators, layout
from services.local.mesh import LocalMesh, running
from services.local.requirements import check_installed
from services.local.settings import (
    Settings,
    default_model,
    example_model,
    known_models,
    known_stores,
)

DEFAULT_HTTP_PORT: Final = 8080
_HELP_MODEL = (
    "A model to serve: org/name=/path/to/checkpoint, or a folder with subfolders <org>/<name>. "
    "May be repeated."
)
_HELP_DEFAULT = (
    "The model of requests that name none, such as TEI's /embed: org/name, or "
    "org/name=/path/to/checkpoint. All models of the mesh "
    "can still be named."
)

_HELP_DEVICE = (
    "auto (all accelerators, one for each worker; without any, the CPU), cpu, cuda, or certain "
    "accelerators, such as cuda:0,2."
)
_HELP_LOGS = (
    "Write the logs of all processes to this folder. Default: a temporary folder, which is kept "
    "if the mesh fails."
)
_HELP_METRICS = (
    "Serve all processes' metrics as one page, http://HOST:PORT/metrics; port 0 takes a free "
    "one. Default: off."
)


def up(
    default: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=_HELP_DEFAULT, show_default=False)
    ] = None,
    *,
    port: Annotated[
        int, typer.Option(help="Port of the router on 127.0.0.1; 0 takes a free one.")
    ] = 50051,
    http_port: Annotated[
        int | None,
        typer.Option(
            help=(
                "Port of HTTP on 127.0.0.1; 0 takes a free one. Default: 8080, or with --port 0 "
                "a free one."
            )
        ),
    ] = None,
    console: Annotated[
        bool,
        typer.Option(
            help=(
                "Show the console in browsers at the port of HTTP (docs/console.md); not with "
                "--tls."
            )
        ),
    ] = True,
    http: Annotated[
        bool,
        typer.Option(help="Serve HTTP: the APIs of OpenAI, Cohere and others (docs/http.md)."),
    ] = True,
    tei_grpc_port: Annotated[
        int | None,
        typer.Option(
            help=(
                "Port of TEI's gRPC API on 127.0.0.1 (docs/http.md); 0 takes a free one. "
                "Default: off."
            )
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers. Default: one per accelerator, or one per core without any."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads of each worker. Default: the cores, divided evenly among the workers."
        ),
    ] = None,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency", help="Start one worker with all cores: lowest latency, less throughput."
        ),
    ] = False,
    model: Annotated[list[str] | None, typer.Option(help=_HELP_MODEL)] = None,
    device: Annotated[str, typer.Option(envvar="SHOAL_DEVICE", help=_HELP_DEVICE)] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Number format of the computation: auto, bfloat16, float32 or int8.")
    ] = "auto",
    scheduler: Annotated[
        bool, typer.Option(help="Let a scheduler decide which worker loads what.")
    ] = True,
    tls: Annotated[
        bool,
        typer.Option(
            "--tls",
            help="Use mutual TLS between all processes, with certificates made for this mesh.",
        ),
    ] = False,
    metrics_address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="SHOAL_METRICS_ADDRESS",
            help=_HELP_METRICS,
            show_default=False,
        ),
    ] = "",
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help=_HELP_LOGS)] = None,
) -> None:
    """Start Redis, a router, a scheduler, workers and HTTP on this machine, keep them running, and
    stop them on Ctrl-C.
    """
    out = SafeConsole(stderr=True)
    try:
        check_installed()
        found = accelerators(device, os.environ)
        count, each = layout(1 if latency else workers, threads, len(found))
        given = [default, *(model or [])] if default and "=" in default else model or []
        models, stores = known_models(given, os.environ), known_stores(os.environ)
        settings = Settings(
            port=port,
            http_port=_http_port(http_port, port) if http else None,
            tei_grpc_port=tei_grpc_port,
            workers=count,
            threads=each,
            models=models,
            stores=stores,
            default_model=default_model(default, models, stores) if default else "",
            dtype=dtype,
            device="cuda" if found else "cpu",
            accelerators=found[:count],
            has_scheduler=scheduler,
            metrics_address=metrics_address,
            keep_logs=keep_logs,
            tls=tls,
            has_console=console,
        )
        asyncio.run(_up(settings, out))
    except ShoalError as error:
        out.print(f"[red]error:[/red] {escape(error.message)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def _http_port(given: int | None, port: int) -> int:
    if given is not None:
        return given
    return DEFAULT_HTTP_PORT if port else 0


async def _up(settings: Settings, console: SafeConsole) -> None:
    """Run until a signal. Raises NoCapacity if the mesh does not start, or can no longer answer
    requests.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(_serve(settings, console))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not serving.done():
        console.print("stopping, after the calls in flight are answered")
        serving.cancel()
        await asyncio.wait({serving})
        console.print("stopped")
    elif (error := serving.exception()) is not None:
        raise error


async def _serve(settings: Settings, console: SafeConsole) -> None:
    starting = console.status(f"starting Redis, a router and {settings.workers} worker(s) ...")
    starting.start()
    try:
        async with running(
            settings,
            lambda message: console.print(message, markup=False, highlight=False, soft_wrap=True),
        ) as mesh:
            starting.stop()
            _greet(mesh, settings, console)
            raise NoCapacity(
                "no more requests can be answered: too many processes were given "
                f"up:\n{await mesh.supervisor.wait_for_failure()}"
            )
    finally:
        starting.stop()


def _greet(mesh: LocalMesh, settings: Settings, console: SafeConsole) -> None:
    entries = list(filter(None, settings.models.split(":")))
    names = [entry.partition("=")[0] if "=" in entry else f"those in {entry}" for entry in entries]
    model = example_model(settings.models, settings.stores, settings.default_model)
    console.print(
        f"[bold]Shoal is up[/bold] on {mesh.address}: {settings.workers} worker(s) x "
        f"{settings.threads} thread(s)"
    )
    if mesh.http_address:
        console.print(f"http    {_url(mesh)} (OpenAPI: {_url(mesh)}/openapi.json)", highlight=False)
        if mesh.has_console:
            console.print(f"console {_url(mesh)}/", highlight=False)
    if mesh.tei_grpc_address:
        console.print(
            f"tei     {mesh.tei_grpc_address} (tei.v1 over gRPC, with reflection)", highlight=False
        )
    if settings.accelerators:
        console.print(
            (
                f"devices {', '.join(f'cuda {name}' for name in settings.accelerators)}, one for "
                "each worker"
            ),
            highlight=False,
        )
    console.print(f"models  {', '.join(names) or 'none in folders'}", highlight=False)
    if settings.default_model:
        console.print(
            f"        requests that name none are for {settings.default_model}", highlight=False
        )
    if settings.stores:
        console.print(
            f"        any other model is downloaded from {settings.stores} on its first request",
            highlight=False,
        )
    if mesh.scheduler_address:
        console.print(f"scaler  {mesh.scheduler_address} (KEDA's external scaler)", highlight=False)
    if mesh.metrics_address:
        console.print(f"metrics http://{mesh.metrics_address}/metrics", highlight=False)
    console.print(f"logs    {mesh.logs}", highlight=False)
    if mesh.certificates:
        console.print(
            (
                f"tls     {mesh.certificates} (client.pem for inference; admin.pem also for "
                "status, loads and evictions)"
            ),
            highlight=False,
        )
    _print_examples(mesh, model, names, console)


def _print_examples(mesh: LocalMesh, model: str, names: list[str], console: SafeConsole) -> None:
    """Print commands that use the mesh, with `model`; if that is empty, how to add one."""
    if not model:
        what = (
            ""
            if names
            else "No model is available yet: add one with --model org/name=/path/to/checkpoint. "
        )
        console.print(f"{what}Ctrl-C stops the mesh.", highlight=False)
        return
    shell, python, grpcurl = _tls_arguments(mesh.certificates, "client")
    lines = [
        f'shoal encode {model} "Hello, mesh" --address {mesh.address}{shell}',
        (
            "python -c 'import shoal; "
            f'print(shoal.Client("{mesh.address}"{python}).encode("{model}", ["Hello, '
            "mesh\"]).dense.shape)'"
        ),
        f'grpcurl {grpcurl} -d \'{{"model": "{model}", "items": [{{"text": "Hello, mesh"}}]}}\' '
        f"{mesh.address} shoal.v1.InferenceService/Encode",
    ]
    if mesh.http_address:
        body = json.dumps({"model": model, "input": "Hello, mesh"})
        lines.append(
            f"curl -s{_curl(mesh.certificates)} {_url(mesh)}/v1/embeddings -d {shlex.quote(body)}"
        )
    if mesh.certificates:
        lines.append(
            f"shoal status --address {mesh.address}{_tls_arguments(mesh.certificates, 'admin')[0]}"
        )
    console.print("examples")
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops the mesh.")


def _url(mesh: LocalMesh) -> str:
    return f"http{'s' if mesh.certificates else ''}://{mesh.http_address}"


def _curl(certificates: Path | None) -> str:
    """Return the options of curl for a mesh with certificates."""
    if certificates is None:
        return ""
    ca, chain, key = (
        shlex.quote(str(certificates / name)) for name in ("ca.pem", "client.pem", "client.key")
    )
    return f" --cacert {ca} --cert {chain} --key {key}"


def _tls_arguments(certificates: Path | None, role: str) -> tuple[str, str, str]:
    """Return the arguments with which `shoal`, `shoal.Client` and grpcurl use TLS with the role's
    certificate, or plain text.
    """
    if certificates is None:
        return "", "", "-plaintext"
    files = [str(certificates / name) for name in ("ca.pem", f"{role}.pem", f"{role}.key")]
    ca, chain, key = map(shlex.quote, files)
    return (
        f" --tls-ca {ca} --tls-cert {chain} --tls-key {key}",
        f", tls=shoal.Tls({', '.join(map(json.dumps, files))})",
        f"-cacert {ca} -cert {chain} -key {key}",
    )

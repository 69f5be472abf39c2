"""`shoal simulate`: the cost of a trace of requests under each eviction policy on each fleet, and
of scaling a pool to zero. Only recording needs a mesh.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text
from shoal.cli.console import SafeConsole, bar, emit, note, print_error, show
from shoal.cli.failures import exit_on_failure
from shoal.cli.options import Json
from shoal.transport import addresses
from shoal.transport.trust import Tls
from typer.core import TyperGroup

from libs.catalog.pools import PoolSpec
from libs.errors import InvalidInput
from services.scheduler.simulate import record, report
from services.scheduler.simulate import scaling as scaled
from services.scheduler.simulate.engine import CLAIRVOYANT, SimulatedFleet, simulate
from services.scheduler.simulate.generate import GENERATORS, TraceShape
from services.scheduler.simulate.trace import (
    Trace,
    models_path,
    read_trace,
    write_models,
    write_trace,
)

DEFAULT_POLICIES: Final = ("lru", "gdsf", "cost", CLAIRVOYANT)
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[KMGT]I?)?)B?", re.IGNORECASE)
_RUN = "replay"


class _RunsByDefault(TyperGroup):
    """Makes `shoal simulate TRACE.csv` mean `shoal simulate replay TRACE.csv`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's Context is click's
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunsByDefault,
    add_completion=False,
    help="Replay requests through eviction policies and fleets. Without a command: replay.",
)


@app.command(_RUN)
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="[TRACE.csv]", help="Columns time_seconds, model, tokens."),
    ] = None,
    models_file: Annotated[
        Path | None,
        typer.Option(
            help="Costs of models: columns model, bytes, load_seconds."
            " Default: TRACE.models.csv, if it exists."
        ),
    ] = None,
    zipf: Annotated[
        float | None,
        typer.Option(metavar="SKEW", help="Generate a trace: popularity by Zipf's law."),
    ] = None,
    bursty: Annotated[
        bool, typer.Option("--bursty", help="Generate a trace: sessions of bursts.")
    ] = False,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Generate a trace: all models equally popular.")
    ] = False,
    models: Annotated[int, typer.Option(min=1, help="Models of a generated trace.")] = 80,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a generated trace.")] = 20_000,
    rate: Annotated[
        float, typer.Option(min=1e-6, help="Requests per second of a generated trace.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the first generated trace.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of generated traces; results are means over them.")
    ] = 3,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes for models on a worker, such as 24GiB. May be repeated."
            " Default: a quarter of all.",
        ),
    ] = None,
    workers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Workers of the fleet. May be repeated. Default: 1."),
    ] = None,
    host_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes for warm models in a worker's host memory.")
    ] = "0",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"May be repeated. Default: {', '.join(DEFAULT_POLICIES)}.", show_default=False
        ),
    ] = None,
    clients: Annotated[
        int,
        typer.Option(
            min=0,
            help="Maximum requests in flight; 0 for an open loop.",
        ),
    ] = 0,
    max_loads: Annotated[int, typer.Option(min=1, help="Concurrent loads on a worker.")] = 2,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of a forward pass.")
    ] = 16_384,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write the first generated trace to this file, and its models next to it."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the stalls to this file: .svg, .png or .pdf (needs matplotlib)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay requests through eviction policies and fleets, and compare their costs.

    Stall: seconds of loading that requests had to wait for, each load counted once. Loading:
    average number of concurrent loads on a worker. As it nears --max-loads, the fleet cannot keep
    up: then compare waits, not stalls.
    """
    with exit_on_failure(), _errors_on_stderr():
        made = _made(zipf, bursty, uniform)
        if (trace is None) == (made is None):
            raise InvalidInput("give either a trace or one of --zipf SKEW, --bursty and --uniform")
        if trace is not None:
            found = [read_trace(trace, models_file or _beside(trace))]
        else:
            assert made is not None  # noqa: S101 — the case above
            name, skew = made
            shape = TraceShape(models, requests, rate, skew)
            found = [GENERATORS[name](shape, seed + number) for number in range(seeds)]
        if save is not None:
            _write(save, found[0])
        fleet = SimulatedFleet(
            1,
            host_bytes=parse_size(host_memory),
            clients=clients,
            max_loads=max_loads,
            batch_tokens=batch_tokens,
        )
        sizes = [parse_size(text) for text in memory or ()] or [_quarter(found[0])]
        fleets = [
            replace(fleet, memory_bytes=size, workers=count)
            for size in sizes
            for count in workers or (1,)
        ]
        runs = run_all(found, fleets, policy or DEFAULT_POLICIES)
        if plot is not None:
            report.plot(runs, plot)
            note(f"plot: {plot}")
        if as_json:
            emit(report.as_json(runs))
        else:
            show(report.as_table(runs))


@app.command()
def scaling(
    start: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Seconds until a new machine's worker serves. May be repeated."),
    ] = None,
    configured: Annotated[
        float | None,
        typer.Option(
            min=0, help="The start time in pools.yaml, with node_seconds. Default: the real one."
        ),
    ] = None,
    keep_warm: Annotated[
        float | None,
        typer.Option(min=0, help="keep_warm_seconds of pools.yaml. Default: as long as a start."),
    ] = None,
    cooldown: Annotated[
        list[float] | None,
        typer.Option(min=0, help="KEDA's cooldownPeriod. May be repeated. Default: 600."),
    ] = None,
    gap: Annotated[float, typer.Option(min=1, help="Seconds between visits on average.")] = 1500.0,
    bursts: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of visits with 200 large requests; others: a short text."
        ),
    ] = 0.0,
    visits: Annotated[int, typer.Option(min=1, help="Number of visits.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs; the table has their means.")] = 3,
    as_json: Json = False,
) -> None:
    """Simulate KEDA, which scales one pool from and to zero, and report for how much of the time
    machines are held and how long requests wait.
    """
    with exit_on_failure(), _errors_on_stderr():
        runs = []
        for seconds in start or (180.0,):
            spec = PoolSpec(
                "pool",
                max_workers=20,
                cold_start_seconds=seconds if configured is None else configured,
            )
            spec = replace(spec, keep_warm_seconds=keep_warm)
            for pause in cooldown or (600.0,):
                cluster = scaled.Cluster(spec, seconds, cooldown_seconds=pause)
                made = [
                    scaled.visits(visits, gap, bursts, seed + number) for number in range(seeds)
                ]
                runs.append(
                    report.ScalingRun(cluster, [scaled.simulate(cluster, one) for one in made])
                )
        if as_json:
            emit(report.scaling_json(runs))
        else:
            show(report.scaling_table(runs))


@app.command("record")
def record_command(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", envvar="SHOAL_ADDRESS", help="A router, host:port.")
    ] = addresses.DEFAULT_ADDRESS,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="The trace; models' costs are written to a file next to it."
        ),
    ] = Path("trace.csv"),
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Duration. Default: until Ctrl-C.")
    ] = None,
    token: Annotated[
        str, typer.Option(envvar="SHOAL_TOKEN", help="Bearer token; better in the environment.")
    ] = "",
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, with the system's certificates.")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="SHOAL_TLS_CA", help="PEM file of the authority to trust.")
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="SHOAL_TLS_CERT", help="PEM file of the client certificate."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="SHOAL_TLS_KEY", help="PEM file of its key.")
    ] = None,
) -> None:
    """Record the requests of a running mesh, to be replayed: one line per job, exact to about a
    second.
    """
    recorder = record.Recorder()
    with exit_on_failure(), _errors_on_stderr():
        secured = Tls(tls_ca, tls_cert, tls_key) if tls or tls_ca or tls_cert or tls_key else None
        if not output.parent.is_dir():
            raise InvalidInput(f"the directory {output.parent} does not exist")
        try:
            with SafeConsole(stderr=True).status(
                Text(f"watching {address}; Ctrl-C ends and writes")
            ) as status:
                record.watch(
                    addresses.parse(address)[0],
                    recorder,
                    seconds=seconds,
                    tls=secured,
                    token=token,
                    on_view=lambda so_far: status.update(
                        Text(f"{address}: {len(so_far.requests):,} jobs; Ctrl-C ends and writes")
                    ),
                )
        finally:  # keep the recording if the router stops
            if recorder.requests:
                _write_recorded(recorder, output)
    if not recorder.requests:
        note("no requests arrived: nothing is written")


def run_all(
    traces: Sequence[Trace], fleets: Sequence[SimulatedFleet], policies: Sequence[str]
) -> list[report.SimulationRun]:
    """Simulate every trace on every fleet under every policy, with a progress bar. Raises
    InvalidInput.
    """
    steps = len(fleets) * len(policies)
    total = steps * sum(len(trace.requests) for trace in traces)
    runs: list[report.SimulationRun] = []
    before = 0
    with bar("requests", total) as on_progress:
        for fleet in fleets:
            for policy in policies:
                for trace in traces:
                    outcome = simulate(
                        trace, fleet, policy, on_progress=_shifted(on_progress, before, total)
                    )
                    runs.append(report.SimulationRun(trace.name, fleet, outcome))
                    before += len(trace.requests)
    return runs


def parse_size(text: str) -> int:
    """Parse bytes of `24GiB`, `800 MB`, `1.5g` or a plain number. Raises InvalidInput."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(
            f"{text!r} is not a size: give bytes, or a number with KB, MB, GB, TB or KiB, MiB,"
            " GiB, TiB"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _shifted(
    on_progress: Callable[[int, int], None] | None, before: int, total: int
) -> Callable[[int, int], None] | None:
    return None if on_progress is None else lambda done, _: on_progress(before + done, total)


def _made(zipf: float | None, bursty: bool, uniform: bool) -> tuple[str, float] | None:
    """Return the requested generator and its skew."""
    given = [
        name
        for name, wanted in (("zipf", zipf is not None), ("bursty", bursty), ("uniform", uniform))
        if wanted
    ]
    if given == ["zipf", "bursty"]:
        return "bursty", zipf or 0.0
    if len(given) > 1:
        raise InvalidInput(f"--{given[0]} and --{given[1]} exclude each other")
    skews = {"zipf": zipf or 0.0, "bursty": 0.9, "uniform": 0.0}
    return (given[0], skews[given[0]]) if given else None


def _beside(trace: Path) -> Path | None:
    path = models_path(trace)
    return path if path.exists() else None


def _quarter(trace: Trace) -> int:
    sizes = [cost.bytes for cost in trace.models.values()]
    return max(*sizes, sum(sizes) // 4)


def _write(path: Path, trace: Trace) -> None:
    write_trace(path, trace.requests)
    write_models(models_path(path), list(trace.models.values()))
    note(
        f"{len(trace.requests):,} requests: {path};"
        f" costs of {len(trace.models)} models: {models_path(path)}"
    )


def _write_recorded(recorder: record.Recorder, path: Path) -> None:
    requests, costs, left_out = recorder.trace()
    for model, count in sorted(left_out.items()):
        note(f"left out {count:,} jobs of {model}: no worker reported its costs")
    _write(path, Trace(path.stem, requests, {cost.model: cost for cost in costs}))


@contextmanager
def _errors_on_stderr() -> Iterator[None]:
    """Print errors of traces and options on stderr, and exit with code 2."""
    try:
        yield
    except InvalidInput as error:
        print_error(error.message, [], "")
        raise typer.Exit(2) from None

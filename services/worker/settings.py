"""The worker's configuration, read from the environment at startup."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.transport.trust import VARIABLES, Trust

from libs import setting
from libs.catalog.cards import parse_folders, read_catalog
from libs.catalog.overrides import Catalog
from libs.errors import InvalidInput
from libs.eviction import DEFAULT, POLICIES
from libs.names import is_model_id
from libs.store import TorchCheckpoints, check_urls, default_root

DeviceChoice = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "bfloat16", "float32", "int8"]
DEVICES: tuple[DeviceChoice, ...] = ("auto", "cpu", "cuda")
TORCH_CHECKPOINTS: tuple[TorchCheckpoints, ...] = ("convert", "refuse")
DTYPES: tuple[DtypeChoice, ...] = ("auto", "bfloat16", "float32", "int8")
_SPOT = re.compile(r"none|aws|gcp|file:/.+")


@dataclass(frozen=True, slots=True)
class Shelf:
    """One entry of SHOAL_MODELS: the directory of one model, or, without `model`, a root laid out
    as `<root>/<org>/<name>[@revision]/`.
    """

    path: Path
    model: str = ""

    def __str__(self) -> str:
        return f"{self.model}={self.path}" if self.model else str(self.path)


def parse_shelves(text: str) -> tuple[Shelf, ...]:
    """Parse SHOAL_MODELS: colon-separated `org/name=/path` and `/root`. Raises InvalidInput."""
    return tuple(_shelf(entry) for entry in text.split(":") if entry)


def _shelf(entry: str) -> Shelf:
    model, equals, path = entry.rpartition("=")
    if equals and not is_model_id(model):
        raise InvalidInput(
            f"SHOAL_MODELS: {model!r} is not a model id of the form org/name", field="SHOAL_MODELS"
        )
    if not path:
        raise InvalidInput(f"SHOAL_MODELS: {entry!r} has no directory", field="SHOAL_MODELS")
    return Shelf(Path(path), model)


def _trust(environ: setting.Environ) -> Trust:
    try:
        return Trust.from_env(environ)
    except ValueError as error:
        raise InvalidInput(str(error), field="SHOAL_TLS_CA") from None


def _check_trust(trust: Trust, routers: tuple[str, ...]) -> None:
    try:
        trust.check(routers)
    except ValueError as error:
        raise InvalidInput(str(error), field="SHOAL_TOKEN") from None


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one worker process. Sizes are in bytes or tokens, times in seconds. Where
    allowed, 0 means the device's default.
    """

    worker_id: str = setting.identity(
        "SHOAL_WORKER_ID", "worker", "The worker's unique name in the mesh."
    )
    routers: tuple[str, ...] = setting.routers(is_empty_refused=True)
    trust: Trust = setting.group(_trust, setting.documented(VARIABLES), Trust, Trust.describe)
    """TLS trust in routers, and the credentials sent to them."""
    pool: str = setting.text(
        "SHOAL_POOL",
        "cpu",
        "The pool to which the worker belongs.",
        setting.NAME,
        is_empty_refused=True,
    )
    models: tuple[Shelf, ...] = setting.parsed(
        "SHOAL_MODELS",
        "directories, separated by colons",
        parse_shelves,
        tuple,
        "Model directories: `org/name=/path` entries and roots `<root>/<org>/<name>`.",
        log=lambda shelves: ":".join(map(str, shelves)),
    )
    stores: tuple[str, ...] = setting.parsed(
        "SHOAL_STORES",
        "list",
        check_urls,
        tuple,
        "Stores for models that no folder has, in search order: hf, s3://…, gs://… or file:///…. "
        "Empty: nothing is fetched.",
    )
    store_dir: Path = setting.path(
        "SHOAL_STORE_DIR",
        Path("shoal"),
        "Directory for fetched models, shared by the workers of a node.",
        unset=default_root,
        default_text="`$XDG_CACHE_HOME/shoal`, else `~/.cache/shoal`",
    )
    store_bytes: int = setting.integer(
        "SHOAL_STORE_BYTES",
        0,
        "bytes",
        setting.at_least(0, "at least 1, or 0 for all free space"),
        "Disk budget of SHOAL_STORE_DIR. 0: 90 % of the free disk space at startup.",
    )
    torch_checkpoints: TorchCheckpoints = setting.choice(
        "SHOAL_TORCH_CHECKPOINTS",
        "convert",
        TORCH_CHECKPOINTS,
        "Whether weights that exist only as torch checkpoints are converted once or refused.",
    )
    catalog: Catalog = setting.parsed(
        "SHOAL_CATALOG",
        "folders, separated by colons",
        lambda given: read_catalog(parse_folders(given)),
        Catalog,
        "Folders of cards that override values in models' files and in the shipped cards.",
        unset=lambda _: read_catalog(),
    )
    device: DeviceChoice = setting.choice(
        "SHOAL_DEVICE",
        "auto",
        DEVICES,
        "The device of the worker. auto: an accelerator if there is one.",
    )
    dtype: DtypeChoice = setting.choice(
        "SHOAL_DTYPE",
        "auto",
        DTYPES,
        "The number format of models. auto: bfloat16 where the hardware multiplies it, else "
        "float32.",
    )
    threads: int = setting.integer(
        "SHOAL_THREADS",
        1,
        "threads",
        setting.at_least(1),
        "Threads of a forward pass on a CPU.",
        unset=lambda _: len(os.sched_getaffinity(0)),
        default_text="the cores that the process may use",
    )
    batch_tokens: int = setting.integer(
        "SHOAL_BATCH_TOKENS",
        0,
        "tokens",
        setting.at_least(0, "at least 1, or 0 for the device's default"),
        "Token budget of one forward pass. 0: 2048 on a CPU, 16384 on an accelerator.",
    )
    batch_items: int = setting.integer(
        "SHOAL_BATCH_ITEMS",
        512,
        "sequences",
        setting.at_least(1),
        "Maximum sequences of one forward pass.",
    )
    max_age_seconds: float = setting.seconds(
        "SHOAL_MAX_AGE_SECONDS",
        0.5,
        setting.above(0, 60),
        "Sequences that have waited longer are batched strictly in order, even if they fit badly.",
    )
    batch_seconds: float = setting.seconds(
        "SHOAL_BATCH_SECONDS",
        0.05,
        setting.in_range(0.001, 60),
        "Maximum expected duration of a forward pass while several models or tenants share the "
        "device: up to twice that for a pass of fewer than 256 tokens, and four times that while "
        "one caller has the device alone.",
    )
    memory_bytes: int = setting.integer(
        "SHOAL_MEMORY_BYTES",
        0,
        "bytes",
        setting.at_least(0, "at least 1, or 0 for the device's default"),
        "Bytes for models, including activations of a batch. 0: 60 % of the host's memory on a "
        "CPU, all but a reserve of the device's on an accelerator.",
    )
    host_bytes: int | None = setting.integer(
        "SHOAL_HOST_BYTES",
        None,
        "bytes",
        setting.at_least(0, "at least 0, or empty for the device's default"),
        "Bytes of host memory for warm models. Empty: 0 on a CPU, half of the host's memory on an "
        "accelerator.",
        log=str,
    )
    cuda_graphs: int = setting.integer(
        "SHOAL_CUDA_GRAPHS",
        48,
        "graphs",
        setting.at_least(0, "at least 1, or 0 for none"),
        "Maximum CUDA graphs per model, for forward passes of small batches. 0: all passes are "
        "launched eagerly.",
    )
    cuda_in_flight: int = setting.integer(
        "SHOAL_CUDA_IN_FLIGHT",
        2,
        "batches",
        setting.Allowed("1 or 2", lambda value: value in (1, 2)),
        "Maximum batches on a CUDA device. 2 launches the next batch before the last one is over.",
    )
    image_cache_bytes: int = setting.integer(
        "SHOAL_IMAGE_CACHE_BYTES",
        128 << 20,
        "bytes",
        setting.at_least(0, "at least 1, or 0 for none"),
        "Bytes of free memory for caching image outputs, so that a repeated image is neither "
        "decoded nor computed. 128 MiB are 50,000 vectors of 512 numbers, or 250 pages of 1,030 "
        "vectors of 128. 0 disables the cache.",
    )
    adapters: int = setting.integer(
        "SHOAL_ADAPTERS",
        32,
        "adapters",
        setting.at_least(1),
        "Maximum LoRA adapters loaded with each model.",
    )
    eviction: str = setting.choice(
        "SHOAL_EVICTION", DEFAULT, tuple(POLICIES), "The policy that chooses the models to evict."
    )
    load_seconds: float = setting.seconds(
        "SHOAL_LOAD_SECONDS",
        300.0,
        setting.in_range(1, 3600),
        "Time limit of a load, without the download.",
    )
    heartbeat_seconds: float = setting.seconds(
        "SHOAL_HEARTBEAT_SECONDS",
        2.0,
        setting.in_range(0.1, 5, "leases last 15 s"),
        "Time between two heartbeats of a worker.",
    )
    pull_wait_seconds: float = setting.seconds(
        "SHOAL_PULL_WAIT_SECONDS",
        10.0,
        setting.in_range(0.1, 10),
        "Maximum time that a pull waits at a router.",
    )
    grace_seconds: float = setting.seconds(
        "SHOAL_GRACE_SECONDS",
        25.0,
        setting.in_range(0, 600),
        "Maximum time of held jobs after SIGTERM before they are returned.",
    )
    spot: str = setting.text(
        "SHOAL_SPOT",
        "none",
        "Source of preemption notices of a spot machine.",
        setting.Allowed("none, aws, gcp or file:/path", lambda value: bool(_SPOT.fullmatch(value))),
    )
    health_address: str = setting.text(
        "SHOAL_HEALTH_ADDRESS",
        "",
        "Listening address of grpc.health.v1. Empty: it is not served.",
        kind="host:port",
    )
    metrics_address: str = setting.metrics_address()
    log_level: setting.LogLevel = setting.log_level()

    def __post_init__(self) -> None:
        setting.check_fields(self)
        _check_trust(self.trust, self.routers)

    @staticmethod
    def from_env(environ: setting.Environ) -> Settings:
        """Read the variables. Raises InvalidInput naming the variable and its allowed values."""
        return setting.read(Settings, environ)

    def describe(self) -> dict[str, str]:
        """Return the settings as text, for the log line at startup."""
        return {name: str(value) for name, value in setting.describe(self).items()}

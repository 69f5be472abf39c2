"""The worker's configuration, read from the environment at startup."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from shoal.transport.trust import Trust

from libs.catalog.cards import parse_folders, read_catalog
from libs.catalog.overrides import Catalog
from libs.environment import (
    LOG_LEVELS,
    LogLevel,
    check,
    check_name,
    choice,
    integer,
    number,
    random_id,
)
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


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one worker process. Sizes are in bytes or tokens, times in seconds. Where
    allowed, 0 means the device's default.
    """

    worker_id: str
    routers: tuple[str, ...] = ("127.0.0.1:50051",)
    trust: Trust = field(default_factory=Trust)
    """TLS trust in routers, and the credentials sent to them: SHOAL_TLS…, SHOAL_TOKEN…"""
    pool: str = "cpu"
    models: tuple[Shelf, ...] = ()
    stores: tuple[str, ...] = ()
    """Stores for models that no folder has, in search order. If empty, nothing is fetched."""
    store_dir: Path = Path("shoal")
    """Directory for fetched models, shared by the workers of a node."""
    store_bytes: int = 0
    """Disk budget of that directory. 0: 90 % of the free disk space at startup."""
    torch_checkpoints: TorchCheckpoints = "convert"
    """Whether weights that exist only as torch checkpoints are converted once or refused."""
    catalog: Catalog = field(default_factory=Catalog)
    """Overrides of values in models' files: shipped cards and those in SHOAL_CATALOG's folders."""
    device: DeviceChoice = "auto"
    dtype: DtypeChoice = "auto"
    threads: int = 1
    batch_tokens: int = 0
    """Token budget of one forward pass. 0: 2048 on a CPU, 16384 on an accelerator."""
    batch_items: int = 512
    max_age_seconds: float = 0.5
    """Sequences that have waited longer are batched strictly in order, even if they fit badly."""
    batch_seconds: float = 0.05
    """Maximum expected duration of a forward pass while several models or tenants share the device:
    up to twice that for a pass of fewer than 256 tokens, and four times that while one caller has
    the device alone.
    """
    memory_bytes: int = 0
    """Bytes for models, including activations of a batch. 0: 60 % of the host's memory on a CPU,
    all but a reserve of the device's on an accelerator.
    """
    host_bytes: int | None = None
    """Bytes of host memory for warm models. None: 0 on a CPU, half of the host's memory on an
    accelerator.
    """
    cuda_graphs: int = 48
    """Maximum CUDA graphs per model, for forward passes of small batches. 0: all passes are
    launched eagerly.
    """
    cuda_in_flight: int = 2
    """Maximum batches on a CUDA device. 2 launches the next batch before the last one is over."""
    image_cache_bytes: int = 128 << 20
    """Bytes of free memory for caching image outputs, so that a repeated image is neither decoded
    nor computed. 128 MiB are 50,000 vectors of 512 numbers, or 250 pages of 1,030 vectors of 128. 0
    disables the cache.
    """
    adapters: int = 32
    """Maximum LoRA adapters loaded with each model."""
    eviction: str = DEFAULT
    """The eviction policy: a key of `libs.eviction.POLICIES`."""
    load_seconds: float = 300.0
    """Time limit of a load, without the download."""
    heartbeat_seconds: float = 2.0
    pull_wait_seconds: float = 10.0
    grace_seconds: float = 25.0
    """How long held jobs may take after SIGTERM before they are returned."""
    spot: str = "none"
    """Source of preemption notices of a spot machine: none, aws, gcp or file:/path
    (`notice.py`).
    """
    health_address: str = ""
    """Listening address of grpc.health.v1. Not served if empty."""
    metrics_address: str = ""
    """Listening address (host:port) of the Prometheus endpoint, plain HTTP without credentials. Not
    served if empty.
    """
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        check_name(self.worker_id, "SHOAL_WORKER_ID")
        check_name(self.pool, "SHOAL_POOL")
        check(
            bool(self.routers) and all(self.routers),
            "SHOAL_ROUTERS",
            "addresses separated by commas",
        )
        _check_trust(self.trust, self.routers)
        check(self.threads >= 1, "SHOAL_THREADS", "at least 1")
        check(
            self.batch_tokens >= 0,
            "SHOAL_BATCH_TOKENS",
            "at least 1, or 0 for the device's default",
        )
        check(self.batch_items >= 1, "SHOAL_BATCH_ITEMS", "at least 1")
        check(0 < self.max_age_seconds <= 60, "SHOAL_MAX_AGE_SECONDS", "above 0, at most 60")
        check(0.001 <= self.batch_seconds <= 60, "SHOAL_BATCH_SECONDS", "0.001..60")
        check(self.store_bytes >= 0, "SHOAL_STORE_BYTES", "at least 1, or 0 for all free space")
        check(
            self.memory_bytes >= 0,
            "SHOAL_MEMORY_BYTES",
            "at least 1, or 0 for the device's default",
        )
        check(
            self.host_bytes is None or self.host_bytes >= 0,
            "SHOAL_HOST_BYTES",
            "at least 0, or empty for the device's default",
        )
        check(self.cuda_graphs >= 0, "SHOAL_CUDA_GRAPHS", "at least 1, or 0 for none")
        check(self.cuda_in_flight in (1, 2), "SHOAL_CUDA_IN_FLIGHT", "1 or 2")
        check(self.image_cache_bytes >= 0, "SHOAL_IMAGE_CACHE_BYTES", "at least 1, or 0 for none")
        check(self.adapters >= 1, "SHOAL_ADAPTERS", "at least 1")
        check(self.eviction in POLICIES, "SHOAL_EVICTION", f"one of {', '.join(POLICIES)}")
        check(1 <= self.load_seconds <= 3600, "SHOAL_LOAD_SECONDS", "1..3600")
        check(
            0.1 <= self.heartbeat_seconds <= 5,
            "SHOAL_HEARTBEAT_SECONDS",
            "0.1..5: leases last 15 s",
        )
        check(0.1 <= self.pull_wait_seconds <= 10, "SHOAL_PULL_WAIT_SECONDS", "0.1..10")
        check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")
        check(bool(_SPOT.fullmatch(self.spot)), "SHOAL_SPOT", "none, aws, gcp or file:/path")

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Read SHOAL_* variables. Raises InvalidInput with the variable and its allowed values."""
        return Settings(
            worker_id=environ.get("SHOAL_WORKER_ID") or random_id("worker"),
            routers=tuple(
                address.strip()
                for address in environ.get("SHOAL_ROUTERS", "127.0.0.1:50051").split(",")
            ),
            trust=_trust(environ),
            pool=environ.get("SHOAL_POOL", "cpu"),
            models=parse_shelves(environ.get("SHOAL_MODELS", "")),
            stores=check_urls(environ.get("SHOAL_STORES", "")),
            store_dir=Path(environ.get("SHOAL_STORE_DIR") or default_root(environ)),
            store_bytes=integer(environ, "SHOAL_STORE_BYTES", 0),
            torch_checkpoints=choice(
                environ, "SHOAL_TORCH_CHECKPOINTS", "convert", TORCH_CHECKPOINTS
            ),
            catalog=read_catalog(parse_folders(environ.get("SHOAL_CATALOG", ""))),
            device=choice(environ, "SHOAL_DEVICE", "auto", DEVICES),
            dtype=choice(environ, "SHOAL_DTYPE", "auto", DTYPES),
            threads=integer(environ, "SHOAL_THREADS", len(os.sched_getaffinity(0))),
            batch_tokens=integer(environ, "SHOAL_BATCH_TOKENS", 0),
            batch_items=integer(environ, "SHOAL_BATCH_ITEMS", 512),
            max_age_seconds=number(environ, "SHOAL_MAX_AGE_SECONDS", 0.5),
            batch_seconds=number(environ, "SHOAL_BATCH_SECONDS", 0.05),
            memory_bytes=integer(environ, "SHOAL_MEMORY_BYTES", 0),
            host_bytes=integer(environ, "SHOAL_HOST_BYTES", 0)
            if environ.get("SHOAL_HOST_BYTES")
            else None,
            cuda_in_flight=integer(environ, "SHOAL_CUDA_IN_FLIGHT", 2),
            cuda_graphs=integer(environ, "SHOAL_CUDA_GRAPHS", 48),
            image_cache_bytes=integer(environ, "SHOAL_IMAGE_CACHE_BYTES", 128 << 20),
            adapters=integer(environ, "SHOAL_ADAPTERS", 32),
            eviction=environ.get("SHOAL_EVICTION") or DEFAULT,
            load_seconds=number(environ, "SHOAL_LOAD_SECONDS", 300.0),
            heartbeat_seconds=number(environ, "SHOAL_HEARTBEAT_SECONDS", 2.0),
            pull_wait_seconds=number(environ, "SHOAL_PULL_WAIT_SECONDS", 10.0),
            grace_seconds=number(environ, "SHOAL_GRACE_SECONDS", 25.0),
            spot=environ.get("SHOAL_SPOT") or "none",
            health_address=environ.get("SHOAL_HEALTH_ADDRESS", ""),
            metrics_address=environ.get("SHOAL_METRICS_ADDRESS", ""),
            log_level=choice(environ, "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS),
        )

    def describe(self) -> dict[str, str]:
        """Return the settings as text, for the log line at startup."""
        values = {one.name: str(getattr(self, one.name)) for one in fields(self)}
        return values | {
            "routers": ",".join(self.routers),
            "trust": self.trust.describe(),
            "models": ":".join(map(str, self.models)),
            "stores": ",".join(self.stores),
        }


def _trust(environ: Mapping[str, str]) -> Trust:
    try:
        return Trust.from_env(environ)
    except ValueError as error:
        raise InvalidInput(str(error), field="SHOAL_TLS_CA") from None


def _check_trust(trust: Trust, routers: tuple[str, ...]) -> None:
    try:
        trust.check(routers)
    except ValueError as error:
        raise InvalidInput(str(error), field="SHOAL_TOKEN") from None


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

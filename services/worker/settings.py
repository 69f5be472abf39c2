"""What a worker is told at its start, read once from the environment."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeVar

from libs.catalog.cards import parse_folders, read_catalog
from libs.catalog.overrides import Catalog
from libs.errors import InvalidInput
from libs.store import check_urls, default_root
from services.worker.disk import Shelf, parse_shelves

DeviceChoice = Literal["auto", "cpu", "cuda"]
DtypeChoice = Literal["auto", "bfloat16", "float32"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
DEVICES: tuple[DeviceChoice, ...] = ("auto", "cpu", "cuda")
DTYPES: tuple[DtypeChoice, ...] = ("auto", "bfloat16", "float32")
LOG_LEVELS: tuple[LogLevel, ...] = ("DEBUG", "INFO", "WARNING", "ERROR")
_Choice = TypeVar("_Choice", DeviceChoice, DtypeChoice, LogLevel)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one worker process. Sizes in bytes or tokens, times in seconds; 0 stands for "as the device says" where it is allowed."""

    worker_id: str
    routers: tuple[str, ...] = ("127.0.0.1:50051",)
    pool: str = "cpu"
    models: tuple[Shelf, ...] = ()
    stores: tuple[str, ...] = ()
    """Where models come from that no folder has, in order of search. None: nothing is ever fetched."""
    store_dir: Path = Path("shoal")
    """Where what was fetched is kept. Shared by the workers of a node."""
    store_bytes: int = 0
    """Bytes that may take. 0: 90 % of what the disk has free at the start."""
    catalog: Catalog = field(default_factory=Catalog)
    """What is said of models over what their files say: shipped cards and those of SHOAL_CATALOG's folders."""
    device: DeviceChoice = "auto"
    dtype: DtypeChoice = "auto"
    threads: int = 1
    batch_tokens: int = 0
    """Token budget of one forward pass. 0: 2048 on a CPU, 16384 on an accelerator."""
    batch_items: int = 512
    max_age_seconds: float = 0.5
    """A sequence that has waited longer is served strictly in its turn, however badly it fits."""
    memory_bytes: int = 0
    """Bytes that models may take. 0: 60 % of the host's memory on a CPU, 80 % of the device's on an accelerator."""
    heartbeat_seconds: float = 2.0
    pull_wait_seconds: float = 10.0
    grace_seconds: float = 25.0
    """How long held jobs may take after SIGTERM before they are handed back."""
    health_address: str = ""
    """Where grpc.health.v1 answers. Empty: nowhere."""
    log_level: LogLevel = "INFO"

    def __post_init__(self) -> None:
        _check(bool(_NAME.fullmatch(self.worker_id)), "SHOAL_WORKER_ID", "1..63 letters, digits, '.', '_' or '-'")
        _check(bool(_NAME.fullmatch(self.pool)), "SHOAL_POOL", "1..63 letters, digits, '.', '_' or '-'")
        _check(bool(self.routers) and all(self.routers), "SHOAL_ROUTERS", "addresses separated by commas")
        _check(self.threads >= 1, "SHOAL_THREADS", "at least 1")
        _check(self.batch_tokens >= 0, "SHOAL_BATCH_TOKENS", "at least 1, or 0 for the device's default")
        _check(self.batch_items >= 1, "SHOAL_BATCH_ITEMS", "at least 1")
        _check(0 < self.max_age_seconds <= 60, "SHOAL_MAX_AGE_SECONDS", "above 0, at most 60")
        _check(self.store_bytes >= 0, "SHOAL_STORE_BYTES", "at least 1, or 0 for what the disk has")
        _check(self.memory_bytes >= 0, "SHOAL_MEMORY_BYTES", "at least 1, or 0 for the device's default")
        _check(0.1 <= self.heartbeat_seconds <= 5, "SHOAL_HEARTBEAT_SECONDS", "0.1..5: leases last 15 s")
        _check(0.1 <= self.pull_wait_seconds <= 10, "SHOAL_PULL_WAIT_SECONDS", "0.1..10")
        _check(0 <= self.grace_seconds <= 600, "SHOAL_GRACE_SECONDS", "0..600")

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Settings:
        """Reads SHOAL_* variables; raises InvalidInput naming the variable and what it may be."""
        return Settings(
            worker_id=environ.get("SHOAL_WORKER_ID") or _random_id(),
            routers=tuple(address.strip() for address in environ.get("SHOAL_ROUTERS", "127.0.0.1:50051").split(",")),
            pool=environ.get("SHOAL_POOL", "cpu"),
            models=parse_shelves(environ.get("SHOAL_MODELS", "")),
            stores=check_urls(environ.get("SHOAL_STORES", "")),
            store_dir=Path(environ.get("SHOAL_STORE_DIR") or default_root(environ)),
            store_bytes=_integer(environ, "SHOAL_STORE_BYTES", 0),
            catalog=read_catalog(parse_folders(environ.get("SHOAL_CATALOG", ""))),
            device=_choice(environ, "SHOAL_DEVICE", "auto", DEVICES),
            dtype=_choice(environ, "SHOAL_DTYPE", "auto", DTYPES),
            threads=_integer(environ, "SHOAL_THREADS", len(os.sched_getaffinity(0))),
            batch_tokens=_integer(environ, "SHOAL_BATCH_TOKENS", 0),
            batch_items=_integer(environ, "SHOAL_BATCH_ITEMS", 512),
            max_age_seconds=_number(environ, "SHOAL_MAX_AGE_SECONDS", 0.5),
            memory_bytes=_integer(environ, "SHOAL_MEMORY_BYTES", 0),
            heartbeat_seconds=_number(environ, "SHOAL_HEARTBEAT_SECONDS", 2.0),
            pull_wait_seconds=_number(environ, "SHOAL_PULL_WAIT_SECONDS", 10.0),
            grace_seconds=_number(environ, "SHOAL_GRACE_SECONDS", 25.0),
            health_address=environ.get("SHOAL_HEALTH_ADDRESS", ""),
            log_level=_choice(environ, "SHOAL_LOG_LEVEL", "INFO", LOG_LEVELS),
        )

    def describe(self) -> dict[str, str]:
        """For the one log line at the start."""
        told = {one.name: str(getattr(self, one.name)) for one in fields(self)}
        return told | {
            "routers": ",".join(self.routers),
            "models": ":".join(map(str, self.models)),
            "stores": ",".join(self.stores),
        }


def _random_id() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:48].strip("-.")
    return f"{host or 'worker'}-{secrets.token_hex(4)}"


def _check(holds: bool, name: str, allowed: str) -> None:
    if not holds:
        raise InvalidInput(f"{name} must be {allowed}", field=name)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise InvalidInput(f"{name} must be a number, not {text!r}", field=name) from None


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise InvalidInput(f"{name} must be a whole number, not {text!r}", field=name) from None


def _choice(environ: Mapping[str, str], name: str, default: _Choice, allowed: tuple[_Choice, ...]) -> _Choice:
    value = environ.get(name, "") or default
    for choice in allowed:
        if choice == value:
            return choice
    raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, not {value!r}", field=name)

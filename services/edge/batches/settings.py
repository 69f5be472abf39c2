"""The settings of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shoal.bulk.failures import StorageError, without_credentials
from shoal.bulk.places import absolute, place

from libs import setting
from libs.environment import check

_GIB: Final = 1 << 30


def _is_storage(url: str) -> bool:
    try:
        place(url or ".")
    except StorageError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The storage of files and batches, and its limits. Without a URL the edge has neither."""

    url: str = setting.text(
        "SHOAL_BATCHES_URL",
        "",
        "The storage of uploaded files and batches: a directory, or a URL that fsspec can open, "
        "such as s3://bucket/prefix. Empty: the edge serves no files and no batches.",
        setting.Allowed("a directory, or a URL that fsspec can open", _is_storage),
        kind="path or URL",
        log=lambda url: without_credentials(str(url)),
    )
    tenant_bytes: int = setting.integer(
        "SHOAL_BATCHES_TENANT_BYTES",
        10 * _GIB,
        "bytes",
        setting.at_least(0, "at least SHOAL_BATCHES_FILE_BYTES"),
        "The maximum size of all files of a tenant, outputs of batches included.",
    )
    tenant_batches: int = setting.integer(
        "SHOAL_BATCHES_TENANT_BATCHES",
        100,
        "batches",
        setting.in_range(1, 1000),
        "The maximum number of batches of a tenant that have not ended.",
    )
    tenant_requests: int = setting.integer(
        "SHOAL_BATCHES_TENANT_REQUESTS",
        1_000_000,
        "requests",
        setting.at_least(1, "at least SHOAL_BATCHES_LINES"),
        "The maximum number of requests of these batches that have no result.",
    )
    file_bytes: int = setting.integer(
        "SHOAL_BATCHES_FILE_BYTES",
        200 << 20,
        "bytes",
        setting.in_range(1024, 8 * _GIB),
        "The maximum size of an uploaded file.",
    )
    lines: int = setting.integer(
        "SHOAL_BATCHES_LINES",
        50_000,
        "lines",
        setting.in_range(1, 1_000_000),
        "The maximum number of requests of a batch.",
    )
    expiry_seconds: float = setting.seconds(
        "SHOAL_BATCHES_EXPIRY_SECONDS",
        30 * 86_400.0,
        setting.in_range(3600, 10 * 365 * 86_400),
        "The time after which files and ended batches are deleted, unless a client requests an "
        "earlier one.",
    )
    in_flight: int = setting.integer(
        "SHOAL_BATCHES_IN_FLIGHT",
        32,
        "requests",
        setting.in_range(1, 10_000),
        "The maximum number of requests of batches that an edge has in flight. It sends fewer "
        "while the mesh refuses some.",
    )

    def __post_init__(self) -> None:
        setting.check_fields(self)
        check(
            self.tenant_bytes >= self.file_bytes,
            "SHOAL_BATCHES_TENANT_BYTES",
            f"at least SHOAL_BATCHES_FILE_BYTES ({self.file_bytes}), not {self.tenant_bytes}",
        )

        check(
            self.tenant_requests >= self.lines,
            "SHOAL_BATCHES_TENANT_REQUESTS",
            f"at least SHOAL_BATCHES_LINES ({self.lines}), not {self.tenant_requests}",
        )

    @property
    def location(self) -> str:
        """Return the storage independently of the working directory."""
        return absolute(self.url)

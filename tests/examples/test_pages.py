"""Every block of commands or Python on the pages for newcomers runs as pasted, against a mesh with
the packaged model.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from services.local.settings import MINILM, packaged_minilm
from tests.support.cluster import Cluster

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = (
    "README.md",
    "docs/index.md",
    "docs/choosing-models.md",
    "docs/sizing.md",
    "docs/coming-from.md",
)
OTHER_CLIENTS: Final = ("openai", "cohere", "huggingface_hub", "infinity_client", "sie_sdk")
"""Packages of other vendors: `make interop` runs them."""
MESH: Final = re.compile(r"^(?:make|shoal up)\b", re.MULTILINE)
"""Blocks that start a mesh."""


def blocks() -> Iterator[tuple[str, str, str]]:
    for page in PAGES:
        for kind, block in re.findall(
            r"^```(sh|python)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
        ):
            if not MESH.search(block) and not any(
                f"import {name}" in block or f"from {name}" in block for name in OTHER_CLIENTS
            ):
                yield page, kind, block


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("mesh")
    aliases = folder / "aliases.yaml"
    aliases.write_text(f"aliases: {{embed: {MINILM}, rerank: {MINILM}, predict: {MINILM}}}\n")
    environment = {"SHOAL_ALIASES": str(aliases)}
    with Cluster(
        folder, models=f"{MINILM}={packaged_minilm()}", edges=1, environment=environment
    ) as cluster:
        wait_until_ready(f"http://{cluster.http_addresses[0]}/readyz")
        yield cluster


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(url)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


@pytest.mark.parametrize(("page", "kind", "block"), list(blocks()))
def test_block_runs_as_pasted(
    mesh: Cluster, tmp_path: Path, page: str, kind: str, block: str
) -> None:
    url = f"http://{mesh.http_addresses[0]}"
    here = block.replace("http://127.0.0.1:8080", url).replace("127.0.0.1:50051", mesh.address)
    environment = os.environ | {
        "URL": url,
        "MODEL": MINILM,
        "SHOAL_ADDRESS": mesh.address,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["bash", "-ec", here] if kind == "sh" else [sys.executable, "-c", here]
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert '"error"' not in ran.stdout, ran.stdout


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_changelog_of_the_first_version_is_short() -> None:
    first = (ROOT / "CHANGELOG.md").read_text().split("\n## [0.1.0]")[1].split("\n## ")[0]
    assert 1 <= len(re.findall(r"^- ", first, re.MULTILINE)) <= 40

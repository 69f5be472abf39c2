"""`python libs/kernels/native/build.py [FOLDER]`: compiles `source/` with this machine's C++
compiler, if it has one.

Needs Python's standard library only, so that images and wheels are built without torch. The library
lies beside this file, or in FOLDER; its name carries a digest of sources and flags, so that one
made of others is never loaded. Nothing is done if it is there.
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
    ),  # the last: of gcc 12's own headers
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
# What is compiled with which instructions, by its path in `source/`; headers are included by
# theirs. Nothing but the kernels may have more than any x86-64 CPU.
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
    """Why there is no library: no compiler, another machine, or what the compiler says."""


def library(folder: Path = HERE) -> Path:
    """Where the library of these very sources lies, if it was built. Raises OSError if the sources
    cannot be read.
    """
    digest = hashlib.sha256(repr((_COMMON, _UNITS, _LINK)).encode())
    for file in sorted(file for room in SOURCE.iterdir() for file in room.glob("*")):
        if file.suffix in (".cpp", ".h"):
            digest.update(file.read_bytes())
    return folder / f"kernels-{digest.hexdigest()[:16]}.so"


def compiler() -> str | None:
    """$CXX, g++ or c++."""
    names = (os.environ.get("CXX"), "g++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(folder: Path = HERE) -> Path:
    """The library, built if it is not there; older ones are removed. Raises CannotBuild."""
    target = library(folder)
    if target.exists():
        return target
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotBuild(
            f"there are kernels for Linux on x86-64 only, not for {sys.platform} on {platform.machine()}"
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
        # Moved in one step within the folder: another process may be loading or building it.
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
    """Exit code 0 also where no library can be built: everything runs without it."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    try:
        if not library(folder).exists():
            print(f"native kernels: {build(folder)}")
    except CannotBuild as error:
        print(f"native kernels are left out: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

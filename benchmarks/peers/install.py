"""Install the peers that benchmarks compare with, each into a separate environment: `python -m
benchmarks.peers.install`, or `make bench-peers`.

A library (OpenVINO, ONNX Runtime, CTranslate2, candle) runs in this package's process
(`engine.py`), so its environment also sees the project's packages. A server (Infinity, vLLM) has
none of them. Requirements are pinned, because an open range of torch would bring gigabytes of CUDA
libraries, and installed without resolving, except those of Infinity.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRONMENTS: Final = ROOT / ".cache/peers"


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer and how it is installed.

    Attributes:
        label: Its name in tables, with the version that `requirements/<name>.txt` pins.
        is_server: Whether it has an environment without the project's packages.
        convert: Module that writes the model in the peer's format into a given folder; empty if
            the peer reads the published files.
    """

    label: str
    is_server: bool = False
    convert: str = ""


PEERS: Final = {
    "openvino": Peer("OpenVINO", convert="benchmarks.peers.openvino_model"),
    "onnxruntime": Peer("ONNX Runtime", convert="benchmarks.peers.onnxruntime_model"),
    "ctranslate2": Peer("CTranslate2", convert="benchmarks.peers.ctranslate2_model"),
    "candle": Peer("candle", convert="benchmarks.peers.candle_model"),
    "infinity": Peer("Infinity", is_server=True),
    "vllm": Peer("vLLM", is_server=True),
}


def peer_python(name: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return ENVIRONMENTS / name / "bin/python"


def model_folder(name: str) -> Path:
    """Return the folder with the model in the peer's format."""
    return ENVIRONMENTS / name / "model"


def installed() -> list[str]:
    """Return the peers that are completely installed, in the order of PEERS."""
    return [name for name in PEERS if _marker(name).exists()]


def requirements(name: str) -> Path:
    return Path(__file__).parent / "requirements" / f"{name}.txt"


def _marker(name: str) -> Path:
    """Return the file that marks a complete installation. It holds the requirements."""
    return ENVIRONMENTS / name / ".installed"


def install(name: str, console: Console) -> None:
    """Install a peer, unless the same requirements are installed already. Raises
    CalledProcessError.
    """
    peer, pins, folder = PEERS[name], requirements(name).read_text(), ENVIRONMENTS / name
    if _marker(name).exists() and _marker(name).read_text() == pins:
        console.print(f"{peer.label} is installed")
        return
    with console.status(f"installing {peer.label}"):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        python = str(peer_python(name))
        if not peer.is_server:
            site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
            (site / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        # Infinity's own pins are few; its dependencies are resolved around them.
        resolving = [] if name == "infinity" else ["--no-deps"]
        subprocess.run([*pip, *resolving, "-r", str(requirements(name))], check=True)
        if peer.convert:
            model_folder(name).mkdir()
            subprocess.run(
                [python, "-W", "ignore", "-m", peer.convert, str(model_folder(name))],
                cwd=ROOT,
                check=True,
            )
    _marker(name).write_text(pins)
    console.print(f"{peer.label} is installed: {folder.relative_to(ROOT)}")


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Peers: {', '.join(PEERS)}. Default: all")
    ] = None,
) -> None:
    """Install the peers that benchmarks compare with."""
    console = Console(stderr=True)
    unknown = sorted(set(names or ()) - set(PEERS))
    if unknown:
        console.print(f"unknown peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
        raise typer.Exit(2)
    failed = []
    for name in names or PEERS:
        try:
            install(name, console)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            console.print(f"{PEERS[name].label} was not installed: {error}", style="red")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""`python -m benchmarks.images --help`"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.images import __doc__ as about
from benchmarks.images.encoders import SHAPES, measure_forwards, measure_preparing, photographs
from benchmarks.images.mesh import MIN_RATIO, measure_mesh
from benchmarks.images.pages import TOWERS, measure_pages
from benchmarks.models.families import DTYPES, dtypes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PARTS = ("forward", "pages", "prepare", "mesh")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    names = [one.name for one in (*SHAPES, *TOWERS)]
    parser.add_argument(
        "shapes", nargs="*", help=f"parts of names, of {', '.join(names)}; default all"
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="what to measure; default all"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        action="append",
        help="default: those that the device multiplies itself",
    )
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--pages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three layers in place of twelve")
    parser.add_argument(
        "--threads", type=int, default=0, help="of torch on a CPU; default all cores"
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    return parser.parse_args()


def main() -> None:
    wanted = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    print(
        f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads, {wanted.images} "
        f"images, {wanted.rounds} rounds"
    )
    photos = photographs(wanted.images)
    jpegs, parts = photos["JPEG"], wanted.only or PARTS

    def chosen(name: str) -> bool:
        return not wanted.shapes or any(part.lower() in name.lower() for part in wanted.shapes)

    shapes, towers = (
        [one for one in SHAPES if chosen(one.name)],
        [one for one in TOWERS if chosen(one.name)],
    )
    types, layers = wanted.dtype or dtypes(device), 3 if wanted.quick else 12
    # In the order of the printed tables.
    forwards = (
        measure_forwards(shapes, types, jpegs, wanted.rounds, layers, device)
        if "forward" in parts
        else []
    )
    paged = (
        measure_pages(towers, types, jpegs[: wanted.pages], wanted.rounds, layers, device)
        if "pages" in parts
        else []
    )
    prepared = measure_preparing(shapes, photos, wanted.rounds) if "prepare" in parts else []
    meshes = (
        asyncio.run(measure_mesh(shapes, types[0], jpegs, wanted.rounds, layers, device))
        if "mesh" in parts
        else []
    )
    slow = [
        f"{one.shape} {one.dtype} {one.ratio:.2f} (of {one.least})"
        for one in forwards
        if one.ratio < one.least
    ]
    slow += [
        f"{one.tower} {one.dtype} {one.ratio:.2f} (of {one.least})"
        for one in paged
        if one.ratio < one.least
    ]
    slow += [
        f"the mesh with {one.shape} {one.ratio:.2f} (of {MIN_RATIO})"
        for one in meshes
        if one.ratio < MIN_RATIO
    ]
    print(f"below the target: {', '.join(slow) or 'none'}")
    if wanted.json:
        found: dict[str, Sequence[DataclassInstance]] = {
            "forward": forwards,
            "pages": paged,
            "prepare": prepared,
            "mesh": meshes,
        }
        wanted.json.write_text(
            json.dumps(
                {part: [asdict(one) for one in rows] for part, rows in found.items()}, indent=2
            )
        )


if __name__ == "__main__":
    main()

"""A separate process that prepares a hostile client's input, to measure its memory: `python -m ...
DIRECTORY`.

Reads a line `<items> <slices>` and prepares `items` texts with an instruction of 2 MB, until
`check_cancelled` was called `slices` times. Writes the number of sequences, or `ended`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from libs.errors import DeadlinePassed
from libs.models import EncodeWork, load_model

INSTRUCTION = "copying, distribution and modification. " * 50_000


def main() -> None:
    model = load_model(Path(sys.argv[1]), "test/model", torch.device("cpu"), torch.float32)
    model.prepare(EncodeWork(["a text"], instruction=INSTRUCTION[:10_000]))
    print("ready", flush=True)
    items, slices = map(int, sys.stdin.readline().split())
    left = slices

    def check_cancelled() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DeadlinePassed("the deadline passed")

    try:
        print(
            len(
                model.prepare(
                    EncodeWork(["a text"] * items, instruction=INSTRUCTION), check_cancelled
                ).sequences
            ),
            flush=True,
        )
    except DeadlinePassed:
        print("ended", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()

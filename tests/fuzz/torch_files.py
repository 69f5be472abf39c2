"""Torch checkpoints, valid and hostile, with changes, through the conversion to safetensors of the
child process.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from libs.conversion import tensors
from tests.conversion.hostile import HOSTILE, SOUND, SOUND_LEGACY, archive, pickled, saved
from tests.fuzz import conversions, mutate
from tests.fuzz.target import Random, Target, Try

_LARGE: Final = ("gigabytes of bytearray", "a million tensors", "a hundred thousand tensors",
"a hundred thousand entries",
    "deep nesting", "a key of nested tuples", "a zip bomb", "overlapping views")  # fmt: skip
"""Left to tests/conversion: they test the child's limits, and an input here has at most 256 KiB."""

_WORDS: Final = (
    b"cposix\nsystem\n", b"c__builtin__\neval\n", b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n", b"R", b"\x81", b"b", b"Q", b"0", b"(", b"t", b"u.",
    b"\x8a\x08" + b"\xff" * 8,
    b"J\xff\xff\xff\x7f",
    b"K\x00", b"]", b"}", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"archive/data/0",
    b"data.pkl",
)  # fmt: skip


def _base() -> list[bytes]:
    state = {
        "a.weight": torch.arange(12.0).view(3, 4),
        "a.bias": torch.ones(3, dtype=torch.float16),
    }
    tied = {"x": state["a.weight"], "y": state["a.weight"].t(), "z": state["a.weight"][1:, ::2]}
    small = [make() for name, (make, _) in HOSTILE.items() if name not in _LARGE]
    return [
        SOUND,
        SOUND_LEGACY,
        saved({"state_dict": state}),
        saved(tied),
        saved(tied, legacy=True),
        archive(pickled({}), {}),
        *small,
    ]


_BASE: Final = _base()


def _make(random: Random, known: Sequence[bytes]) -> bytes:
    data = random.choice([*_BASE, *known])
    if data.startswith(b"PK") and random.random() < 0.6:
        return _with_other_pickle(random, data)
    return mutate.mutated(random, data, _WORDS, _BASE)[: 1 << 16]


def _with_other_pickle(random: Random, data: bytes) -> bytes:
    """Return the same archive with a changed pickle, so that the layout is valid and the pickle is
    read.
    """
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened, zipfile.ZipFile(out, "w") as made:
            for entry in opened.infolist():
                content = opened.read(entry)
                is_pickle = entry.filename.endswith("data.pkl")
                made.writestr(
                    entry.filename,
                    mutate.mutated(random, content, _WORDS) if is_pickle else content,
                )
    except Exception:
        return mutate.mutated(random, data, _WORDS, _BASE)
    return out.getvalue()


@contextmanager
def _open() -> Iterator[Try]:
    tensors.warm()
    with conversions.opened([tensors.convert], SOUND, _check) as attempt:
        yield attempt


def _check(data: bytes, output: Path) -> None:
    conversions.check_tensors(output, len(data) + (17 << 20))


TARGETS: Final = (Target("torch_files", _make, _open, hang_seconds=30.0),)

"""Hostile torch checkpoints: refused by name, by a child that is bounded; none of their code runs,
and this process is not touched."""

from __future__ import annotations

import mmap
import os
import re
import resource
import time
from pathlib import Path

import pytest

from libs.conversion import ConversionStep, convert, tensors
from libs.conversion.archive import CheckpointRefused
from libs.conversion.child import CPU_SECONDS, MEMORY_BYTES
from libs.errors import ModelBroken
from tests.conversion.hostile import BOUNDED, FOREIGN, HOSTILE, MARKER
from tests.conversion.watching import watch_children
from tests.support.peak import Peak

STEP = ConversionStep("torch", "pytorch_model.bin", "model.safetensors")
NEEDS_CHILD = ("gigabytes of bytearray", "a key of nested tuples", "an empty file")
"""Refused by the limits of the child, or by its end."""

MAX_GROWTH = 32 << 20
"""Maximum growth of this process, in bytes, while the child works."""

MAX_CHILD_BYTES = 800 << 20
"""The resident memory of the largest child, torch's libraries included."""


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in NEEDS_CHILD])
def test_hostile_file_is_refused_by_name_and_runs_no_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the child's limits, which are not needed for it."""
    make, named = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / STEP.source
    path.write_bytes(make())
    with (
        path.open("rb") as source,
        mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY) as mapping,
        (tmp_path / STEP.output).open("wb") as output,
        pytest.raises(CheckpointRefused, match=named),
    ):
        tensors.convert(source, mapping, output, lambda done, total: None)
    assert (tmp_path / STEP.output).stat().st_size == 0
    assert not list(tmp_path.rglob(MARKER))


@pytest.mark.parametrize("name", [*BOUNDED, "an empty file"])
def test_hostile_file_is_refused_by_a_bounded_child(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, named = HOSTILE[name]
    refused_by_child(STEP, make(), named, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", FOREIGN)
def test_hostile_file_of_another_format_is_refused_by_a_bounded_child(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, make, named = FOREIGN[name]
    refused_by_child(
        ConversionStep(kind, "pytorch_model.bin", "model.safetensors"),
        make(),
        named,
        tmp_path,
        monkeypatch,
    )


def refused_by_child(
    step: ConversionStep, data: bytes, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convert a file, and check what that took this process and its child."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / step.source).write_bytes(data)
    before, peak, watches = (
        resource.getrusage(resource.RUSAGE_CHILDREN),
        Peak(os.getpid()),
        watch_children(monkeypatch),
    )
    started = time.monotonic()
    with pytest.raises(ModelBroken) as caught:
        convert(tmp_path, tmp_path, [step], lambda file, done, total: None)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert caught.value.message.startswith("pytorch_model.bin: "), caught.value.message
    assert re.search(named, caught.value.message), caught.value.message
    assert not list(tmp_path.rglob(MARKER))
    assert [path.name for path in tmp_path.iterdir()] == [step.source]
    assert peak.grown < MAX_GROWTH
    watches[0].thread.join()
    assert watches[0].resident < MAX_CHILD_BYTES + MEMORY_BYTES[step.kind] - MEMORY_BYTES["torch"]
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{named}: child {watches[0].resident >> 20} MiB, {used:.1f} s of processor time, "
        f"{time.monotonic() - started:.1f} s"
    )
    assert used < CPU_SECONDS

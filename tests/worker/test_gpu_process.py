"""Process settings for a GPU: torch's allocator before torch is imported, and thread switching."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Final

import pytest

NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_PROGRAM: Final = """
import json, os, sys
from importlib.abc import MetaPathFinder

seen = {}

class Watch(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not seen:
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            seen.update({one: os.environ.get(one) for one in names})

sys.meta_path.insert(0, Watch())
from services.worker.__main__ import main
from libs.errors import InvalidInput

class FakeDevice:
    shares_memory = sys.argv[1] == "shared"

    @property
    def name(self):  # is read once the process is set up
        print(json.dumps({**seen, "switch": sys.getswitchinterval()}))
        sys.stdout.flush()
        raise InvalidInput("no further")

main(lambda settings: FakeDevice())
"""


def started(memory: str, device: str, **variables: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {
        "SHOAL_ROUTERS": "127.0.0.1:1",
        "SHOAL_DEVICE": device,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, memory],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 2, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


def test_gpu_worker_has_expandable_segments_and_switches_threads_often() -> None:
    found = started("own", "cuda")
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert found["switch"] == pytest.approx(0.0002)


def test_cpu_worker_keeps_the_defaults() -> None:
    found = started("shared", "cpu")
    assert [found[name] for name in NAMES] == [None, None]
    assert found["switch"] == pytest.approx(0.005)


@pytest.mark.parametrize("name", NAMES)
def test_operators_allocator_configuration_is_kept(name: str) -> None:
    found = started("own", "cuda", **{name: "max_split_size_mb:512"})
    assert [found[one] for one in NAMES] == [
        "max_split_size_mb:512" if one == name else None for one in NAMES
    ]

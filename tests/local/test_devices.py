"""The device of each worker of `shoal up`. No accelerator is needed: decisions are pure, and torch
is also queried here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from libs.errors import InvalidInput
from services.local import devices
from services.local.devices import accelerators, chosen, layout, visible
from services.local.mesh import _common_variables, _services
from services.local.settings import Settings
from services.local.workplace import Workplace

UUIDS = ("GPU-1a", "GPU-2b")


def test_parents_list_is_kept_and_without_one_all_are_numbered() -> None:
    assert visible(None, 3) == ("0", "1", "2")
    assert visible("2, 0", 2) == ("2", "0")
    assert visible(",".join(UUIDS), 2) == UUIDS
    assert visible("1,-1,0", 1) == ("1",)  # CUDA ends the list at the first that is not there
    assert visible("", 0) == ()
    assert visible(None, 0) == ()


def test_some_are_chosen_by_their_place_in_the_list() -> None:
    assert chosen("auto", ()) == ()
    assert chosen("auto", UUIDS) == UUIDS
    assert chosen("cuda", UUIDS) == UUIDS
    assert chosen("cuda:1", UUIDS) == ("GPU-2b",)
    assert chosen("cuda:1,0,1", UUIDS) == ("GPU-2b", "GPU-1a")
    with pytest.raises(InvalidInput, match="0 to 1"):
        chosen("cuda:2", UUIDS)
    with pytest.raises(InvalidInput, match="no such device"):
        chosen("cuda", ())


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:a", "cuda:0,", "CPU", ""])
def test_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(InvalidInput, match="device"):
        accelerators(device, {})


def test_one_worker_an_accelerator_else_one_a_core() -> None:
    assert layout(None, None, 0, cores=8) == (8, 1)
    assert layout(None, None, 2, cores=8) == (2, 4)
    assert layout(1, None, 2, cores=8) == (1, 8)
    assert layout(None, None, 8, cores=4) == (8, 1)
    assert layout(None, 2, 0, cores=8) == (4, 2)
    with pytest.raises(InvalidInput, match="accelerator"):
        layout(3, None, 2, cores=8)
    for workers, threads in ((0, None), (-1, None), (None, 0), (0, 0)):
        count, each = layout(workers, threads)
        with pytest.raises(InvalidInput, match="must be at least 1"):
            Settings(workers=count, threads=each)
    with pytest.raises(InvalidInput, match="cores"):
        layout(1, 4096)


def test_each_worker_sees_its_own_accelerator_alone(tmp_path: Path) -> None:
    settings = Settings(workers=2, accelerators=UUIDS, device="cuda")
    common = _common_variables(settings, "127.0.0.1:1", "", Workplace(tmp_path, tmp_path))
    workers = [
        common | extra for role, _, _, extra in _services(settings, None) if role == "worker"
    ]
    assert [worker["CUDA_VISIBLE_DEVICES"] for worker in workers] == list(UUIDS)
    assert {worker["SHOAL_DEVICE"] for worker in workers} == {"cuda"}
    with pytest.raises(InvalidInput, match="share"):
        Settings(workers=3, accelerators=UUIDS)


def test_torch_is_asked_in_a_separate_process_and_only_with_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = staticmethod(lambda: 2)\n")
    environ = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "3,5"}
    monkeypatch.setattr(devices, "_DRIVERS", (str(tmp_path),))
    before = "torch" in sys.modules
    assert accelerators("auto", environ) == ("3", "5")
    assert accelerators("cuda:1", environ) == ("5",)
    assert accelerators("cpu", environ) == ()
    monkeypatch.setattr(devices, "_DRIVERS", (str(tmp_path / "none"),))
    assert accelerators("auto", environ) == ()
    assert ("torch" in sys.modules) == before

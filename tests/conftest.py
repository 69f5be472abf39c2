"""For all tests: torch takes one thread, because a test's forward pass shares the machine with the mesh under test; without a
GPU the Triton kernels run in Triton's interpreter, which must be said before anything imports Triton; files that take long come
first, so that no process is left alone with one of them.
"""

import os

import pytest
import torch

LONG = ("test_minilm.py", "test_chaos.py", "test_zipf.py", "test_keda_processes.py", "test_scheduler.py", "test_lora.py")

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)

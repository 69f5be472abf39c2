"""`python -m services.worker`: reads settings, sets up logs and threads, and runs `app.py` until a
signal.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from libs import memory
from libs.errors import ShoalError
from libs.telemetry import traces
from libs.telemetry.logs import configure, fields
from services.worker.settings import Settings

if TYPE_CHECKING:
    from services.worker.machine.device import Device

log = logging.getLogger("services.worker")

_HEAPS = 2
"""Number of malloc arenas."""
_COMPILED_PRODUCTS = "256"
"""Capacity of each of oneDNN's caches of compiled matrix products."""
_SWITCH_INTERVAL_SECONDS = 0.0002
"""Time for which a thread may hold the interpreter lock while another waits; Python's default is 5
ms. An eager forward pass on a GPU releases the lock with each of its 220 to 450 launches and must
get it back while the event loop is busy with callers. A forward pass on a CPU does so about 24
times and keeps the default, with fewer switches.
"""


def main(open_device: Callable[[Settings], Device] | None = None) -> NoReturn:
    """Run the worker; never returns. Exit codes: 0 after a signal, 1 if the device or the worker
    failed, 2 for invalid settings.
    """
    try:
        settings = Settings.from_env(os.environ)
        configure("worker", settings.log_level)
        traces.start("worker", settings.worker_id, os.environ)
        _limit_threads(settings.threads)
        _limit_heaps()
        limit_compiled_products()
        if settings.device != "cpu":
            memory.use_expandable_segments(os.environ)
        code = _run(settings, open_device)
    except ShoalError as error:
        print(f"worker: {error.message}", file=sys.stderr)
        code = 2
    traces.stop()
    logging.shutdown()
    sys.stderr.flush()
    # A load or forward pass cannot be interrupted: a normal interpreter shutdown would wait or
    # crash.
    os._exit(code)


def _limit_threads(threads: int) -> None:
    """Set thread counts before torch and tokenizers are imported, which read these variables once.
    Tokenising must leave cores for the forward pass.
    """
    tokenizer_threads = max(1, threads // 2)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("RAYON_NUM_THREADS", str(tokenizer_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if tokenizer_threads > 1 else "false")


def _limit_heaps() -> None:
    """Limit freed memory that malloc keeps, and the cost of torch's arrays. Must run before torch
    is imported.

    Arenas: each load runs on a thread. glibc creates up to eight arenas per core for threads, and
    arenas keep the memory that loads free.

    Thresholds: glibc maps an array separately above a threshold that begins at 128 KiB and follows
    the largest array freed, so the cost of a forward pass depends on earlier ones. The kernel
    zeroes a mapped array page by page. With a threshold of 4 MiB the layers of a batch of 4,096
    tokens took 1.35 s of user and 1.0 s of system time; with 32 MiB, glibc's maximum, 1.11 s and
    none. Huge pages, which torch requests because of this variable, reduce that to 1.00 s.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    memory.limit_heaps(_HEAPS)


def limit_compiled_products() -> None:
    """Limit oneDNN's caches of compiled matrix products. Must run before torch is imported.

    oneDNN compiles a product for each new shape, and packed batches always have new ones. It and
    ideep, through which torch calls it, would each cache 1,024: some 500 MB in a worker of small
    models, full only after many minutes, and replacing entries fragments the heap
    (docs/decisions/0013-returning-memory.md).
    """
    for limit in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(limit, _COMPILED_PRODUCTS)


def _run(settings: Settings, open_device: Callable[[Settings], Device] | None) -> int:
    import torch

    from services.worker.app import run_until_signalled
    from services.worker.machine import device as devices

    torch.set_num_threads(settings.threads)
    torch.set_num_interop_threads(1)
    memory.freeze()
    device = (open_device or devices.open_device)(settings)
    if not device.shares_memory:
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    described = settings.describe() | {
        "device": device.name,
        "memory_bytes": str(device.memory_bytes),
        "native_kernels": device.kernels,
    }
    log.info("worker starts", extra=fields({**described, "batch_tokens": device.batch_tokens}))
    try:
        run_until_signalled(settings, device)
    except Exception:
        log.exception("the worker failed")
        return 1
    return 0


if __name__ == "__main__":
    main()

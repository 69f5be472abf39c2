"""`python -m services.worker`: settings from the environment, logs, threads, then `app.py` until a signal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from libs.errors import ShoalError
from libs.telemetry.logs import configure, fields
from services.worker.settings import Settings

if TYPE_CHECKING:
    from services.worker.device import Device

log = logging.getLogger("services.worker")


def main(open_device: Callable[[Settings], Device] | None = None) -> NoReturn:
    """Never returns. Exit codes: 0 after a signal, 1 if the device or the worker failed, 2 for settings that cannot be."""
    try:
        settings = Settings.from_env(os.environ)
        configure("worker", settings.log_level)
        _limit_threads(settings.threads)
        code = _run(settings, open_device)
    except ShoalError as error:
        print(f"worker: {error.message}", file=sys.stderr)
        code = 2
    logging.shutdown()
    sys.stderr.flush()
    # A load or a forward pass in progress cannot be interrupted: the interpreter's own end would wait for it, or crash under it.
    os._exit(code)


def _limit_threads(threads: int) -> None:
    """Before torch and tokenizers are imported, which read these once. Tokenising must leave cores to the forward pass."""
    tokenizer_threads = max(1, threads // 2)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("RAYON_NUM_THREADS", str(tokenizer_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if tokenizer_threads > 1 else "false")


def _run(settings: Settings, open_device: Callable[[Settings], Device] | None) -> int:
    import torch

    from services.worker import device as devices
    from services.worker.app import run_until_signalled

    torch.set_num_threads(settings.threads)
    torch.set_num_interop_threads(1)
    device = (open_device or devices.open_device)(settings)
    described = settings.describe() | {"device": device.name, "memory_bytes": str(device.memory_bytes)}
    log.info("worker starts", extra=fields({**described, "batch_tokens": device.batch_tokens}))
    try:
        run_until_signalled(settings, device)
    except Exception:
        log.exception("the worker failed")
        return 1
    return 0


if __name__ == "__main__":
    main()

"""`python -m tests.store.fetching ROOT CACHE MODEL THREADS`: asks for a model in several threads;
HF_ENDPOINT is the hub.

Says `ready`, waits for a line, then prints the directory that each thread got, as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from libs.store import ModelStore
from libs.store.cache import Cache
from libs.store.hub import Hub
from tests.store.conftest import TRANSFER


def main(root: str, cache: str, model: str, threads: str) -> None:
    store = ModelStore([Hub(cache=Path(cache))], Cache(Path(root)), 1 << 40, TRANSFER)
    found: list[str] = []
    asking = [
        threading.Thread(
            target=lambda: found.append(str(store.get(model, lambda progress: None).directory))
        )
        for _ in range(int(threads))
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`python -m tools.docs.screenshots`: take docs/assets/top.svg and docs/assets/console.png from a
running `shoal up` under traffic.

Chromium and playwright-core are those of `make console-check`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Final

import rich.console
import shoal
from rich._export_format import CONSOLE_SVG_FORMAT
from shoal.cli.top.watcher import Watcher

from tests.console.__main__ import TOOLS, _browser, _install

HERE: Final = Path(__file__).parent
ASSETS: Final = HERE.parents[1] / "docs/assets"
MODEL: Final = "sentence-transformers/all-MiniLM-L6-v2"
EDGE: Final = "http://127.0.0.1:8080"
CALLERS: Final = 8
WARM_UP_SECONDS: Final = 30.0
WIDTH: Final = 110
TEXTS: Final = (
    "a shoal of fish turns as one",
    "the mesh batches texts by tokens, without padding",
    "who may use my patents?",
)


def main() -> None:
    if not _browser() or not _install():
        raise SystemExit("Chromium or npm is missing: make console-check says how to get them")
    ASSETS.mkdir(exist_ok=True)
    stop = threading.Event()
    callers = [threading.Thread(target=_call, args=(stop, number)) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        time.sleep(WARM_UP_SECONDS)
        _top()
        environment = {
            "TOOLS": str(TOOLS),
            "CHROMIUM": _browser(),
            "URL": f"{EDGE}/#/mesh",
            "OUT": str(ASSETS / "console.png"),
        }
        subprocess.run(["node", HERE / "screenshot.mjs"], env=os.environ | environment, check=True)  # noqa: S607
    finally:
        stop.set()
        for caller in callers:
            caller.join()


def _call(stop: threading.Event, number: int) -> None:
    """Ask the edge for vectors and rankings, in turn, until `stop`."""
    bodies = (
        ("/v1/embeddings", {"model": MODEL, "input": [TEXTS[number % len(TEXTS)]] * 8}),
        ("/v2/rerank", {"model": MODEL, "query": TEXTS[2], "documents": list(TEXTS[:2])}),
    )
    while not stop.is_set():
        for path, body in bodies:
            urllib.request.urlopen(f"{EDGE}{path}", json.dumps(body).encode()).read()  # noqa: S310


def _top() -> None:
    console = rich.console.Console(
        record=True,
        width=WIDTH,
        file=open(os.devnull, "w"),  # noqa: SIM115
        force_terminal=True,
    )
    with shoal.Client() as client, Watcher(client, 1.0, "") as watcher:
        time.sleep(12.0)
        console.print(watcher.view(WIDTH, 40))
    # Without the fonts that rich loads from another host.
    local = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    (ASSETS / "top.svg").write_text(
        console.export_svg(title="shoal top", code_format=local), "utf-8"
    )


if __name__ == "__main__":
    main()

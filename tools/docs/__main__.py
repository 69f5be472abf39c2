"""`python -m tools.docs [--check]`: write docs/reference from the command line, settings, routes,
protos and metrics.

With --check nothing is written, and a page that is not current fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools.docs import cli, http, metrics, protos, settings

FOLDER: Final = Path(__file__).parents[2] / "docs/reference"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "cli.md": cli.page,
    "settings.md": settings.page,
    "http.md": http.page,
    "protos.md": protos.page,
    "metrics.md": metrics.page,
}


def main() -> None:
    stale = []
    for name, page in PAGES.items():
        text, path = page(), FOLDER / name
        if path.is_file() and path.read_text("utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(text, "utf-8")
    if "--check" in sys.argv[1:] and stale:
        sys.exit(f"docs/reference is stale ({', '.join(stale)}): run python -m tools.docs")
    print(f"docs/reference: {len(PAGES)} pages are current")


if __name__ == "__main__":
    main()

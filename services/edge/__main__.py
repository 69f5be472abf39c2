"""Run one edge until SIGTERM or Ctrl-C, then drain it: `python -m services.edge`."""

from __future__ import annotations

import sys

from libs.serving.process import run
from services.edge.app import running
from services.edge.settings import Settings


def main() -> int:
    """Return the exit status: 0 after a drain, 2 for an error that the operator must fix."""
    return run("edge", Settings.from_env, running)


if __name__ == "__main__":
    sys.exit(main())

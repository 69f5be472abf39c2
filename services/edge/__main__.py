"""`python -m services.edge`: one edge, until SIGTERM or Ctrl-C; then it drains and ends with status
0.
"""

from __future__ import annotations

import sys

from libs.serving.process import run
from services.edge.app import running
from services.edge.settings import Settings


def main() -> int:
    """Exit status: 0 after a drain, 2 for what the operator must change."""
    return run("edge", Settings.from_env, running)


if __name__ == "__main__":
    sys.exit(main())

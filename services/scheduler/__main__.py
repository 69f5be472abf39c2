"""`python -m services.scheduler` runs one scheduler until SIGTERM or Ctrl-C, then drains it and
exits with status 0.
"""

from __future__ import annotations

import sys

from libs.queue import UnsuitableRedis
from libs.serving.process import run
from services.scheduler.app import running
from services.scheduler.settings import Settings


def main() -> int:
    """Return the exit status: 0 after a drain, 2 for an error that the operator must fix."""
    return run("scheduler", Settings.from_env, running, UnsuitableRedis)


if __name__ == "__main__":
    sys.exit(main())

"""A process of a job that reads its order and fails."""

from __future__ import annotations

import sys

sys.stdin.readline()
sys.exit(3)

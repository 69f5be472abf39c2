"""A process of a job that fails in the way that TEST_CHILD names."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from services.edge.jobs import child


def _broken(order: dict[str, Any]) -> Any:
    raise ValueError("no such thing " * 1000)


way = os.environ.get("TEST_CHILD", "")
if way == "broken":
    child._manifest = _broken
    child.main()
else:
    sys.stdin.readline()
    if way == "waits":
        sys.stdin.read()
    elif way == "slow":  # A chunk is overdue, and a request to pause is followed all the same.
        print(json.dumps({"counts": {}, "overdue_seconds": 125.0}), flush=True)
        sys.stdin.readline()
        print(json.dumps({"counts": {}, "overdue_seconds": 125.5}), flush=True)
        end = {"state": "paused", "error": "", "reason": "", "counts": {"rows": 7}}
        threading.Event().wait(1.0)
        print(json.dumps({"end": end}), flush=True)
    elif way == "overdue":
        print(json.dumps({"counts": {}, "overdue_seconds": 1e6}), flush=True)
    elif way == "stays":
        end = {"state": "completed", "error": "", "reason": "", "counts": {"rows": 7}}
        print(json.dumps({"end": end}), flush=True)
    elif way == "busy":
        print(json.dumps({"end": {"state": "failed", "error": "busy", "reason": "BUSY"}}))
    elif way == "long":
        print(json.dumps({"end": {"state": "failed", "error": "x" * (2 << 20), "reason": ""}}))
if way in ("overdue", "silent", "stays"):
    threading.Event().wait()
sys.exit(0 if way == "busy" else 3)

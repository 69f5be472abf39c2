"""`python -P launch.py services.worker`: run a module of Shoal, even if another package is called
`services` or `libs`.

Run as a file: it must work before `services` can be imported. The folder that holds `services` and
`libs`, which is the checkout or `shoal_mesh/_code` of an installed wheel, is put first on the path;
`-P` keeps this file's folder off it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

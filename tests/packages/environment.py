"""An environment with further packages of PyPI, on top of the one that runs the tests."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ENVIRONMENTS: Final = Path(__file__).parents[2] / ".cache" / "package-environments"


def environment_with(packages: Sequence[str], root: Path = ENVIRONMENTS) -> Path:
    """Return the Python of an environment that has these packages, and those of this one where the
    versions agree. An existing environment is reused.
    """
    place = root / "-".join(packages)
    python, done = place / "bin" / "python", place / ".done"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
    # Packages of this environment, which pip then takes as installed.
    (Path(found.stdout.strip()) / "tests.pth").write_text(sysconfig.get_path("purelib"))
    pip = ("-m", "pip", "--disable-pip-version-check", "install", "-q")
    subprocess.run([str(python), *pip, *packages], check=True)
    done.touch()
    return python

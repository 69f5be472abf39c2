"""The example of the README of the integration SHOAL_INTEGRATION runs as it stands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parent / os.environ["SHOAL_INTEGRATION"] / "README.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    if "connect_to_local" in example:
        pytest.skip("needs a server of the framework")
    exec(compile(example, str(readme), "exec", dont_inherit=True), {"__name__": "example"})
    assert "a shoal of fish" in capsys.readouterr().out

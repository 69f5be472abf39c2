"""`python -m tools.docs` fails unless exactly the variables that the code reads are documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import settings


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('environ["SHOAL_POOL"]', ""),
        ('environ["SHOAL_POOL"] or environ["SHOAL_NEW"]', "no settings class declares SHOAL_NEW"),
        ("", "SHOAL_POOL: no code reads it"),
        ('environ["SHOAL_POOL"] or environ[f"SHOAL_TLS_{part}"]', "a.py composes the name"),
        ('environ["SHOAL_POOL"] or environ["SHOAL_" + name]', "a.py composes the name"),
        ('environ["SHOAL_POOL"]  # one of SHOAL_TLS_...', ""),
    ],
)
def test_variables_in_code_are_those_on_the_page(tmp_path: Path, code: str, problem: str) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/a.py").write_text(code)
    if not problem:
        settings._check_complete({"SHOAL_POOL"}, tmp_path)
        return
    with pytest.raises(SystemExit, match=problem):
        settings._check_complete({"SHOAL_POOL"}, tmp_path)

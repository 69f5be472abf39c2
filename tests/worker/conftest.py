"""Settings of the worker's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from shoal.cli import main, plugins
from typer.testing import CliRunner

from services.worker import app
from services.worker.machine import notice
from services.worker.memory import graphs
from services.worker.mesh import link
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.worker.fakes import HANG_SECONDS

CHECK = EntryPoint("models.check", "services.worker.check.command:check", plugins.GROUP)


class Ran:
    """The command's output and exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> Any:
        return json.loads(self.out)


Check = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _peers_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not give up calls of the worker after seconds: in a test its peers share the event loop
    and the cores with it, and a busy machine may not run them for that long.
    """
    monkeypatch.setattr(app, "_HAND_BACK_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(app, "_GOODBYE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(graphs, "_GRANT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(notice, "_TIMEOUT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link, "COMPLETE_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link, "PULL_MARGIN_SECONDS", HANG_SECONDS)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    monkeypatch.setenv("SHOAL_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(plugins, "entry_points", lambda group: (CHECK,))
    for name in ("SHOAL_MODELS", "SHOAL_STORES", "SHOAL_CATALOG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str | Path) -> Ran:
        result = CliRunner().invoke(main.build(), ["models", "check", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    files = SentenceFiles(
        max_seq_length=32, dense=16, prompts={"query": "query: "}, default_prompt="query"
    )
    return write_checkpoint("bert", tmp_path / "org" / "embedder", sentence=files)

"""Completion of the `shoal` command in shells, as typer's script for bash asks for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal.cli import main, model_names
from typer.testing import CliRunner

from tests.api.fake_router import DOWNLOADING, MODEL, FakeRouter


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """A folder of models, a model that is named, and the copies of a worker on this computer."""
    for name, file in (
        ("models/org/local", "config.json"),
        ("models/org/adapter", "adapter_config.json"),
        ("models/org/empty", "notes.txt"),
        ("store/models/org/downloaded", "config.json"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).touch()
    return {
        "SHOAL_MODELS": f"{tmp_path / 'models'}:org/named=/nowhere",
        "SHOAL_STORE_DIR": str(tmp_path / "store"),
    }


LOCAL = {"org/adapter", "org/downloaded", "org/local", "org/named"}


Complete = Callable[..., tuple[set[str], str]]


@pytest.fixture
def complete(
    monkeypatch: pytest.MonkeyPatch, router: FakeRouter, folders: dict[str, str]
) -> Complete:
    """Return the completions of the last word, and stderr."""
    monkeypatch.setattr(model_names, "COMPLETION_SECONDS", 60.0)

    def run(words: str, **environment: str) -> tuple[set[str], str]:
        typed = {
            "_SHOAL_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
            "SHOAL_ADDRESS": router.address,
        }
        done = CliRunner().invoke(
            main.build(), [], env=typed | folders | environment, prog_name="shoal"
        )
        return set(done.stdout.split()), done.stderr

    return run


@pytest.mark.parametrize(
    "words",
    [
        "shoal encode ",
        "shoal extract entities --label person ",
        "shoal job run encode ",
        "shoal models show ",
        "shoal migrate start alias --to ",
    ],
)
def test_models_of_the_mesh_and_of_local_folders_are_completed(
    complete: Complete, words: str
) -> None:
    names, errors = complete(words)
    assert names == {MODEL, DOWNLOADING, *LOCAL}, "without the model that failed"
    assert errors == ""
    assert complete(words + MODEL[:-2]) == ({MODEL}, "")


def test_router_of_the_typed_options_is_asked(
    complete: Complete, router: FakeRouter, nobody: str
) -> None:
    names, _ = complete(f"shoal encode --address {router.address} ", SHOAL_ADDRESS=nobody)
    assert MODEL in names


def test_commands_of_the_services_complete_local_models(
    complete: Complete, router: FakeRouter
) -> None:
    for words in ("shoal up ", "shoal models check --no-test "):
        assert complete(words) == (LOCAL, "")
    assert not router.calls


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"SHOAL_TOKEN_FILE": "/nowhere"},
        {"SHOAL_TLS_CA": "/nowhere"},
        {"SHOAL_TLS_CA": sys.executable},  # not a certificate
        {"SHOAL_ADDRESS": "[::half"},
    ],
)
def test_failures_are_silent(
    complete: Complete,
    router: FakeRouter,
    nobody: str,
    folders: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    broken: dict[str, str],
) -> None:
    monkeypatch.setattr(model_names, "COMPLETION_SECONDS", 0.1)
    router.gate.clear()  # No call is answered.
    for address in (nobody, router.address):
        settings = {"SHOAL_ADDRESS": address, **broken}
        assert complete("shoal encode ", **settings) == (LOCAL, "")
        nothing = dict.fromkeys(folders, "/nowhere")
        assert complete("shoal encode ", **settings | nothing) == (set(), "")
    router.gate.set()


def test_shell_waits_for_the_mesh_half_a_second_at_most(
    complete: Complete, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert model_names.COMPLETION_SECONDS <= 0.5
    complete("shoal encode ")
    assert all(call.seconds_left <= 0.5 for call in router.calls)

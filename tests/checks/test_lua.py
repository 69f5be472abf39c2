"""`make check` reads the Lua that Redis runs (tools/lua.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import lua


def test_all_our_lua_compiles_and_has_a_caller() -> None:
    files = sorted(lua.ROOT.glob("libs/*/lua/*.lua"))
    assert len(files) > len(lua.scripts()) > 20
    assert lua.faults(files, lua.scripts()) == []


def test_invalid_or_unused_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lua, "ROOT", tmp_path)
    folder = tmp_path / "libs" / "queue" / "lua"
    folder.mkdir(parents=True)
    (folder / "enqueue.lua").write_text("local a = 1\nif a then\n")
    (folder / "unused.lua").write_text("return 1 // 2\n")
    (folder / "_lane.lua").write_text("local function f() end\n")
    known = {name: script for name, script in lua.scripts().items() if name == "libs/queue/enqueue"}
    named, wrong, other = lua.faults(sorted(folder.iterdir()), known)
    assert named == "libs/queue/lua/unused.lua: no script has this name"
    assert wrong.startswith("libs/queue/lua/enqueue.lua: ")
    assert "'end' expected" in wrong
    assert other.startswith("libs/queue/lua/unused.lua: ")

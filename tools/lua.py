"""`python -m tools.lua`: check that every script compiles with Lua 5.1, which Redis runs.

Part of `make check`. Each `lua/*.lua` must compile by itself, and each file must be a script that
is used or, with a leading underscore, a prologue. tests/queue tests the scripts in a real Redis.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

from lupa.lua51 import LuaError, LuaRuntime

from libs.queue.scripts import Script

ROOT: Final = Path(__file__).resolve().parent.parent
MODULES: Final = (
    "libs.aliases.scripts",
    "libs.queue.operations",
    "libs.queue.rates",
    "libs.queue.queue_position",
    "libs.queue.upkeep",
    "libs.fleet.scripts",
)


def scripts() -> dict[str, Script[...]]:
    """Return the scripts that are used, by `<package>/<name>`."""
    found: dict[str, Script[...]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        package = name.rpartition(".")[0].replace(".", "/")
        found |= {
            f"{package}/{key}": value
            for key, value in vars(module).items()
            if isinstance(value, Script)
        }
    return found


def faults(files: list[Path], known: dict[str, Script[...]]) -> list[str]:
    """Return the errors of Lua files, and of scripts with their prologues as sent to Redis."""
    lua, found = LuaRuntime(), []
    for path in files:
        name = f"{path.parent.parent.relative_to(ROOT).as_posix()}/{path.stem}"
        if not path.stem.startswith("_") and name not in known:
            found.append(f"{path.relative_to(ROOT)}: no script has this name")
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files} | {
        key: one.text for key, one in known.items()
    }
    for name, text in texts.items():
        try:
            lua.compile(text)
        except LuaError as error:
            found.append(f"{name}: {error}")
    return found


def main() -> None:
    files = sorted(ROOT.glob("libs/*/lua/*.lua"))
    found = faults(files, scripts())
    for fault in found:
        print(fault)
    if found:
        sys.exit(1)
    print(f"{len(files)} Lua files are Lua 5.1")


if __name__ == "__main__":
    main()

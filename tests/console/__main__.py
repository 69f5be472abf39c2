"""`python -m tests.console [--only NAME] [--short] [--optional]`: test the console of real edges in
Chromium.

The edges have fake routers (tests/edge/fake_mesh.py) in every state of a mesh: empty, busy,
failing, with 1,000 models, one that requires tokens, and none. check.mjs drives the browser with
playwright-core, which is installed below .cache/console from the lock file. Without Chromium on the
PATH, Debian's package is unpacked below .cache/chromium. Screenshots are written to build/console.
Exit status 1 means that a check failed, 2 that a program is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from libs.errors import NoCapacity
from services.edge.app import running
from services.edge.settings import Settings
from tests.edge import fake_mesh
from tests.edge.fake_mesh import FakeMesh

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
TOOLS: Final = ROOT / ".cache/console"
UNPACKED: Final = ROOT / ".cache/chromium/run"
SHOTS: Final = ROOT / "build/console"
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.console")
    parser.add_argument("--only", default="", help="the name of one part of check.mjs")
    parser.add_argument(
        "--short", action="store_true", help="fewer screenshots, and no frame is timed: for .ci/run"
    )
    parser.add_argument(
        "--optional",
        action="store_true",
        help="status 0, with a word, where Chromium or npm cannot be had",
    )
    given = parser.parse_args()
    browser, has_npm = _browser(), bool(shutil.which("npm"))
    missing = [
        *(
            []
            if browser
            else ["Chromium: apt-get install -y chromium, or set CHROMIUM to its path"]
        ),
        *(
            []
            if has_npm
            else ["npm with Node 20 or newer: apt-get install -y nodejs npm, or from nodejs.org"]
        ),
        *(
            ["playwright-core and axe-core, from npm's registry"]
            if has_npm and not _install()
            else []
        ),
    ]
    if missing:
        what = (
            "SKIPPED: the console was not opened in a browser"
            if given.optional
            else "the console cannot be checked here"
        )
        print(f"{what}; install", *missing, sep="\n  ", file=sys.stderr)
        return 0 if given.optional else 2
    shutil.rmtree(SHOTS, ignore_errors=True)
    SHOTS.mkdir(parents=True)
    return asyncio.run(_check(browser, given.only, short=given.short))


def _browser() -> str:
    """The path of CHROMIUM, of a browser on the PATH, or of Debian's, unpacked now; empty where it
    cannot be had.
    """
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), "")
    if found:
        return found
    if not UNPACKED.is_file():
        shutil.rmtree(UNPACKED.parent, ignore_errors=True)
        fetch = [
            str(ROOT / "tools/debian_package.sh"),
            "chromium",
            str(UNPACKED.parent),
            "--with-dependencies",
        ]
        if subprocess.run(fetch, check=False).returncode != 0:
            return ""
        UNPACKED.write_text(_launcher(UNPACKED.parent))
        UNPACKED.chmod(0o755)
    return str(UNPACKED)


def _launcher(folder: Path) -> str:
    """Return a shell script that starts the browser of a folder, also after the folder is moved."""
    libraries = sorted(
        {
            f"$here/{file.parent.relative_to(folder)}"
            for root in ("lib", "usr/lib")
            for file in (folder / root).rglob("*.so*")
        }
    )
    return (
        '#!/bin/sh\nhere=$(cd "$(dirname "$0")" && pwd)\n'
        f'LD_LIBRARY_PATH="{":".join(libraries)}" exec "$here/usr/lib/chromium/chromium" "$@"\n'
    )


def _install() -> bool:
    """Install the packages of package-lock.json, checked by hash. Return whether it succeeded."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    lock = TOOLS / "package-lock.json"
    if (
        lock.is_file()
        and lock.read_bytes() == (HERE / lock.name).read_bytes()
        and (TOOLS / "node_modules").is_dir()
    ):
        return True
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, TOOLS / name)
    return (
        subprocess.run(
            ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=TOOLS, check=False
        ).returncode
        == 0
    )


async def _check(browser: str, only: str, *, short: bool) -> int:
    fakes = {
        "empty": FakeMesh(),
        "busy": fake_mesh.with_others(fake_mesh.busy()),
        "failing": FakeMesh(
            refusal=NoCapacity("Redis cannot be reached, so nothing is known of the mesh")
        ),
        "many": fake_mesh.many(),
        "guarded": fake_mesh.busy(),
    }
    fakes["empty"].mesh.router_id = "router-7c9f"
    fakes["busy"].word_seconds = 0.05
    fakes["guarded"].tokens = {"admin-token": "admin", "client-token": "client"}
    async with AsyncExitStack() as stack:
        addresses = {
            name: await stack.enter_async_context(fake_mesh.routing(fake))
            for name, fake in fakes.items()
        }
        addresses["gone"] = "127.0.0.1:9"
        urls = {}
        for name, router in addresses.items():
            settings = Settings(
                edge_id=f"edge-{name}",
                address="127.0.0.1:0",
                routers=(router,),
                console=True,
                grace_seconds=1.0,
            )
            urls[name] = f"http://{await stack.enter_async_context(running(settings))}"
        environment = {
            "CONSOLE_URLS": json.dumps(urls),
            "CHROMIUM": browser,
            "SHOTS": str(SHOTS),
            "ONLY": only,
            "SHORT": "1" if short else "",
            "TOOLS": str(TOOLS),
            "PYTHON": sys.executable,
        }
        process = await asyncio.create_subprocess_exec(
            "node", HERE / "check.mjs", env={**os.environ, **environment}
        )
        status = await process.wait()
        # The part `shared` has three pages. One watch may begin before the one that it replaces has
        # ended at the router.
        watched = {
            name: fake.most_watchers for name, fake in fakes.items() if fake.most_watchers > 2
        }
        if watched:
            print(f"a WatchMesh for every page: {watched}", file=sys.stderr)
            return 1
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())

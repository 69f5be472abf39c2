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
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from libs.errors import NoCapacity
from libs.serving import Security
from services.edge.app import running
from services.edge.batches.objects import BatchError, BatchRecord, Counts, Status, make_id
from services.edge.batches.settings import BatchSettings
from services.edge.batches.store import BatchStore, tenant_key
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
        "tenants": fake_mesh.busy(),
    }
    fakes["empty"].mesh.router_id = "router-7c9f"
    fakes["busy"].word_seconds = 0.05
    fakes["guarded"].tokens = {"admin-token": "admin", "client-token": "client"}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        batches = {"tenants": _stored_batches(folder)}
        security = {"tenants": _tenants(folder)}
        addresses = {
            name: await stack.enter_async_context(fake_mesh.routing(fake, security.get(name)))
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
                batches=batches.get(name, BatchSettings()),
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


def _tenants(folder: Path) -> Security:
    """Return the tokens of two tenants, named after them."""
    path = folder / "tokens.yaml"
    tokens = [
        {"token": f"token-of-the-{name}-tenant", "subject": name, "role": "client", "tenant": name}
        for name in ("red", "blue")
    ]
    path.write_text(json.dumps({"tokens": tokens}))
    path.chmod(0o600)
    return Security(tokens=path)


def _stored_batches(folder: Path) -> BatchSettings:
    """Store two ended batches of the tenant red and one of the tenant blue."""
    settings = BatchSettings(url=str(folder / "files"))
    store = BatchStore(settings.location)
    store.prepare()
    error = BatchError(code="invalid_json", message="the line is not JSON", line=3)
    _store_ended(store, "red", 1, "completed", "BAAI/bge-m3", Counts(1_250, 1_243, 7))
    _store_ended(store, "red", 2, "failed", "", Counts(), [error])
    _store_ended(store, "blue", 3, "completed", "blue/model", Counts(1, 1, 0))
    return settings


def _store_ended(
    store: BatchStore,
    tenant: str,
    number: int,
    status: Status,
    model: str,
    counts: Counts,
    errors: list[BatchError] | None = None,
) -> None:
    now = int(time.time())
    record = BatchRecord(
        id=make_id("batch_", now, f"{number:032x}"),
        endpoint="/v1/embeddings",
        input_file_id=make_id("file-", now, f"{number:032x}"),
        completion_window="24h",
        created_at=now,
        expires_at=now + 86_400,
        output_id=make_id("file-", now, f"{number + 10:032x}"),
        errors_id=make_id("file-", now, f"{number + 20:032x}"),
        output_seconds=86_400,
        status=status,
        model=model,
        counts=counts,
        errors=errors or [],
        stored_bytes=counts.failed,
    )
    own = store.tenant(tenant_key(tenant))
    own.create_batch(record)
    own.end_batch(record)
    own.deactivate(record.id)


if __name__ == "__main__":
    sys.exit(main())

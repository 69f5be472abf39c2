"""`python -m tests.interop [CLIENT …]`: runs unmodified clients against a mesh of this checkout, and records what they send.

Each client has an environment of its own below .cache/interop, because their pins collide. The table in docs/http.md and the bodies
in recorded.json, which `make test` replays (tests/edge/test_recorded.py), are written anew; with names of clients as arguments only
theirs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import shoal

from services.edge.app import Edge
from services.edge.doors import Door
from services.edge.routers import Routers
from services.edge.server import Limits, serving_http
from services.edge.settings import Settings as EdgeSettings
from services.edge.tei_grpc import serving_tei
from services.local.mesh import running
from services.local.settings import MINILM, Settings, known_models
from tests.mesh.conftest import CLASSES, LABELS
from tests.parity.checkpoints import write_checkpoint

ROOT: Final = Path(__file__).parents[2]
HERE: Final = Path(__file__).parent
ENVIRONMENTS: Final = ROOT / ".cache/interop"
RECORDED: Final = HERE / "recorded.json"
PAGE: Final = ROOT / "docs/http.md"
KEPT_HEADERS: Final = (
    "content-type",
    "content-encoding",
    "accept",
    "user-agent",
    "x-sie-sdk-version",
    "x-stainless-read-timeout",
    "inference-header-content-length",
)
HEAD_LINES: Final = 4
"""Of the table, before its rows."""
CLASSIFIER: Final = "random/bert-classes"
TAGGER: Final = "random/bert-entities"
TEXTS: Final = ["a shoal of fish", "a table of wood", "ships at sea", "bread and butter", "the fish market", "Überraschung 🐟"]


@dataclass(frozen=True)
class Client:
    """`install`: pip's arguments, or npm's for a script of Node. `versions`: the packages of which the table names versions."""

    name: str
    script: str
    install: Sequence[Sequence[str]]
    versions: Sequence[str]


CLIENTS: Final = (
    Client("openai", "use_openai.py", (("openai",),), ("openai",)),
    Client("cohere", "use_cohere.py", (("cohere", "voyageai"),), ("cohere", "voyageai")),
    Client("hub", "use_hub.py", (("huggingface_hub", "numpy"),), ("huggingface_hub",)),
    Client("ollama", "use_ollama.py", (("ollama",),), ("ollama",)),
    Client(
        "sie",
        "use_sie.py",
        (
            ("--no-deps", "--ignore-requires-python", "sie-sdk==0.10.1"),
            ("aiohttp", "httpx<1", "msgpack", "msgpack-numpy", "numpy<2.5", "pillow", "pyyaml", "websockets<15"),
        ),
        ("sie-sdk",),
    ),
    Client("kserve", "use_kserve.py", (("tritonclient[http]",),), ("tritonclient",)),
    Client(
        "haystack", "use_haystack.py", (("huggingface-api-haystack[grpc]", "numpy"),), ("huggingface-api-haystack", "haystack-ai")
    ),
    Client("node", "use_openai.mjs", (("openai@6.49.0",),), ("openai",)),
    Client(
        "nodemore",
        "use_more.mjs",
        (("cohere-ai@8.1.0", "ollama@0.6.4", "@huggingface/inference@4.13.30"),),
        ("cohere-ai", "ollama", "@huggingface/inference"),
    ),
)


@dataclass
class Recorder:
    """The edge's application, and the requests that came."""

    application: Any
    client: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []

        async def recording() -> Any:
            event = await receive()
            parts.append(event.get("body", b""))
            return event

        await self.application(scope, recording, send)
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.requests.append(
            {
                "client": self.client,
                "method": scope["method"],
                "path": scope["raw_path"].decode(),
                "headers": {name: headers[name] for name in KEPT_HEADERS if name in headers},
                "body": base64.b64encode(b"".join(parts)).decode(),
            }
        )


def install(client: Client) -> Path:
    """The program that runs the client's script. An environment that is there is taken as it is."""
    place = ENVIRONMENTS / client.name
    done = place / ".done"
    if client.script.endswith(".mjs"):
        if not done.exists():
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", "--prefix", str(place), *client.install[0]], check=True)
            done.touch()
        return Path(shutil.which("node") or "node")
    python = place / "bin/python"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for arguments in client.install:
            subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments], check=True)
        done.touch()
    return python


def versions(client: Client, program: Path) -> str:
    if client.script.endswith(".mjs"):
        packages = ENVIRONMENTS / client.name / "node_modules"
        found = ((name, json.loads((packages / name / "package.json").read_text())["version"]) for name in client.versions)
        return f"{', '.join(f'{name} {version}' for name, version in found)} (npm)"
    code = "import sys; from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in sys.argv[1:]))"
    return subprocess.run([str(program), "-c", code, *client.versions], check=True, capture_output=True, text=True).stdout.strip()


async def calls(client: Client, program: Path, variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """What its script says, a row a call."""
    script = HERE / "clients" / client.script
    if client.script.endswith(".mjs"):  # modules are found from the script's folder on
        shutil.copy(script.with_name("checking.mjs"), ENVIRONMENTS / client.name)
        script = Path(shutil.copy(script, ENVIRONMENTS / client.name))
    process = await asyncio.create_subprocess_exec(
        str(program), str(script), env=dict(os.environ) | dict(variables), stdout=subprocess.PIPE
    )
    said, _ = await process.communicate()
    found = [json.loads(line) for line in said.decode().splitlines()]
    if process.returncode or not found:
        found.append({"call": "the script", "difference": None, "error": f"ended with status {process.returncode}"})
    return found


async def run(wanted: Sequence[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows = []
    clients = [client for client in CLIENTS if not wanted or client.name in wanted]
    programs = {client.name: await asyncio.to_thread(install, client) for client in clients}
    folders = [str(await asyncio.to_thread(write_checkpoints, ENVIRONMENTS / "checkpoints"))]
    models = known_models(folders, os.environ)
    async with running(Settings(port=0, models=models, dtype="float32")) as mesh, Routers((mesh.address,), None) as routers:
        settings = EdgeSettings(edge_id="interop", address="127.0.0.1:0", routers=(mesh.address,), compression="on")
        edge = Edge(settings, routers)
        await edge.look()
        recorder = Recorder(edge.application)
        with tempfile.TemporaryDirectory() as folder:
            expected = Path(folder) / "expected.json"
            expected.write_text(json.dumps(await asyncio.to_thread(wanted_numbers, mesh.address)))
            tei = edge.tei_server(settings, MINILM)
            async with (
                serving_http(settings.address, recorder, Limits(), None, grace_seconds=1.0) as server,
                serving_http(settings.address, Door(recorder, MINILM), Limits(), None, grace_seconds=1.0) as door,
                serving_tei({"127.0.0.1:0": tei}, settings.security, grace_seconds=1.0),
            ):
                variables = {
                    "INTEROP_BASE": f"http://{server.address}",
                    "INTEROP_DOOR": f"http://{door.address}",
                    "INTEROP_TEI_GRPC": tei.address,
                    "INTEROP_EXPECTED": str(expected),
                    "HAYSTACK_TELEMETRY_ENABLED": "False",
                }
                for client in clients:
                    recorder.client = client.name
                    found = await calls(client, programs[client.name], variables)
                    rows.append((versions(client, programs[client.name]), found))
    record(recorder.requests)
    return rows


def record(requests: list[dict[str, Any]]) -> None:
    """Writes what was sent, each request once, over what the same clients sent before. The order is that of CLIENTS."""
    seen = {request["client"] for request in requests}
    others = [request for request in json.loads(RECORDED.read_text()) if request["client"] not in seen]
    unique = {json.dumps(request, sort_keys=True): request for request in [*others, *requests]}
    order = [client.name for client in CLIENTS]
    kept = sorted(unique.values(), key=lambda request: order.index(request["client"]))
    RECORDED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def write_checkpoints(root: Path) -> Path:
    """Small random models with the heads that MiniLM lacks, below `root`."""
    if not (root / ".done").exists():
        write_checkpoint("bert", root / CLASSIFIER, head="sequence_classification", labels=CLASSES)
        write_checkpoint("bert", root / TAGGER, head="token_classification", labels=LABELS)
        (root / ".done").touch()
    return root


def wanted_numbers(address: str) -> dict[str, Any]:
    with shoal.Client(address) as client:
        dense = client.encode(MINILM, TEXTS).dense
        int8 = client.encode(MINILM, TEXTS, data_type="int8").dense
        scores = client.score(MINILM, "fish", TEXTS, scale="probability").scores
        found = {
            "classes": client.classify(CLASSIFIER, TEXTS),
            "zero_shot": client.classify(CLASSIFIER, TEXTS, ["fish", "wood"], hypothesis="About {}."),
        }
        tagged = client.entities(TAGGER, TEXTS)
    assert dense is not None
    assert int8 is not None
    return {
        "model": MINILM,
        "texts": TEXTS,
        "query": "fish",
        "vectors": dense.tolist(),
        "int8": int8.tolist(),
        "scores": scores.tolist(),
        "classifier": CLASSIFIER,
        "tagger": TAGGER,
        "entities": [[[one.label, one.score, one.start, one.end] for one in result.entities] for result in tagged],
        **{name: [{one.label: one.score for one in result.labels} for result in results] for name, results in found.items()},
    }


def merged(page: str, text: str) -> str:
    """The page with the rows of `text`: those of clients that were not run now stay."""
    old = re.search(r"<!-- interop -->\n(.*?)\n<!-- /interop -->", page, flags=re.DOTALL)
    assert old is not None
    rows: dict[str, list[str]] = {client_of(line): [] for line in rows_of(old[1])}
    rows |= {client_of(line): [] for line in rows_of(text)}
    now = {client_of(line) for line in rows_of(text)}
    for line in [*(line for line in rows_of(old[1]) if client_of(line) not in now), *rows_of(text)]:
        rows[client_of(line)].append(line)
    lines = [*text.splitlines()[:HEAD_LINES], *(line for found in rows.values() for line in found)]
    return page.replace(old[1], "\n".join(lines))


def rows_of(text: str) -> list[str]:
    return text.splitlines()[HEAD_LINES:]


def client_of(line: str) -> str:
    """A row's client without its versions."""
    return re.sub(r" [0-9][^ ,|]*", "", line.split("|")[1]).strip()


def table(rows: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    lines = [
        f"Seen on {datetime.now(UTC):%Y-%m-%d}:",
        "",
        "| client | call | largest difference to `shoal.Client` |",
        "| --- | --- | --- |",
    ]
    for name, found in rows:
        for row in found:
            said = row["error"] or ("as expected" if row["difference"] is None else f"{row['difference']:.1e}")
            lines.append(f"| {name} | {row['call']} | {said if row['difference'] != 0 else '0'} |")
    return "\n".join(lines)


def main() -> int:
    rows = asyncio.run(run(sys.argv[1:]))
    text = table(rows)
    print(text)
    PAGE.write_text(merged(PAGE.read_text(), text))
    return int(any(row["error"] for _, found in rows for row in found))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.interop [CLIENT …]`: run unmodified clients against a mesh of this checkout, and
record their requests.

environments.py lists the clients. This rewrites the table in docs/interop.md and the bodies in
recorded.json, which `make test` replays (tests/edge/test_recorded.py). With names of clients as
arguments it rewrites only theirs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import shoal
from shoal.tasks import Turn

from services.edge.aliases import watch_aliases
from services.edge.app import Edge
from services.edge.batches.settings import BatchSettings
from services.edge.messages.vocabulary import read_vocabulary
from services.edge.ports.prefix_app import PrefixApp
from services.edge.ports.tei_grpc import serving_tei
from services.edge.routers import Routers
from services.edge.server import ServerLimits, serving_http
from services.edge.settings import Settings as EdgeSettings
from services.local.mesh import running
from services.local.settings import MINILM, Settings, known_models
from tests.generation.served import write as write_writer
from tests.generation.test_tools import write_caller
from tests.interop.environments import (
    CLIENTS,
    ENVIRONMENTS,
    ROOT,
    SCRIPTS,
    Client,
    install,
    script_of,
    tokenizer_of_openai,
    versions,
)
from tests.mesh.conftest import CLASSES, LABELS
from tests.parity.checkpoints import SentenceFiles, write_checkpoint

RECORDED: Final = Path(__file__).with_name("recorded.json")
PAGE: Final = ROOT / "docs/interop.md"
KEPT_HEADERS: Final = (
    "content-type",
    "content-encoding",
    "accept",
    "user-agent",
    "x-sie-sdk-version",
    "x-stainless-read-timeout",
    "inference-header-content-length",
)
STORED: Final = ("/v1/files", "/v1/batches")
"""Paths of objects that exist only in this mesh, so that their requests cannot be replayed."""
HEAD_LINES: Final = 2
"""The lines of the table before its rows."""
CLASSIFIER: Final = "random/bert-classes"
TAGGER: Final = "random/bert-entities"
WRITER: Final = "random/qwen3-chat"
CALLER: Final = "random/qwen3-calls"
"""A model that calls functions."""
PROMPTED: Final = "random/bert-embed"
"""A model with a prompt for queries, which MiniLM lacks."""
SHORT: Final = 16
"""The requested dimensions of a shortened vector."""
SYSTEM, USER, TOKENS = "Be short.", "a text about fish", 30
"""The prompt of all clients for the generative model."""
TURNS: Final[Sequence[Turn]] = (("user", "a text"), ("assistant", "about fish"))
"""The preceding messages of a conversation."""
ALIASES: Final = {
    "text-embedding-3-small": {"model": MINILM, "dimensions": 384},
    "embed-english-v3.0": MINILM,
    "embed": MINILM,
    "rerank": MINILM,
}
"""Names that clients require."""
SLOW: Final = {"requests_per_second": 0.5, "burst_seconds": 2}
"""The limits of a tenant that gets one request per two seconds."""
WAITED: Final = "(rate limited)"
"""The suffix of calls in the table that must have received at least one 429 with Retry-After."""
MAX_DIFFERENCE: Final = 1e-6
"""The largest difference of a passing call. Float32 sums of different batches differ by up to
1.2e-7, decimal numbers by up to 3e-8, and float16 by more than 1e-4.
"""
TEXTS: Final = [
    "a shoal of fish",
    "a table of wood",
    "ships at sea",
    "bread and butter",
    "the fish market",
    "Überraschung 🐟",
]


@dataclass
class Recorder:
    """Wraps the edge's application and records its requests."""

    application: Any
    client: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []
        # The edge drops the headers when it answers.
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}

        async def recording() -> Any:
            event = await receive()
            parts.append(event.get("body", b""))
            return event

        await self.application(scope, recording, send)
        if scope["path"].startswith(STORED):
            return
        self.requests.append(
            {
                "client": self.client,
                "method": scope["method"],
                "path": scope["raw_path"].decode(),
                "headers": {name: headers[name] for name in KEPT_HEADERS if name in headers},
                "body": base64.b64encode(b"".join(parts)).decode(),
            }
        )


@dataclass
class Limited:
    """Wraps the application for a rate-limited tenant. `refusals` counts the responses with 429."""

    application: Any
    tenant: str = ""
    refusals: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {
                **scope,
                "headers": [*scope["headers"], (b"x-shoal-tenant", self.tenant.encode())],
            }

        async def counting(event: Any) -> None:
            if event.get("status") == 429:
                assert any(name == b"retry-after" for name, _ in event["headers"])
                self.refusals += 1
            await send(event)

        await self.application(scope, receive, counting)


async def calls(
    client: Client, program: Path, variables: Mapping[str, str], limited: Limited
) -> list[dict[str, Any]]:
    """Return the results of the client's script, one row per call."""
    process = await asyncio.create_subprocess_exec(
        str(program),
        str(script_of(client)),
        env=dict(os.environ) | dict(variables),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    async for line in process.stdout:
        found.append(judged(json.loads(line), limited.refusals))
        limited.refusals = 0
    if await process.wait() or not found:
        found.append(
            {
                "call": "the script",
                "difference": None,
                "error": f"ended with status {process.returncode}",
            }
        )
    return found


def judged(row: dict[str, Any], refusals: int) -> dict[str, Any]:
    """Return a row with an error if its numbers differ too much, or if a call that must be rate
    limited was not.
    """
    difference = row["difference"]
    if row["error"]:
        return row
    # Not `>`: NaN is an error.
    if difference is not None and not 0 <= difference <= MAX_DIFFERENCE:
        return row | {"error": f"differs by {difference}, more than {MAX_DIFFERENCE}"}
    if row["call"].endswith(WAITED) and not refusals:
        return row | {"error": "no call was rate limited"}
    return row


async def run(wanted: Sequence[str]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows = []
    clients = [client for client in CLIENTS if not wanted or client.name in wanted]
    programs = {client.name: await asyncio.to_thread(install, client) for client in clients}
    folders = [str(await asyncio.to_thread(write_checkpoints, ENVIRONMENTS / "checkpoints"))]
    models = known_models(folders, os.environ)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tenants.yaml").write_text(
            json.dumps({"tenants": {_tenant(client): SLOW for client in CLIENTS}})
        )
        (folder / "aliases.yaml").write_text(json.dumps({"aliases": ALIASES}))
        environment = (("SHOAL_TENANTS", str(folder / "tenants.yaml")),)
        mesh = await stack.enter_async_context(
            running(Settings(port=0, models=models, dtype="float32", environment=environment))
        )
        routers = await stack.enter_async_context(Routers((mesh.address,), None))
        expected = folder / "expected.json"
        expected.write_text(json.dumps(await asyncio.to_thread(wanted_numbers, mesh.address)))
        aliases = watch_aliases(folder / "aliases.yaml")
        settings = EdgeSettings(
            edge_id="interop",
            address="127.0.0.1:0",
            routers=(mesh.address,),
            compression="on",
            aliases=aliases,
            batches=BatchSettings(url=str(folder / "files")),
        )
        edge = Edge(settings, routers)
        recorder = Recorder(edge.application)
        limited = Limited(edge.application)
        tokens = await asyncio.to_thread(tokenizer_of_openai)
        vocabulary = read_vocabulary(tokens.read_bytes())
        reader = Edge(replace(settings, vocabulary=vocabulary), routers)
        await edge.poll()
        await reader.poll()
        await stack.enter_async_context(edge.running_batches())

        async def serve(application: Any) -> str:
            server = serving_http(
                settings.address, application, ServerLimits(), None, grace_seconds=1.0
            )
            return f"http://{(await stack.enter_async_context(server)).address}"

        tei = edge.tei_server(settings, MINILM)
        await stack.enter_async_context(
            serving_tei({"127.0.0.1:0": tei}, settings.security, grace_seconds=1.0)
        )
        variables = {
            "INTEROP_BASE": await serve(recorder),
            "INTEROP_DOOR": await serve(PrefixApp(recorder, MINILM)),
            "INTEROP_LIMITED": await serve(limited),
            "INTEROP_LIMITED_DOOR": await serve(PrefixApp(limited, MINILM)),
            "INTEROP_TOKENS": await serve(reader.application),
            "INTEROP_TEI_GRPC": tei.address,
            "INTEROP_EXPECTED": str(expected),
            "PYTHONPATH": str(SCRIPTS),
            "TIKTOKEN_CACHE_DIR": str(tokens.parent),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "ANONYMIZED_TELEMETRY": "False",
            "HAYSTACK_TELEMETRY_ENABLED": "False",
        }
        for client in clients:
            recorder.client, limited.tenant = client.name, _tenant(client)
            found = await calls(client, programs[client.name], variables, limited)
            rows.append((versions(client, programs[client.name]), found))
            print(table(rows[-1:]), flush=True)
    record(recorder.requests)
    return rows


def _tenant(client: Client) -> str:
    return f"limited-{client.name}"


def record(requests: list[dict[str, Any]]) -> None:
    """Write the requests, without duplicates, in place of the same clients' earlier ones, in the
    order of CLIENTS.
    """
    seen = {request["client"] for request in requests}
    others = [
        request for request in json.loads(RECORDED.read_text()) if request["client"] not in seen
    ]
    unique = {json.dumps(request, sort_keys=True): request for request in [*others, *requests]}
    order = [client.name for client in CLIENTS]
    kept = sorted(unique.values(), key=lambda request: order.index(request["client"]))
    RECORDED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def write_checkpoints(root: Path) -> Path:
    """Write small random models with the heads that MiniLM lacks below `root`."""
    if not (root / ".done").exists():
        write_checkpoint("bert", root / CLASSIFIER, head="sequence_classification", labels=CLASSES)
        write_checkpoint("bert", root / TAGGER, head="token_classification", labels=LABELS)
        (root / ".done").touch()
    if not (root / PROMPTED).exists():
        sentence = SentenceFiles(prompts={"query": "find: "})
        write_checkpoint("bert", root / PROMPTED, sentence=sentence)
    if not (root / WRITER).exists():
        write_writer("qwen3", root / WRITER)
    if not (root / CALLER).exists():
        write_caller(root / CALLER)
    return root


def wanted_numbers(address: str) -> dict[str, Any]:
    """Return the results of `shoal.Client`. The batches have the size of the clients' requests,
    since float32 sums depend on the batch: a classifier's probabilities vary by up to 1.2e-7.
    """
    with shoal.Client(address) as client:
        dense = client.encode(MINILM, TEXTS).dense
        alone = client.encode(MINILM, TEXTS[:1]).dense
        int8 = client.encode(MINILM, TEXTS, data_type="int8").dense
        documents = client.encode(PROMPTED, TEXTS).dense
        queries = client.encode(PROMPTED, TEXTS, role="query").dense
        short = client.encode(PROMPTED, TEXTS, role="query", dimensions=SHORT).dense
        scores = client.score(MINILM, "fish", TEXTS, scale="probability").scores
        classes = client.classify(CLASSIFIER, TEXTS)
        one_class = [client.classify(CLASSIFIER, [text])[0] for text in TEXTS]
        zero_shot = [
            client.classify(CLASSIFIER, [text], ["fish", "wood"], hypothesis="About {}.")[0]
            for text in TEXTS
        ]
        written = client.extract(
            WRITER, [USER], shoal.ReadText(instruction=SYSTEM, max_tokens=TOKENS)
        )
        conversed = client.extract(
            WRITER, [USER], shoal.ReadText(instruction=SYSTEM, max_tokens=TOKENS, turns=TURNS)
        )
        tagged = [client.entities(TAGGER, [text])[0] for text in TEXTS]
    assert dense is not None
    assert alone is not None
    assert int8 is not None
    assert documents is not None
    assert queries is not None
    assert short is not None
    # Otherwise a client could lose its role or its entities without a difference.
    assert abs(documents - queries).max(axis=1).min() > 1000 * MAX_DIFFERENCE
    assert all(result.entities for result in tagged)
    return {
        "model": MINILM,
        "texts": TEXTS,
        "query": "fish",
        "vectors": dense.tolist(),
        "alone": alone.tolist(),
        "int8": int8.tolist(),
        "prompted": PROMPTED,
        "queries": queries.tolist(),
        "short_queries": short.tolist(),
        "scores": scores.tolist(),
        "classifier": CLASSIFIER,
        "tagger": TAGGER,
        "writer": WRITER,
        "caller": CALLER,
        "asked": {"system": SYSTEM, "user": USER, "tokens": TOKENS},
        "turns": [{"role": turn[0], "content": turn[1]} for turn in TURNS],
        "conversed": conversed[0].text,
        "written": written[0].text,
        "written_tokens": written.usage.output_tokens,
        "entities": [
            [[one.label, one.score, one.start, one.end] for one in result.entities]
            for result in tagged
        ],
        "classes": [_scores(result) for result in classes],
        "one_class": [_scores(result) for result in one_class],
        "zero_shot": [_scores(result) for result in zero_shot],
    }


def _scores(result: Any) -> dict[str, float]:
    return {one.label: one.score for one in result.labels}


def merged(page: str, text: str) -> str:
    """Return the page with the rows of `text`. Rows of clients that did not run stay, with the date
    on which they were seen.
    """
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
    """Return a row's client without its versions."""
    return re.sub(r" [0-9][^ ,|]*", "", line.split("|")[1]).strip()


def table(rows: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    """Return a table with a row for each call, seen today."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    lines = [
        "| client | call | largest difference to `shoal.Client` | seen |",
        "| --- | --- | --- | --- |",
    ]
    for name, found in rows:
        for row in found:
            error = " ".join(row["error"].replace("|", "/").split())
            said = error or (
                "as expected" if row["difference"] is None else f"{row['difference']:.1e}"
            )
            shown = said if row["difference"] != 0 else "0"
            lines.append(f"| {name} | {row['call']} | {shown} | {today} |")
    return "\n".join(lines)


def main() -> int:
    rows = asyncio.run(run(sys.argv[1:]))
    text = table(rows)
    PAGE.write_text(merged(PAGE.read_text(), text))
    return int(any(row["error"] for _, found in rows for row in found))


if __name__ == "__main__":
    sys.exit(main())

"""`shoal job submit` and the commands for submitted jobs, with an edge and real processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from shoal.cli import main
from typer.testing import CliRunner

from tests.edge.jobs.parts import Files, encode
from tests.edge.parts import MODEL, Http, Script, edge

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `shoal job` and return its status, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def invoke(*arguments: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(main.build(), ["job", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    async def run_in_thread(http: Http | None, *arguments: object) -> tuple[int, str, str]:
        if http is not None:
            monkeypatch.setenv("SHOAL_EDGE", f"http://{http.address}")
        return await asyncio.to_thread(invoke, *arguments)

    return run_in_thread


async def test_commands_follow_a_submitted_job(files: Files, run: Run) -> None:
    source = files.write(30)
    out, export = files.root / "out", files.root / "all.parquet"
    async with edge(Script(encode=encode), **files.settings) as http:
        assert "no submitted jobs" in (await run(http, "list", "--submitted"))[1]
        job = ["-i", source, "-o", out, "--keep", "id", "--chunk-rows", 10]
        code, shown, noted = await run(http, "submit", "encode", MODEL, *job, "--in-flight", 3)
        identity = shown.strip()
        assert (code, f"shoal job watch {identity}" in noted) == (0, True)
        code, shown, _ = await run(http, "watch", identity)
        assert (code, "completed" in shown, "30 of 30" in shown) == (0, True, True)
        code, shown, _ = await run(http, "show", identity, "--json")
        found = json.loads(shown)
        assert (code, found["status"], found["output"]) == (0, "completed", str(out))
        assert found["limits"]["in_flight"] == 3
        assert identity in (await run(http, "list", "--submitted"))[1]
        code, shown, _ = await run(http, "results", identity, "--verify", "--json")
        assert (code, json.loads(shown)["verified_parts"]) == (0, 3)
        assert (await run(http, "results", identity, "--export", export))[0] == 0
        code, _, noted = await run(http, "cancel", identity)
        assert (code, "the edge refuses this: the job is completed already" in noted) == (1, True)
        code, _, noted = await run(http, "submit", "encode", MODEL, "-i", "/etc/x.jsonl", "-o", out)
        assert (code, "it must be below one of" in noted) == (1, True)
    assert export.exists()


async def test_submit_names_the_edge_that_does_not_answer(files: Files, run: Run) -> None:
    job = ("-i", files.root / "in.parquet", "-o", files.root / "out")
    edge_option = ("--edge", "http://127.0.0.1:9")
    code, _, noted = await run(None, "submit", "encode", MODEL, *job, *edge_option)
    assert (code, "no edge answers at http://127.0.0.1:9" in noted) == (1, True)
    code, _, noted = await run(None, "submit", "encode", MODEL, *job, "--edge", "file:///etc")
    assert (code, "it must be a URL of http or https" in noted) == (2, True)


async def test_token_is_not_sent_unencrypted_to_another_machine(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    for host in ("edge.invalid:8080", "localhost@edge.invalid", "unix:80"):
        code, _, noted = await run(None, "list", "--submitted", "--edge", f"http://{host}")
        assert (code, "would be sent unencrypted" in noted) == (1, True), noted
    for url in ("http://127.0.0.1:9", "http://[::1]:9", "https://localhost:9"):
        code, _, noted = await run(None, "list", "--submitted", "--edge", url)
        assert (code, f"no edge answers at {url}" in noted) == (1, True), noted
    monkeypatch.setenv("SHOAL_TOKEN_WITHOUT_TLS", "maybe")
    code, _, noted = await run(None, "list", "--submitted", "--edge", "http://edge.invalid")
    assert (code, "SHOAL_TOKEN_WITHOUT_TLS must be 1 or 0" in noted) == (1, True)
    monkeypatch.setenv("SHOAL_TOKEN_WITHOUT_TLS", "1")
    url = "http://[::ffff:127.0.0.1]:9"  # It is unusual enough to count as another machine.
    code, _, noted = await run(None, "list", "--submitted", "--edge", url)
    assert (code, "no edge answers" in noted) == (1, True)


async def test_token_does_not_follow_redirects(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    paths = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(302)
            self.send_header("location", f"http://localhost:{port}/other")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        port = server.server_port
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{port}"
        code, _, noted = await run(None, "list", "--submitted", "--edge", url)
        server.shutdown()
        thread.join()
    assert (code, f"{url} redirects to http://localhost:{port}, and" in noted) == (1, True), noted
    assert len(paths) == 1

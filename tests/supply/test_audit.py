"""The audit as `make check` runs it, with pip-audit itself, against a vulnerability service of
ours: it can fail.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.distributions import ROOT, SupplyError
from tools.supply.audit import read_accepted

HARMFUL = {
    "id": "PYSEC-2099-1",
    "aliases": ["CVE-2099-0001"],
    "summary": "reads your mail",
    "affected": [
        {
            "package": {"name": "pyyaml", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
        }
    ],
}


class FakeOsv(BaseHTTPRequestHandler):
    """Answer pip-audit as osv.dev does: only PyYAML has a vulnerability."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(
            {"vulns": [HARMFUL]} if asked["package"]["name"] == "pyyaml" else {}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def osv() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeOsv) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


def audited(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PIP_AUDIT_VULNERABILITY_SERVICE": "osv",
        "PIP_AUDIT_OSV_URL": url,
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "tools.supply.audit", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def accepted_file(folder: Path, until: str) -> Path:
    file = folder / "accepted.toml"
    file.write_text(
        f'[[accepted]]\nid = "CVE-2099-0001"\npackage = "PyYAML"\nuntil = {until}\nreason = '
        '"nobody writes mail"\n'
    )
    return file


def test_vulnerability_fails_and_is_reported(osv: str) -> None:
    done = audited(osv)
    assert done.returncode == 1
    assert "pyyaml" in done.stderr
    assert "PYSEC-2099-1 CVE-2099-0001, fixed in 99.0: reads your mail" in done.stderr


def test_accepted_one_passes(osv: str, tmp_path: Path) -> None:
    done = audited(osv, "--accepted", str(accepted_file(tmp_path, "9999-12-31")))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("pins have no known vulnerability, 1 accepted\n")


def test_its_time_is_over(osv: str, tmp_path: Path) -> None:
    done = audited(osv, "--accepted", str(accepted_file(tmp_path, "2020-01-01")))
    assert done.returncode == 1
    assert (
        "accepted CVE-2099-0001 of PyYAML until 2020-01-01: it is not found, or has expired"
        in done.stdout
    )


def test_without_a_service_one_line_says_so() -> None:
    with socket.socket() as held:  # bound and not listening: no other process can answer there
        held.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{held.getsockname()[1]}/v1/query"
        done = audited(nowhere)
        assert done.returncode == 0
        assert done.stdout.startswith("not audited: ")
        assert done.stdout.count("\n") == 1
        assert audited(nowhere, "--strict").returncode == 1


@pytest.mark.parametrize(
    "entry",
    [
        'id = "X"',
        'id = "X"\npackage = "p"\nuntil = "soon"\nreason = "r"',
        'id = "X"\npackage = "p"\nuntil = 2030-01-01\nreason = ""',
    ],
)
def test_entry_without_a_date_or_a_reason_is_refused(tmp_path: Path, entry: str) -> None:
    (tmp_path / "accepted.toml").write_text(f"[[accepted]]\n{entry}\n")
    with pytest.raises(SupplyError, match=r"until|reason"):
        read_accepted(tmp_path / "accepted.toml")


def test_our_exceptions_can_be_read() -> None:
    read_accepted()

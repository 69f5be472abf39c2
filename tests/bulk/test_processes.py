"""Jobs in their own processes, which are killed, run out of disk, and are measured."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from shoal.bulk import export
from shoal.bulk.places import Folder

from tests.api.fake_router import make_vector
from tests.bulk.jobs import MODEL, parts, read_manifest, table, write_lines, write_parquet
from tests.support.waiting import wait_until

ROWS = 2000


class Router:
    """A fake router in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._next_line()

    def hold(self, row: int | None) -> None:
        """Hold calls for this row and the following ones from now on; None: for no row."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n" if row is None else f"{row}\n")
        self._process.stdin.flush()
        self._next_line()

    def _next_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bulk.router"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Router(process)
        process.communicate()


@pytest.fixture
def address(router: Router) -> str:
    return router.address


def command(*arguments: object, kib: int = 0) -> list[str]:
    """Return the command line of `shoal job`, with a limit of the size of files."""
    shoal = [sys.executable, "-m", "shoal", "job", *map(str, arguments)]
    return ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash", *shoal] if kib else shoal


def encode(address: str, source: Path, output: Path) -> list[object]:
    files = ["-i", source, "-o", output, "--keep", "id", "--chunk-rows", 20]
    return ["run", "encode", MODEL, *files, "--address", address]


def test_killed_jobs_lose_and_repeat_no_row(router: Router, tmp_path: Path) -> None:
    address = router.address
    source = write_parquet(tmp_path / "in.parquet", ROWS, group=700)
    out, seed = tmp_path / "out", time.time_ns()
    chance = random.Random(seed)
    print(f"seed {seed}")  # of the moments of the kills
    committed: dict[str, int] = {}
    for kill in range(2):
        # No job ends before it is killed, however long this process waits for a core.
        router.hold(20 * 35 * (kill + 1))
        with subprocess.Popen(command(*encode(address, source, out))) as process:
            least = len(committed) + chance.randint(1, 25)
            wait_until(lambda least=least: len(parts(out)) >= least, 120)  # type: ignore[misc]
            time.sleep(chance.random() * 0.02)
            process.kill()
        found = {part.name: part.stat().st_ino for part in parts(out)}
        assert committed.items() <= found.items(), f"kill {kill}: a part was written again"
        committed = found
    assert len(committed) < ROWS // 20, "the job ended before it was killed"
    assert read_manifest(out).is_interrupted(Folder(out))
    router.hold(None)
    subprocess.run(command("resume", out, "--address", address), check=True)
    assert committed.items() <= {part.name: part.stat().st_ino for part in parts(out)}.items()
    rows = table(out)
    assert rows["row"].to_pylist() == list(range(ROWS))
    texts = parquet.read_table(source)["text"].to_pylist()
    assert rows["dense"].to_pylist() == [make_vector(text).tolist() for text in texts]
    assert [path.name for path in out.iterdir() if path.name.startswith(".tmp")] == []
    assert len(list(export.contents(Folder(out), read_manifest(out)))) == ROWS // 20


def test_full_disk_names_the_file_and_the_reason(address: str, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        [{"id": random.Random(n).randbytes(400).hex(), "text": f"t{n}"} for n in range(40)],
    )
    out = tmp_path / "out"
    ran = subprocess.run(
        command(*encode(address, source, out), kib=6), capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert f"{out}/part-0000000" in ran.stderr
    assert "File too large" in ran.stderr
    assert parts(out) == []
    assert [path.name for path in out.iterdir() if path.name.startswith(".tmp")] == []
    assert "cannot be read or written" in read_manifest(out).error
    subprocess.run(command("resume", out, "--address", address), check=True)
    assert table(out)["row"].to_pylist() == list(range(40))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, suffix: str) -> None:
    def peak(rows: int) -> int:
        """Return the peak of a job on an input with one row group."""
        chance = random.Random(rows)
        source = tmp_path / f"{rows}{suffix}"
        texts = [chance.randbytes(500).hex() for _ in range(rows)]
        if suffix == ".jsonl":
            write_lines(source, [{"text": text} for text in texts])
        else:
            parquet.write_table(
                pyarrow.table({"text": texts}), source, row_group_size=rows, use_dictionary=False
            )
        ran = subprocess.run(
            [sys.executable, "-m", "tests.bulk.memory", source, tmp_path / f"out-{rows}"],
            check=True,
            capture_output=True,
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},  # As `shoal job` chooses.
        )
        return int(ran.stdout)

    assert peak(60_000) - peak(6_000) < 16 << 20  # The larger input has 60 MB.

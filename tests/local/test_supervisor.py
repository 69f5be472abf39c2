"""Children that end are started again: real processes, by the rules of `policy.py` without its
pauses.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from libs import processes
from libs.errors import InvalidInput, NoCapacity
from services.local.supervision import policy as supervision
from services.local.supervision.child import Child
from services.local.supervision.supervisor import Supervisor
from services.local.workplace import Workplace, workplace
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(supervision, "WINDOW_SECONDS", 3600.0)  # however slow the machine is


def child(folder: Path, name: str, code: str) -> Child:
    return Child(name, [sys.executable, "-c", code], dict(os.environ), folder / f"{name}.log")


SERVE = "import time; time.sleep(600)"


async def test_who_ends_too_often_is_given_up_with_its_last_words_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    redis, router = (child(tmp_path, name, SERVE) for name in ("redis", "router"))
    good = child(
        tmp_path,
        "good",
        f"""print('{{"level": "INFO", "message": "settings"}}', flush=True); {SERVE}""",
    )
    bad = child(tmp_path, "bad", "print('no such device'); raise SystemExit(3)")
    state = tmp_path / "processes.json"
    async with redis, router, good, bad:
        roles: list[tuple[supervision.Role, Child]] = [
            ("redis", redis),
            ("router", router),
            ("worker", good),
            ("worker", bad),
        ]
        async with Supervisor(roles, state, said.append) as supervisor:
            await until(
                lambda: processes.read(state)[-1].state == "given up", "the bad one to be given up"
            )
            reported = {process.name: process for process in processes.read(state)}
            assert [reported[name].state for name in ("redis", "router", "good")] == ["running"] * 3
            assert reported["bad"].restarts == 3
            assert reported["bad"].detail == "ended with status 3: no such device"
            await until(lambda: "no such device" in said[-1], "its last lines to be reported")
            assert sum("is restarted" in words for words in said) == 3
            bad_log = bad.log.read_text()
            assert bad_log.count("no such device") == 4
            # The last worker goes, too.
            for _ in range(4):
                await _killed_once(good, state)
            assert "good was ended by SIGKILL" in await supervisor.wait_for_failure()
            assert (
                next(one for one in processes.read(state) if one.name == "good").detail
                == "was ended by SIGKILL"
            )


async def until(predicate: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, predicate, 120.0, what)


async def _killed_once(child: Child, state: Path) -> None:
    restarts = next(
        process.restarts for process in processes.read(state) if process.name == child.name
    )
    os.kill(child.pid, signal.SIGKILL)

    def moved_on() -> bool:
        now = next(process for process in processes.read(state) if process.name == child.name)
        return now.restarts > restarts or now.state == "given up"

    await until(moved_on, "the next start")


def test_children_die_with_their_parent_however_that_dies(tmp_path: Path) -> None:
    """The parent is killed: it can do nothing."""
    parent = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from services.local.supervision.child import Child\n"
        "deaf = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, "
        "flush=True); time.sleep(600)'\n"
        "async def main():\n"
        "    child = Child('deaf', [sys.executable, '-c', deaf], dict(os.environ), "
        "Path(sys.argv[1]))\n"
        "    await child.start()\n"
        "    while not child.log_end(): await asyncio.sleep(0.01)\n"
        "    print(child.pid, flush=True)\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not _is_alive(pid), 60, "the child to die")


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_nothing_but_logs_outlives_a_failure_and_nothing_a_good_end(tmp_path: Path) -> None:
    with workplace(None) as place:
        (place.redis / "appendonly.aof").write_text("what clients sent")
    assert not place.root.exists()
    with pytest.raises(NoCapacity), workplace(None) as place:
        _fail(place)
    assert [path.name for path in place.root.iterdir()] == ["logs"]
    assert (place.logs / "worker-0.log").read_text() == "why"
    (place.logs / "worker-0.log").unlink()
    (place.logs / "router.log").unlink()
    place.logs.rmdir()
    place.root.rmdir()
    with workplace(tmp_path / "kept" / "here") as place:
        (place.logs / "worker-0.log").write_text("all was well")
    assert not place.root.exists()
    assert (tmp_path / "kept" / "here" / "worker-0.log").read_text() == "all was well"
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="file"), workplace(tmp_path / "file"):
        pass


def _fail(place: Workplace) -> None:
    (place.redis / "appendonly.aof").write_text("what clients sent")
    (place.logs / "worker-0.log").write_text("why")
    raise NoCapacity("it failed")


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", '[{"name": "a", "state": "odd", "restarts": 1, "detail": ""}]']
)
def test_file_of_processes_that_says_something_else_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    assert processes.read(path) == ()
    path.write_text(text)
    with pytest.raises(InvalidInput, match=r"processes\.json"):
        processes.read(path)

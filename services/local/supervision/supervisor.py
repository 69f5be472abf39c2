"""Supervises the children of a local mesh: restarts those that end, by the policy of `policy.py`,
while the others serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from libs.processes import MAX_LETTERS, Process, to_text
from services.local.supervision.child import Child
from services.local.supervision.policy import ChildHistory, Role, can_serve, ending, next_step

Notify = Callable[[str], None]
"""Called with one sentence on what happened to a child, for the user."""


class Supervisor:
    """Supervises children: within the context, a child that ends is restarted or given up.

    Args:
        children: The children with their roles.
        path: The file that reports their states to the router (`libs/processes.py`).
    """

    def __init__(
        self,
        children: Sequence[tuple[Role, Child]],
        path: Path,
        notify: Notify,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = [child for _, child in children]
        self._roles = {child.name: role for role, child in children}
        self._path = path
        self._notify = notify
        self._clock = clock
        # The state: each child's history and how it last ended, and the tasks that wait for their
        # ends.
        self._histories = {child.name: ChildHistory() for child in self._children}
        self._endings: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Supervisor:
        self._write()
        self._tasks = [asyncio.create_task(self._keep(child)) for child in self._children]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each child's last start, by name."""
        return {child.name: child.pid for child in self._children}

    async def wait_for_failure(self) -> str:
        """Wait until too many children are given up to answer requests; return their names with the
        ends of their logs.
        """
        pending = set(self._tasks)
        while can_serve(self._roles, self._given_up()):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return "\n".join(
            self._final_report(child) for child in self._children if child.name in self._given_up()
        )

    async def _keep(self, child: Child) -> None:
        """Restart a child until it is given up."""
        status: int | None = await child.wait()
        while not (history := await self._ended(child, status)).is_given_up:
            await asyncio.sleep(history.pause_seconds)
            status = await self._run(child, history)

    async def _run(self, child: Child, history: ChildHistory) -> int | None:
        """Restart a child and wait for its end. Returns its exit status, None if it could not be
        started.
        """
        try:
            await child.start()
        except OSError:
            return None
        self._set(child, history.started(self._clock()))
        return await child.wait()

    async def _ended(self, child: Child, status: int | None) -> ChildHistory:
        history = self._histories[child.name].ended(self._clock())
        fault = await asyncio.to_thread(child.last_fault)
        self._endings[child.name] = f"{ending(status)}: {fault}" if fault else ending(status)
        self._set(child, history)
        self._notify(f"{child.name} {ending(status)}: {next_step(history)}; its log is {child.log}")
        if history.is_given_up:
            self._notify(await asyncio.to_thread(child.log_end))
        return history

    def _set(self, child: Child, history: ChildHistory) -> None:
        self._histories[child.name] = history
        self._write()

    def _given_up(self) -> set[str]:
        return {name for name, history in self._histories.items() if history.is_given_up}

    def _final_report(self, child: Child) -> str:
        return f"{child.name} {self._endings[child.name]}\n(log: {child.log})"

    def _write(self) -> None:
        """Write the states for the router. The file is replaced atomically, since the router may
        read it at any time.
        """
        text = to_text(
            Process(
                name, history.state, history.restarts, self._endings.get(name, "")[:MAX_LETTERS]
            )
            for name, history in self._histories.items()
        )
        new = self._path.with_suffix(".new")
        with suppress(OSError):  # a full disk must not prevent a child's restart
            new.write_text(text, "utf-8")
            new.replace(self._path)

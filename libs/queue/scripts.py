"""A Redis script as one typed function: its signature declares the arguments, and
`lua/<name of the function>.lua` is the body that Redis runs.

Parameters become Lua locals: int and float as numbers, bool as a boolean, str and bytes as strings.
A last parameter of type `Rest` becomes the index in ARGV of its first value. A restart empties
Redis' script cache, so every call can load the scripts again. A Redis user that may not load
scripts (the scheduler's, `connection/acl.py`) can run only scripts that a router has loaded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import sha1
from importlib.resources import files
from inspect import signature
from typing import Any, Final, Generic, ParamSpec

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, NoScriptError, RedisError

from libs.errors import NoCapacity
from libs.queue.connection.client import translate, translated
from libs.queue.connection.cluster import list_masters

P = ParamSpec("P")
Rest = Sequence[str | bytes | int | float]
Reply = Any
"""The untyped reply of Redis, which the caller of a script decodes."""

_NUMBER, _TEXT = "tonumber(ARGV[{}])", "ARGV[{}]"
_LUA = {"int": _NUMBER, "float": _NUMBER, "bool": "ARGV[{}] == '1'", "str": _TEXT, "bytes": _TEXT}


CLOCK: Final = "clock"
"""The name of the prologue (shared Lua code) that reads Redis' clock."""
_SCRIPTS: list[str] = []
"""The texts of all scripts, in the order of their definitions."""
_LOADS: Final = 2
"""Maximum loads of the scripts by one call. A second one may be needed because, during a failover
of a cluster, the call after the first load may reach another master.
"""
_LOADING: dict[object, asyncio.Task[None]] = {}
"""The running load task of each server, by its connection pool."""


class Script(Generic[P]):
    """One Lua script. Call it with the client, the names of the keys, and the arguments of the
    function by keyword.
    """

    def __init__(
        self, function: Callable[P, Awaitable[Reply]], keys: Sequence[str], prologues: Sequence[str]
    ) -> None:
        kinds = {
            name: str(parameter.annotation)
            for name, parameter in signature(function).parameters.items()
        }
        lines = [f"local {key} = KEYS[{index}]" for index, key in enumerate(keys, 1)]
        for index, (name, kind) in enumerate(kinds.items(), 1):
            lines.append(
                f"local {name} = " + ("{}" if kind == "Rest" else _LUA[kind]).format(index)
            )
        folder = files(function.__module__.rpartition(".")[0]) / "lua"
        body = (folder / f"{function.__name__}.lua").read_text("utf-8").rstrip("\n")
        own = files(__name__.rpartition(".")[0]) / "lua"
        texts = [
            ((own if name == CLOCK else folder) / f"_{name}.lua").read_text("utf-8").rstrip("\n")
            for name in prologues
        ]
        shared = _needed(body, "\n\n".join(texts)) if texts else []
        self.text = "\n".join([*lines, *shared, body])
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        self._names = [name for name, kind in kinds.items() if kind != "Rest"]
        self._rest = next((name for name, kind in kinds.items() if kind == "Rest"), None)
        self._flags = frozenset(name for name, kind in kinds.items() if kind == "bool")
        _SCRIPTS.append(self.text)

    async def __call__(
        self, redis: Redis, keys: Sequence[str], /, *_: P.args, **values: P.kwargs
    ) -> Reply:
        """Run the script in one round trip; if Redis does not have it, load all scripts first.

        Raises NoCapacity if Redis is unavailable, or does not have the script and the user may not
        load scripts.
        """
        arguments = [
            int(values[name]) if name in self._flags else values[name]  # type: ignore[call-overload]
            for name in self._names
        ]
        rest = values[self._rest] if self._rest else ()
        command = (len(keys), *keys, *arguments, *rest)  # type: ignore[misc]
        try:
            for _load_number in range(_LOADS):
                try:
                    return await redis.evalsha(self.sha, *command)
                except NoScriptError:
                    await _load(redis)
            return await redis.evalsha(self.sha, *command)
        except RedisError as error:
            raise translate(error) from error


async def load_scripts(redis: Redis) -> None:
    """Load all scripts into Redis' cache, for this process and for those that may not load any.
    Raises NoCapacity if Redis (on a cluster: every master) is unavailable.
    """
    loads = await asyncio.gather(
        *(_load(one) for one in list_masters(redis)), return_exceptions=True
    )
    errors = [error for error in loads if error is not None]
    if len(errors) == len(loads):
        with translated():
            raise errors[0]


async def _load(redis: Redis) -> None:
    """Load the scripts; concurrent calls share one load of a server."""
    server = redis.connection_pool
    task = _LOADING.get(server)
    if task is None:
        task = _LOADING[server] = asyncio.create_task(_load_all(redis))
        task.add_done_callback(partial(_loaded, server))
    await asyncio.shield(task)


def _loaded(server: object, task: asyncio.Task[None]) -> None:
    del _LOADING[server]
    if not task.cancelled():
        task.exception()  # mark it as retrieved: perhaps no call waits for it any more


async def _load_all(redis: Redis) -> None:
    try:
        # One by one over the shared connection: a pipeline would need another pool connection.
        for text in _SCRIPTS:
            await redis.script_load(text)
    except NoPermissionError:
        raise NoCapacity(
            "Redis lacks scripts of this version, and our user may not load them: start a router,"
            " which loads them"
        ) from None


def _needed(body: str, prologue: str) -> list[str]:
    """Return the prologue's paragraphs that the body needs, in order. The others are left out
    because Lua creates each function again in every call, which takes half a microsecond.

    A paragraph defines one local function, which later paragraphs may call; the first may define
    anything and is always included.
    """
    first, *functions = prologue.split("\n\n")
    chosen: list[str] = []
    for paragraph in reversed(functions):
        defined = re.match(r"\s*local function (\w+)", paragraph)
        if defined is None:
            raise ValueError(f"not one local function: {paragraph}")
        if re.search(rf"\b{defined[1]}\(", "\n".join([*chosen, body])):
            chosen.insert(0, paragraph)
    return [first, *chosen]


def script(
    *keys: str, prologues: Sequence[str] = ()
) -> Callable[[Callable[P, Awaitable[Reply]]], Script[P]]:
    """Return a decorator that turns a function into a `Script`.

    Args:
        keys: The Lua names of the script's keys, in the order of KEYS.
        prologues: Lua code that several scripts share, `lua/_<prologue>.lua` next to the module;
            that of CLOCK is in the folder of the queue.
    """
    return lambda function: Script(function, keys, prologues)

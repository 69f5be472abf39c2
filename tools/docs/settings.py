"""The page of settings: every SHOAL_* variable that a service, the client or the command line
reads.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Final, get_type_hints

from shoal.cli.bulk.submitted import EdgeAccess
from shoal.cli.options import ConnectionOptions
from shoal.transport import trust

from libs.queue.connection.trust import RedisTrust
from libs.serving.security.settings import Security
from libs.setting import Setting, declared, documented, shown
from services.edge.batches.settings import BatchSettings
from services.edge.jobs.settings import JobSettings
from services.edge.settings import Settings as Edge
from services.router.settings import RoutingFiles
from services.router.settings import Settings as Router
from services.scheduler.settings import Settings as Scheduler
from services.worker.settings import Settings as Worker
from tools.docs.markdown import code, table

ROOT: Final = Path(__file__).parents[2]
SERVICES: Final[dict[str, type]] = {
    "Router": Router,
    "Worker": Worker,
    "Scheduler": Scheduler,
    "Edge": Edge,
    "Security of a server: router, scheduler, worker (health), edge": Security,
    "Redis, for routers and schedulers": RedisTrust,
}
PARTS: Final[dict[type, dict[str, type]]] = {
    Router: {"routes": RoutingFiles},
    Edge: {"batches": BatchSettings, "jobs": JobSettings},
}
"""Groups that are documented with their service, and the classes that declare them."""
CLIENT: Final = "Python client, command line and workers, as callers of a router"
PROCESSES: Final = {
    "SHOAL_NATIVE_KERNELS": "0: use torch's operators instead of the compiled kernels.",
}
"""Variables of `libs.kernels`, which imports no other library, and so declares nothing."""
VARIABLE: Final = re.compile(r"\bSHOAL_[A-Z0-9_]*[A-Z0-9]\b")
"""A whole name: what ends in `_` is the beginning of several."""
COMPOSED: Final = re.compile(r"SHOAL_(?:[A-Z0-9_]*_)?\{[^{}]*\}|\"SHOAL_(?:[A-Z0-9_]*_)?\" *[+%]")
"""A name that is put together when it is read."""
HEAD: Final = """# Settings

Generated from the declarations in the services' `settings.py` by `python -m tools.docs`.
A service reads its variables once, when it starts, and logs them in one line.
It refuses a wrong value with the name of the variable, the value and the allowed values.
Files that variables name (certificates, tokens, pools, tenants, aliases) are read again when they change.
`shoal up` passes the variables of its environment on to the services that it starts.
An empty variable counts as unset, except that a worker refuses an empty SHOAL_ROUTERS or SHOAL_POOL.
"""

Row = tuple[str, ...]


def page() -> str:
    sections = {title: _rows(kind) for title, kind in SERVICES.items()}
    head = ("variable", "type", "default", "allowed", "meaning")
    parts = [HEAD, *(f"\n## {title}\n\n{table(head, rows)}" for title, rows in sections.items())]
    others = {
        "Routers, as seen by an edge": declared(Edge)["routers_tls"].variables,
        CLIENT: documented(_options() | trust.VARIABLES),
        "All processes": documented(PROCESSES),
    }
    for title, settings in others.items():
        rows = [(code(one.variable), one.description) for one in settings]
        parts.append(f"\n## {title}\n\n{table(('variable', 'meaning'), rows)}")
    text = "".join(parts)
    _check_complete(set(VARIABLE.findall(text)))
    return text


def _options() -> dict[str, str]:
    """Return the variables of the command line's connection options, with their help."""
    hints = [
        *get_type_hints(EdgeAccess, include_extras=True).values(),
        *get_type_hints(ConnectionOptions, include_extras=True).values(),
    ]
    options = [option for hint in hints for option in getattr(hint, "__metadata__", ())]
    return {option.envvar: option.help for option in options if option.envvar}


def _check_complete(described: set[str], root: Path = ROOT) -> None:
    """Exit with an error unless `described` are the variables that services and libraries name."""
    texts = {
        file: file.read_text("utf-8")
        for folder in ("services", "libs")
        for file in (root / folder).rglob("*.py")
    }
    for file, text in texts.items():
        if found := COMPOSED.search(text):
            raise SystemExit(
                f"{file.relative_to(root)} composes the name of a variable, {found[0]}: write "
                "the whole name, so that it can be found"
            )
    read = {name for text in texts.values() for name in VARIABLE.findall(text)}
    if missing := sorted(read - described):
        raise SystemExit(
            f"no settings class declares {', '.join(missing)}: use `libs/setting.py`, so that "
            "the variable is checked, logged and documented"
        )
    if unread := sorted(described - read):
        raise SystemExit(f"{', '.join(unread)}: no code reads it")


def _rows(kind: type) -> list[Row]:
    """Return the table's rows of a settings class, without those of groups that have a separate
    section.
    """
    rows, defaults = [], {one.name: one.default for one in fields(kind)}
    for name, one in declared(kind).items():
        if isinstance(one, Setting):
            rows.append(_row(one, defaults[name]))
        elif name in PARTS.get(kind, {}):
            rows += _rows(PARTS[kind][name])
    return rows


def _row(setting: Setting, default: object) -> Row:
    known = "" if default is MISSING else code(shown(default))
    kind = setting.type.removeprefix("a ")
    return (
        code(setting.variable),
        f"{kind}, secret" if setting.is_secret else kind,
        setting.default_text or known,
        setting.allowed.text,
        setting.description,
    )

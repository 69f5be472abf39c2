"""The page of settings: every SHOAL_* variable that a service, the client or the command line
reads.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import services.edge.settings
import services.router.settings
import services.scheduler.settings
import services.worker.settings
from libs.serving.security import settings as security
from tools.docs.markdown import code, table

ROOT: Final = Path(__file__).parents[2]
SERVICES: Final[dict[str, ModuleType]] = {
    "Router": services.router.settings,
    "Worker": services.worker.settings,
    "Scheduler": services.scheduler.settings,
    "Edge": services.edge.settings,
}
VARIABLE: Final = re.compile(r"\bSHOAL_[A-Z0-9_]*[A-Z0-9]\b")
"""A whole name: what ends in `_` is the beginning of several."""
COMPOSED: Final = re.compile(r"SHOAL_(?:[A-Z0-9_]*_)?\{[^{}]*\}|\"SHOAL_(?:[A-Z0-9_]*_)?\" *[+%]")
"""A name that is put together when it is read."""
ELSEWHERE: Final = {"security", "redis_trust", "trust", "routers_tls"}
"""Fields with variables that have a separate section."""
MACHINE: Final = {
    "SHOAL_ROUTER_ID": "the host's name and 8 hexadecimal digits",
    "SHOAL_WORKER_ID": "the host's name and 8 hexadecimal digits",
    "SHOAL_SCHEDULER_ID": "the host's name and 8 hexadecimal digits",
    "SHOAL_EDGE_ID": "the host's name and 8 hexadecimal digits",
    "SHOAL_THREADS": "the cores that the process may use",
    "SHOAL_STORE_DIR": "`$XDG_CACHE_HOME/shoal`, else `~/.cache/shoal`",
    "SHOAL_CL100K": "the file of an installed package, if there is one",
    "SHOAL_CONSOLE": "1 on loopback without client certificates, else 0",
    "SHOAL_DEFAULT_POOL": "`SHOAL_POOL`, else `cpu`",
}
"""Defaults that depend on the machine or on other variables."""
UNDOCUMENTED: Final = {
    "SHOAL_ADAPTERS": "LoRA adapters that may be loaded with each model at the same time.",
    "SHOAL_ALIASES": "The file of aliases, YAML: names that clients send, each with its model.",
    "SHOAL_BATCH_ITEMS": "Maximum sequences of one forward pass.",
    "SHOAL_CATALOG": "Folders of cards, separated by colons; the same as those of the workers.",
    "SHOAL_DEFAULT_POOL": (
        "The pool in which work for a model that is resident nowhere is queued, without "
        "SHOAL_POOLS."
    ),
    "SHOAL_DEVICE": "The device of the worker. auto: an accelerator if there is one.",
    "SHOAL_DTYPE": (
        "The number format of models. auto: bfloat16 where the hardware multiplies it, else "
        "float32."
    ),
    "SHOAL_EDGE_ID": "The edge's name in logs and metrics.",
    "SHOAL_HEARTBEAT_SECONDS": "Seconds between two heartbeats of a worker.",
    "SHOAL_HTTP_ADDRESS": "The listening address of HTTP.",
    "SHOAL_HTTP_CONNECTIONS": "Maximum open connections.",
    "SHOAL_LEASE_MS": "Milliseconds after which the jobs of a silent worker are queued again.",
    "SHOAL_LOG_LEVEL": "The lowest level of log lines that are written.",
    "SHOAL_LONGEST_DEADLINE_SECONDS": "Maximum deadline that a request may name.",
    "SHOAL_MODELS": (
        "Model directories: `org/name=/path` entries and roots `<root>/<org>/<name>`, separated "
        "by colons."
    ),
    "SHOAL_POOL": "The pool to which the worker belongs; for a router, where SHOAL_DEFAULT_POOL is not set.",
    "SHOAL_POOLS": "The file of pools, YAML. Without it, every pool that a worker names exists.",
    "SHOAL_PULL_WAIT_SECONDS": "Maximum seconds that a pull waits at a router.",
    "SHOAL_REDIS_URL": "The URL of Redis: redis://, rediss://, redis+sentinel://, rediss+sentinel:// or unix://.",
    "SHOAL_ROUTERS": "Addresses of routers, separated by commas, or dns:///name:port.",
    "SHOAL_THREADS": "Threads of a forward pass on a CPU.",
    "SHOAL_WORKER_ID": "The worker's unique name in the mesh.",
    "SHOAL_ADDRESS": "The listening address of the router, host:port or unix:path.",
    "SHOAL_TLS_CERT": "The server's certificate chain, a PEM file.",
    "SHOAL_TLS_KEY": "The key of SHOAL_TLS_CERT, a PEM file.",
    "SHOAL_TOKENS": "The file of accepted tokens with their tenants and roles.",
    "SHOAL_JWKS": "The file of keys that sign accepted JWTs.",
    "SHOAL_JWT_ISSUER": "The `iss` that JWTs must have.",
    "SHOAL_JWT_AUDIENCE": "The `aud` that JWTs must have.",
    "SHOAL_ALLOW_INSECURE": (
        "1: serve and send without TLS or credentials beyond this machine, because something "
        "else protects it."
    ),
}
"""Descriptions of fields without a docstring, and of variables that share a field."""
OTHERS: Final[dict[str, dict[str, str]]] = {
    "Redis, for routers and schedulers": {
        "SHOAL_REDIS_PASSWORD_FILE": "The file that holds the password.",
        "SHOAL_REDIS_SENTINEL_PASSWORD_FILE": "The file that holds the password of Sentinels.",
        "SHOAL_REDIS_CA": "The authorities that sign Redis' certificate, a PEM file. Default: the system's.",
        "SHOAL_REDIS_CERT": "The client certificate, a PEM file.",
        "SHOAL_REDIS_KEY": "The key of SHOAL_REDIS_CERT, a PEM file.",
    },
    "Routers, as seen by an edge": {
        "SHOAL_ROUTERS_TLS": "1: use TLS with the system's authorities.",
        "SHOAL_ROUTERS_CA": "The authorities that sign the routers' certificates, a PEM file.",
        "SHOAL_ROUTERS_CERT": "The edge's client certificate, a PEM file.",
        "SHOAL_ROUTERS_KEY": "The key of SHOAL_ROUTERS_CERT, a PEM file.",
        "SHOAL_ROUTERS_NAME": "The name in the routers' certificate, if it is not that of the address.",
    },
    "Python client, command line and workers, as callers of a router": {
        "SHOAL_ADDRESS": (
            "Addresses of routers, separated by commas (client and command line). Default: "
            "`127.0.0.1:50051`."
        ),
        "SHOAL_TENANT": "The tenant of the calls (command line).",
        "SHOAL_TOKEN": "The bearer token.",
        "SHOAL_TOKEN_FILE": "The file that holds the bearer token, read again when it changes.",
        "SHOAL_TOKEN_WITHOUT_TLS": (
            "1: send the token without TLS to other machines, because something else protects "
            "the network."
        ),
        "SHOAL_TLS": "1: use TLS with the system's authorities.",
        "SHOAL_TLS_CA": "The authorities that sign the router's certificate, a PEM file.",
        "SHOAL_TLS_CERT": "The client certificate, a PEM file.",
        "SHOAL_TLS_KEY": "The key of SHOAL_TLS_CERT, a PEM file.",
        "SHOAL_TLS_NAME": "The name in the router's certificate, if it is not that of the address.",
    },
    "All processes": {
        "SHOAL_NATIVE_KERNELS": "0: use torch's operators instead of the compiled kernels.",
    },
}
"""Variables that no settings class reads by a field."""
HEAD: Final = """# Settings

Generated from the settings of the services by `python -m tools.docs`.
A service reads its variables once, when it starts, and logs them in one line.
It refuses a wrong value with the name of the variable and its allowed values.
Files that variables name (certificates, tokens, pools, tenants, aliases) are read again when they change.
`shoal up` passes the variables of its environment on to the services that it starts.
Sizes are in bytes and times in seconds unless the name says otherwise.
"""

Rows = dict[str, tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """One settings class, as its module's source shows it."""

    descriptions: dict[str, str]
    """Docstrings of fields."""
    variables: dict[str, list[str]]
    """Variables of each field, in the order of `from_env`."""


def page() -> str:
    sections = {title: _rows(module, "Settings") for title, module in SERVICES.items()}
    sections["Security of a server: router, scheduler, worker (health), edge"] = _rows(
        security, "Security"
    )
    parts = [HEAD]
    for title, rows in sections.items():
        lines = [(code(name), *row) for name, row in rows.items()]
        parts.append(
            f"\n## {title}\n\n" + table(("variable", "default", "allowed", "meaning"), lines)
        )
    for title, others in OTHERS.items():
        parts.append(
            f"\n## {title}\n\n"
            + table(("variable", "meaning"), [(code(name), text) for name, text in others.items()])
        )
    text = "".join(parts)
    _check_complete(set(VARIABLE.findall(text)))
    return text


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
        raise SystemExit(f"tools/docs/settings.py describes no variable {', '.join(missing)}")
    if unread := sorted(described - read):
        raise SystemExit(f"tools/docs/settings.py describes {', '.join(unread)}: no code reads it")


def _rows(module: ModuleType, name: str) -> Rows:
    """Return default, allowed values and description of each variable of a settings class."""
    allowed: dict[str, str] = {}

    def record(_holds: bool, variable: str, what: str) -> None:
        allowed[variable] = what

    kind = getattr(module, name)
    with mock.patch.object(module, "check", record), mock.patch.dict("os.environ", clear=True):
        defaults = kind.from_env({})
    source, hints = _source(module, name), get_type_hints(kind)
    rows: Rows = {}
    for field, variables in source.variables.items():
        choices = get_args(hints[field]) if get_origin(hints[field]) is Literal else ()
        for variable in variables:
            shared = "" if len(variables) > 1 else source.descriptions.get(field, "")
            text = shared or UNDOCUMENTED.get(variable, "")
            if not text:
                raise SystemExit(f"{module.__name__}: {field} ({variable}) has no docstring")
            value = MACHINE.get(variable) or code(_shown(getattr(defaults, field)))
            rows[variable] = value, ", ".join(map(str, choices)) or allowed.get(variable, ""), text
    return rows


def _shown(value: object) -> str:
    """Return a default as its variable would hold it; nothing for objects that are made of
    files.
    """
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value)
        if isinstance(value, (int, str))
        else ""
    )


def _source(module: ModuleType, name: str) -> Source:
    tree = ast.parse(inspect.getsource(module))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    from_env = next(
        node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "from_env"
    )
    local = {
        target.id: value
        for node in ast.walk(from_env)
        if isinstance(node, ast.Assign)
        for target, value in _assigned(node)
        if isinstance(target, ast.Name)
    }
    made = next(
        node
        for node in ast.walk(from_env)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name
    )
    named = {
        keyword.arg: list(dict.fromkeys(_variables(keyword.value, local, functions)))
        for keyword in made.keywords
        if keyword.arg and keyword.arg not in ELSEWHERE
    }
    # A field may depend on other fields' variables: each variable belongs to the field that reads
    # the fewest.
    owners: dict[str, str] = {}
    for field in sorted(named, key=lambda field: len(named[field]), reverse=True):
        owners |= dict.fromkeys(named[field], field)
    variables = {
        field: [name for name in names if owners[name] == field] for field, names in named.items()
    }
    return Source(dict(_descriptions(kind)), variables)


def _assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=True)
    else:
        yield target, value


def _variables(
    node: ast.AST, local: dict[str, Any], functions: dict[str, ast.FunctionDef]
) -> Iterator[str]:
    """Yield the variables in an expression, in local names that it uses, and in helpers of the
    module that it calls.
    """
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Constant)
            and isinstance(part.value, str)
            and VARIABLE.fullmatch(part.value)
        ):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in local and part.id not in ELSEWHERE:
            yield from _variables(local[part.id], {}, functions)
        elif (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Name)
            and part.func.id in functions
        ):
            calls = (one for one in ast.walk(functions[part.func.id]) if isinstance(one, ast.Call))
            for call in calls:
                if isinstance(call.func, ast.Attribute) and call.func.attr == "get":
                    yield from _variables(call, {}, {})


def _descriptions(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield each field with the docstring below it."""
    for field, below in zip(kind.body, kind.body[1:], strict=False):
        is_documented = (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        )
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and is_documented
        ):
            yield field.target.id, inspect.cleandoc(below.value.value)  # type: ignore[attr-defined]

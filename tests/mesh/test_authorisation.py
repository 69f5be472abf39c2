"""Authorisation: every method of every service x every role x every kind of credential, against a
router and a scheduler.

Methods are read from the proto files, so the table includes new ones. Expectations are written here
by service, independent of `libs/serving/security/roles.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import product
from pathlib import Path

import grpc
import pytest
import shoal.v1
from redis.asyncio import Redis

from libs.serving import Security
from services.local.settings import free_port
from services.router import app as router_app
from services.router.settings import Settings as RouterSettings
from services.scheduler import app as scheduler_app
from services.scheduler.externalscaler import externalscaler_pb2
from services.scheduler.settings import Settings as SchedulerSettings
from tests.serving.parts import HEALTH, Caller, connected
from tests.support.certificates import AUDIENCE, ISSUER, Certificates, Issuer, write_jwks
from tests.support.redis import RedisServer
from tests.support.waiting import wait_until

CODE = grpc.StatusCode
ROLES = ("client", "admin", "worker", "scaler")
CALL_SECONDS = 120.0
TOKEN_SECONDS = 3600.0
"""Tokens are made before hundreds of calls, each of which may take seconds on a busy machine."""
LET_IN = {CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.FAILED_PRECONDITION}
"""Possible statuses of an empty call that is authorised: the service itself reports missing
contents.
"""

BY_SERVICE: dict[str, set[str]] = {
    "shoal.v1.CallerService": {"client", "admin"},
    "shoal.v1.InferenceService": {"client", "admin"},
    "shoal.v1.MeshService": {"admin"},
    "shoal.v1.WorkerService": {"worker"},
    "externalscaler.ExternalScaler": {"scaler"},
}
BY_METHOD: dict[str, set[str]] = {
    "/shoal.v1.ModelService/ListModels": {"client", "admin"},
    "/shoal.v1.ModelService/GetModel": {"client", "admin"},
    "/shoal.v1.ModelService/LoadModel": {"admin"},
    "/shoal.v1.ModelService/EvictModel": {"admin"},
    "/shoal.v1.ModelService/PinModel": {"admin"},
    "/shoal.v1.AliasService/ListAliases": {"client", "admin"},
    "/shoal.v1.AliasService/SetAlias": {"admin"},
    "/shoal.v1.AliasService/RemoveAlias": {"admin"},
}


@dataclass(frozen=True)
class Method:
    """A method of a proto file."""

    path: str
    service: str
    is_stream: bool

    @property
    def roles(self) -> set[str]:
        """Roles that may call it. Raises KeyError for a method without a decision."""
        return BY_METHOD[self.path] if self.path in BY_METHOD else BY_SERVICE[self.service]


def methods() -> Iterator[Method]:
    names = [
        found.name
        for found in pkgutil.iter_modules(shoal.v1.__path__)
        if found.name.endswith("_pb2")
    ]
    for module in [*(import_module(f"shoal.v1.{name}") for name in names), externalscaler_pb2]:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield Method(
                    f"/{service.full_name}/{method.name}",
                    service.full_name,
                    method.server_streaming,
                )


@dataclass(frozen=True)
class Credential:
    """A credential of a role. `refusal` is the status of every call with it; None: decided by the
    role.
    """

    name: str
    role: str
    refusal: grpc.StatusCode | None = None
    token: str = ""
    certificate: grpc.ChannelCredentials | None = None
    tenant: str = ""

    def expects(self, method: Method) -> set[grpc.StatusCode]:
        if self.refusal is not None and (
            self.refusal != CODE.PERMISSION_DENIED or self.role in method.roles
        ):
            return {self.refusal}
        return LET_IN if self.role in method.roles else {CODE.PERMISSION_DENIED}


@dataclass
class World:
    """Certificates, keys and tokens with their holders."""

    directory: Path
    certificates: Certificates = field(init=False)
    issuer: Issuer = field(default_factory=Issuer.make)

    def __post_init__(self) -> None:
        self.certificates = Certificates(self.directory)
        self.tokens = self.directory / "tokens.yaml"
        entries = [
            f"- {{token: {self.token(role)}, subject: {role}, role: {role}, tenant: acme}}"
            for role in ROLES
        ]
        self.tokens.write_text("\n".join(["tokens:", *entries]))
        self.jwks = write_jwks(
            self.directory / "keys.json", self.issuer, Issuer.make("EdDSA", "k2")
        )

    def token(self, role: str) -> str:
        return f"token-of-a-{role}-0123"

    def jwt(self, role: str) -> str:
        return self.issuer.token(role=role, seconds=TOKEN_SECONDS)

    def security(self, *, asks_callers: bool) -> Security:
        return self.certificates.security(
            asks_callers=asks_callers,
            tokens=self.tokens,
            jwks=self.jwks,
            issuer=ISSUER,
            audience=AUDIENCE,
        )

    def credentials(self) -> Iterator[Credential]:
        """Yield credentials for a server that does not require client certificates."""
        stranger = Issuer.make()
        for role in ROLES:
            unknown, denied = CODE.UNAUTHENTICATED, CODE.PERMISSION_DENIED
            yield Credential("none", role, unknown)
            yield Credential("wrong token", role, unknown, self.token(role)[:-1])
            yield Credential(
                "expired JWT", role, unknown, self.issuer.token(role=role, seconds=-60)
            )
            yield Credential("JWT of an unknown key", role, unknown, stranger.token(role=role))
            yield Credential(
                "another tenant, token", role, denied, self.token(role), tenant="other"
            )
            yield Credential("another tenant, JWT", role, denied, self.jwt(role), tenant="other")
            yield Credential("right token", role, None, self.token(role), tenant="acme")
            yield Credential("right JWT", role, None, self.jwt(role))

    def shown(self) -> Iterator[Credential]:
        """Yield credentials for a server that requires client certificates."""
        others = Certificates(self.directory / "others")
        for role in ROLES:
            right = self.certificates.channel_credentials(self.certificates.issue(f"{role}/acme"))
            unnamed = self.certificates.channel_credentials(self.certificates.issue("router"))
            foreign = self.certificates.channel_credentials(others.issue(f"{role}/acme"))
            elsewhere = self.certificates.channel_credentials(
                self.certificates.issue(f"{role}/x", trust_domain="elsewhere")
            )
            yield Credential("right certificate", role, None, certificate=right)
            yield Credential(
                "right token, certificate of nobody", role, None, self.token(role), unnamed
            )
            yield Credential(
                "right certificate, wrong token",
                role,
                CODE.UNAUTHENTICATED,
                "wrong-token-0123456789",
                right,
            )
            yield Credential(
                "right certificate, another tenant",
                role,
                CODE.PERMISSION_DENIED,
                certificate=right,
                tenant="other",
            )
            yield Credential(
                "certificate of nobody", role, CODE.UNAUTHENTICATED, certificate=unnamed
            )
            yield Credential(
                "certificate of another domain", role, CODE.UNAUTHENTICATED, certificate=elsewhere
            )
            yield Credential(
                "certificate of another authority", role, CODE.UNAVAILABLE, certificate=foreign
            )
            yield Credential("no certificate", role, CODE.UNAVAILABLE, self.token(role))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world")


@asynccontextmanager
async def serving(kind: str, redis_url: str, security: Security) -> AsyncIterator[str]:
    async with AsyncExitStack() as stack:
        if kind == "router":
            router = RouterSettings(
                router_id="r",
                address="127.0.0.1:0",
                redis_url=redis_url,
                security=security,
                grace_seconds=1.0,
            )
            yield await stack.enter_async_context(router_app.running(router))
        else:
            scheduler = SchedulerSettings(
                "s", "127.0.0.1:0", redis_url=redis_url, security=security, grace_seconds=1.0
            )
            yield (await stack.enter_async_context(scheduler_app.running(scheduler))).grpc


@pytest.mark.parametrize("kind", ["router", "scheduler"])
@pytest.mark.parametrize("asks_callers", [False, True])
async def test_every_method_for_every_role_with_every_credential(
    kind: str, asks_callers: bool, world: World, server: RedisServer, redis: Redis
) -> None:
    wanted = [
        method
        for method in methods()
        if (method.service == "externalscaler.ExternalScaler") == (kind == "scheduler")
    ]
    assert len(wanted) >= (14 if kind == "router" else 5)
    credentials = list(world.shown() if asks_callers else world.credentials())
    assert len(credentials) == 8 * len(ROLES)
    async with serving(kind, server.url, world.security(asks_callers=asks_callers)) as address:
        rows = await asyncio.gather(
            *(row(address, world, credential, wanted) for credential in credentials)
        )
    calls = [(credential, method) for credential, method in product(credentials, wanted)]
    codes = [code for found in rows for code in found]
    wrong = [
        f"{credential.name} of {credential.role}: {method.path} ended with {code.name}"
        for (credential, method), code in zip(calls, codes, strict=True)
        if code not in credential.expects(method)
    ]
    assert wrong == []
    # The table is meaningful: each status occurred.
    assert {CODE.UNAUTHENTICATED, CODE.PERMISSION_DENIED} <= set(codes)
    assert LET_IN & set(codes)


async def row(
    address: str, world: World, credential: Credential, wanted: list[Method]
) -> list[grpc.StatusCode]:
    """Return the status of each method with this credential. Health only needs the connection."""
    certificate = credential.certificate or world.certificates.channel_credentials()
    async with connected(
        address, certificate, token=credential.token, tenant=credential.tenant
    ) as caller:
        reached = CODE.UNAVAILABLE if credential.refusal == CODE.UNAVAILABLE else CODE.OK
        assert await caller.code(HEALTH, timeout=CALL_SECONDS) == reached
        return [await call(caller, method) for method in wanted]


async def call(caller: Caller, method: Method) -> grpc.StatusCode:
    return await caller.code(method.path, timeout=CALL_SECONDS, is_stream=method.is_stream)


def test_every_method_has_an_expectation() -> None:
    assert all(method.roles for method in methods())


@pytest.mark.parametrize(
    ("module", "variable", "other"),
    [
        ("services.router", "SHOAL_ADDRESS", {}),
        ("services.scheduler", "SHOAL_SCHEDULER_ADDRESS", {"SHOAL_TOKENS": "tokens"}),
    ],
)
def test_process_refuses_to_listen_unprotected_beyond_this_machine(
    module: str, variable: str, other: dict[str, str], world: World, server: RedisServer
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {variable: "0.0.0.0:0", "SHOAL_REDIS_URL": server.url}
    environ |= {name: str(world.tokens) for name in other}
    ended = subprocess.run(
        [sys.executable, "-m", module], env=environ, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert "refusing to listen on 0.0.0.0:0" in last
    assert all(
        way in last for way in ("SHOAL_TLS_CLIENT_CA", "SHOAL_TOKENS", "SHOAL_ALLOW_INSECURE=1")
    )
    assert not any(world.token(role) in ended.stderr for role in ROLES)


def test_failed_handshakes_log_nothing(world: World, server: RedisServer, tmp_path: Path) -> None:
    made, address = world.certificates.issue("router"), f"127.0.0.1:{free_port()}"
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SHOAL_", "GRPC_"))
    }
    environ |= {
        "SHOAL_ADDRESS": address,
        "SHOAL_REDIS_URL": server.url,
        "SHOAL_TLS_CLIENT_CA": str(world.certificates.ca),
    }
    environ |= {"SHOAL_TLS_CERT": str(made.certificate), "SHOAL_TLS_KEY": str(made.key)}
    with (tmp_path / "log").open("wb") as log:
        router = subprocess.Popen(
            [sys.executable, "-m", "services.router"], env=environ, stderr=log, stdout=log
        )
    try:
        wait_until(
            lambda: "listening" in (tmp_path / "log").read_text(), 120, "the router to listen"
        )
        for _ in range(100):
            with socket.create_connection(
                ("127.0.0.1", int(address.rpartition(":")[2])), 60
            ) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while connection.recv(1000):  # until the server hangs up
                    pass
    finally:
        router.terminate()
        assert router.wait(120) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert 0 < len(lines) < 50

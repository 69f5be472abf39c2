"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import InvalidInput
from services.router.admission.tenants import DEFAULT_TENANTS
from services.router.settings import Settings


def test_defaults() -> None:
    settings = Settings.from_env({})
    assert settings.address == "127.0.0.1:50051"
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert settings.default_deadline_seconds == 60.0
    assert settings.router_id != Settings.from_env({}).router_id


def test_file_of_tenants_is_read_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("tenants: {a: {weight: 2}}\n")
    assert (
        Settings.from_env({"SHOAL_TENANTS": str(tmp_path / "tenants.yaml")})
        .tenants.content.tenant("a")
        .weight
        == 2
    )
    assert Settings.from_env({}).tenants.content == DEFAULT_TENANTS


def test_redis_password_is_not_logged() -> None:
    settings = Settings.from_env({"SHOAL_REDIS_URL": "rediss://user:hunter2@redis.example:6379/1"})
    assert "hunter2" not in str(settings.describe())
    assert "redis.example" in str(settings.describe())


@pytest.mark.parametrize("url", ["redis://redis.example:6379/0", "redis:///0?host=10.0.0.7"])
def test_remote_redis_requires_tls_or_explicit_permission(url: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"SHOAL_REDIS_URL must be rediss:// .* SHOAL_ALLOW_INSECURE=1"
    ):
        Settings.from_env({"SHOAL_REDIS_URL": url})
    assert Settings.from_env({"SHOAL_REDIS_URL": url, "SHOAL_ALLOW_INSECURE": "1"}).redis_url == url


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://:secret@[::1]:1",
        "redis:///2",
        "unix:///r",
        "rediss://redis.example",
    ],
)
def test_local_redis_needs_no_tls(url: str) -> None:
    assert Settings.from_env({"SHOAL_REDIS_URL": url}).redis_url == url


def test_pools_and_the_catalog_that_maps_models_to_them(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text(
        "pools: {a: {device: cpu}, b: {device: cuda}}\ndefault: b\n"
    )
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "cards.yaml").write_text("model: org/name\npools: [a]\n")
    environ = {
        "SHOAL_POOLS": str(tmp_path / "pools.yaml"),
        "SHOAL_CATALOG": str(tmp_path / "cards"),
        "SHOAL_DEFAULT_POOL": "a",
    }
    settings = Settings.from_env(environ)
    routes = settings.routes.content
    card = routes.catalog.overrides("org/name")
    assert card is not None
    assert (card.pools, list(routes.pools.by_name)) == (("a",), ["a", "b"])
    assert settings.describe()["default_pool"] == "b"


def test_card_with_an_unknown_pool_keeps_a_router_from_starting(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text("pools: {a: {device: cpu}}\n")
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "cards.yaml").write_text("model: org/name\npools: [a, c]\n")
    with pytest.raises(
        InvalidInput,
        match=(
            r"cards\.yaml:1: `pools` names 'c', which is not a pool of pools\.yaml; its pools "
            r"are: a"
        ),
    ):
        Settings.from_env(
            {"SHOAL_POOLS": str(tmp_path / "pools.yaml"), "SHOAL_CATALOG": str(tmp_path / "cards")}
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOAL_TENANTS", "/nowhere/tenants.yaml"),
        ("SHOAL_MAX_QUEUED_SECONDS", "0"),
        ("SHOAL_IN_FLIGHT_BYTES", "1000"),
        ("SHOAL_MAX_QUEUED_TOKENS", "many"),
        ("SHOAL_DEADLINE_SECONDS", "0"),
        ("SHOAL_REDIS_URL", "http://redis"),
        ("SHOAL_ROUTER_ID", "a b"),
        ("SHOAL_LOG_LEVEL", "LOUD"),
        ("SHOAL_POOLS", "/nowhere/pools.yaml"),
        ("SHOAL_CATALOG", "/nowhere"),
    ],
)
def test_invalid_setting_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Settings.from_env({name: value})
    assert refusal.value.field == name

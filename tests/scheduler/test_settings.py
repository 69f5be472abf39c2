"""A scheduler's settings in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.catalog.pools import Pools
from libs.errors import InvalidInput
from services.scheduler.settings import Settings


def test_defaults() -> None:
    settings = Settings.from_env({"SHOAL_ADDRESS": "127.0.0.1:50051"})  # the router's
    assert settings == Settings(settings.scheduler_id, pools=settings.pools)
    assert settings.pools.content == Pools()
    assert settings.address == "127.0.0.1:50053"
    assert settings.scheduler_id != Settings.from_env({}).scheduler_id


def test_all_settings_are_read_from_environment(tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text("pools: {a100: {device: cuda}}")
    settings = Settings.from_env(
        {
            "SHOAL_SCHEDULER_ID": "s",
            "SHOAL_SCHEDULER_ADDRESS": "0.0.0.0:1",
            "SHOAL_METRICS_ADDRESS": "0.0.0.0:2",
            "SHOAL_REDIS_URL": "rediss://user:secret@redis:6380/1",
            "SHOAL_POOLS": str(pools),
            "SHOAL_EVICTION": "lru",
            "SHOAL_GRACE_SECONDS": "3",
            "SHOAL_LOG_LEVEL": "DEBUG",
        }
    )
    assert (settings.scheduler_id, settings.address, settings.metrics_address) == (
        "s",
        "0.0.0.0:1",
        "0.0.0.0:2",
    )
    assert (list(settings.pools.content.by_name), settings.eviction, settings.grace_seconds) == (
        ["a100"],
        "lru",
        3.0,
    )
    assert settings.log_level == "DEBUG"
    assert "secret" not in str(settings.describe())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOAL_SCHEDULER_ID", "a b"),
        ("SHOAL_REDIS_URL", "http://redis"),
        ("SHOAL_POOLS", "/nowhere/pools.yaml"),
        ("SHOAL_EVICTION", "random"),
        ("SHOAL_GRACE_SECONDS", "soon"),
        ("SHOAL_LOG_LEVEL", "LOUD"),
    ],
)
def test_invalid_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Settings.from_env({name: value})
    assert raised.value.field == name

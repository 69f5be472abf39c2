"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.errors import InvalidInput
from services.worker.settings import Settings, parse_shelves


def test_defaults() -> None:
    settings = Settings.from_env({})
    assert settings.routers == ("127.0.0.1:50051",)
    assert settings.pool == "cpu"
    assert settings.threads >= 1
    assert settings.health_address == ""
    assert (settings.host_bytes, settings.eviction, settings.load_seconds) == (None, "cost", 300.0)
    assert settings.torch_checkpoints == "convert"
    assert settings.stores == (), "nothing is fetched unless somebody says from where"
    assert Settings.from_env({"HOME": "/home/me"}).store_dir == Path("/home/me/.cache/shoal")
    assert Settings.from_env({}).worker_id != settings.worker_id


def test_everything_set() -> None:
    settings = Settings.from_env(
        {
            "SHOAL_ROUTERS": "a:1, b:2",
            "SHOAL_WORKER_ID": "w",
            "SHOAL_MODELS": "org/a=/x:/y",
            "SHOAL_DTYPE": "bfloat16",
            "SHOAL_STORES": "hf,file:///models",
            "SHOAL_STORE_DIR": "/var/shoal",
            "SHOAL_STORE_BYTES": "1000",
            "SHOAL_TORCH_CHECKPOINTS": "refuse",
            "SHOAL_BATCH_TOKENS": "100",
            "SHOAL_MAX_AGE_SECONDS": "0.25",
            "SHOAL_HOST_BYTES": "0",
            "SHOAL_EVICTION": "gdsf",
            "SHOAL_LOAD_SECONDS": "20",
        }
    )
    assert settings.routers == ("a:1", "b:2")
    assert settings.models == parse_shelves("org/a=/x:/y")
    assert (
        settings.worker_id,
        settings.dtype,
        settings.batch_tokens,
        settings.max_age_seconds,
    ) == ("w", "bfloat16", 100, 0.25)
    assert (settings.stores, settings.store_dir, settings.store_bytes) == (
        ("hf", "file:///models"),
        Path("/var/shoal"),
        1000,
    )
    assert settings.torch_checkpoints == "refuse"
    assert (settings.host_bytes, settings.eviction, settings.load_seconds) == (0, "gdsf", 20.0)
    assert settings.describe()["models"] == "org/a=/x:/y"
    assert settings.describe()["stores"] == "hf,file:///models"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHOAL_DEVICE", "tpu"),
        ("SHOAL_DTYPE", "float16"),
        ("SHOAL_THREADS", "0"),
        ("SHOAL_THREADS", "1.5"),
        ("SHOAL_HEARTBEAT_SECONDS", "60"),
        ("SHOAL_MAX_AGE_SECONDS", "nan"),
        ("SHOAL_PULL_WAIT_SECONDS", "soon"),
        ("SHOAL_ROUTERS", "a:1,,b:2"),
        ("SHOAL_WORKER_ID", "a b"),
        ("SHOAL_BATCH_TOKENS", "-1"),
        ("SHOAL_STORES", "https://somewhere/models"),
        ("SHOAL_STORE_BYTES", "-1"),
        ("SHOAL_TORCH_CHECKPOINTS", "ask"),
        ("SHOAL_HOST_BYTES", "-1"),
        ("SHOAL_HOST_BYTES", "half"),
        ("SHOAL_EVICTION", "fifo"),
        ("SHOAL_LOAD_SECONDS", "0"),
    ],
)
def test_invalid_values_are_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Settings.from_env({name: value})
    assert caught.value.field == name
    assert name in caught.value.message

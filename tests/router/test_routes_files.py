"""The pools of a model are configuration: files that change while a router runs, as the kubelet
changes a mounted ConfigMap.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from libs.errors import InvalidInput
from services.router.admission.routing.routes_files import watch_routes
from tests.router.parts import MODEL, Client, FakeWorker, card, router, until

POOLS = "pools: {l4: {device: cuda}, a100: {device: cuda}}\n"


def mount(folder: Path, version: str, **files: str) -> None:
    """Files as links over a link that is turned in one step."""
    data = folder / f"..{version}"
    data.mkdir(parents=True)
    for name, text in files.items():
        (data / f"{name}.yaml").write_text(text)
        link = folder / f"{name}.yaml"
        if not link.is_symlink():
            link.symlink_to(Path("..data") / f"{name}.yaml")
    (folder / "..new").symlink_to(data.name)
    os.replace(folder / "..new", folder / "..data")


def cards(pool: str) -> str:
    return f"model: {MODEL}\npools: [{pool}]\n"


async def test_model_moves_to_another_pool_without_a_restart(
    redis_url: str, tmp_path: Path
) -> None:
    mount(tmp_path, "1", pools=POOLS)
    mount(tmp_path / "catalog", "1", cards=cards("l4"))
    files = watch_routes(tmp_path / "pools.yaml", [tmp_path / "catalog"], "cpu")
    async with router(redis_url, routes=files) as client:
        able = {"on_disk": [card()], "can_load": True}
        async with (
            _in_pool(client, "l4", **able).working() as first,
            _in_pool(client, "a100", **able).working() as second,
        ):
            await client.sees("l4", "a100")
            await client.encode("a")
            assert (len(first.jobs), len(second.jobs)) == (1, 0)
            mount(tmp_path / "catalog", "2", cards=cards("a100"))

            async def is_moved() -> bool:
                await client.encode("b")
                return bool(second.jobs)

            await until(is_moved, "requests to go to the other pool")


def _in_pool(client: Client, pool: str, **values: object) -> FakeWorker:
    return FakeWorker(client.address, pool, pool=pool, **values)  # type: ignore[arg-type]  # of FakeWorker


async def test_changed_new_and_wrong_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pools.yaml").write_text(POOLS)
    (tmp_path / "catalog").mkdir()
    files = watch_routes(tmp_path / "pools.yaml", [tmp_path / "catalog"], "cpu")

    async def pools_of(model: str) -> tuple[str, ...]:
        files.refresh()
        said = files.content.catalog.overrides(model)
        return said.pools or () if said is not None else ()

    assert await pools_of("org/new") == ()
    (tmp_path / "catalog" / "new.yaml").write_text("model: org/new\npools: [l4]\n")
    assert await pools_of("org/new") == ("l4",)
    (tmp_path / "catalog" / "new.yaml").write_text("model: org/new\npools: [nowhere]\n")
    assert await pools_of("org/new") == ("l4",)
    assert await pools_of("org/new") == ("l4",)
    assert sum("are invalid" in record.message for record in caplog.records) == 1
    (tmp_path / "pools.yaml").write_text("pools: {l4: {device: cuda}, nowhere: {device: cuda}}\n")
    assert await pools_of("org/new") == ("nowhere",)
    (tmp_path / "catalog" / "new.yaml").unlink()
    assert await pools_of("org/new") == ()


async def test_without_files_nothing_changes() -> None:
    files = watch_routes(None, [], "other")
    files.refresh()
    assert files.content.default == "other"


def test_router_does_not_start_with_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        watch_routes(tmp_path / "nowhere.yaml", [], "cpu")

"""Cached image outputs: in the worker's memory, released before a model is evicted, and removed
with their model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from libs.models.interface.output_cache import FindOutput
from libs.telemetry import metrics
from services.worker.memory.images import ImageOutputs
from services.worker.memory.residency import Residency
from services.worker.settings import Settings
from tests.worker.fakes import FakeModel, until
from tests.worker.residing import Checkpoints, ManualClock, loaded, residency, unloaded

VECTOR = np.arange(128, dtype=np.float32)  # 512 bytes, 1,024 with the entry
ENTRY = 1024


class SeeingModel(FakeModel):
    """A model with images. `find` looks up cached outputs."""

    find: FindOutput | None = None

    def use_output_cache(self, find: FindOutput | None) -> bool:
        self.find = find
        return True

    def looks(self) -> bool:
        return self.find is not None


def seeing(root: Path, *names: str) -> Checkpoints:
    store = Checkpoints(root, *names)
    store.make = SeeingModel
    return store


def outputs(models: Residency, name: str) -> ImageOutputs:
    resident = models.serving(name)
    assert resident is not None
    assert resident.images is not None
    return resident.images


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def events(event: str) -> float:
    return float(metrics.IMAGE_CACHE_EVENTS.labels(event)._value.get())


async def test_least_recently_used_outputs_are_evicted_first(tmp_path: Path) -> None:
    async with residency(
        seeing(tmp_path, "org/a"), memory_bytes=10 * ENTRY, image_cache_bytes=3 * ENTRY
    ) as models:
        await loaded(models, "org/a")
        kept, evicted = outputs(models, "org/a"), events("evicted")
        for number in range(3):
            kept.keep(key(number), VECTOR + number, tokens=number)
        assert kept.find(key(0)) is not None
        kept.keep(key(3), VECTOR, tokens=3)
        kept.keep(key(3), VECTOR, tokens=3)
        found = [kept.find(key(number)) for number in range(4)]
        assert found[1] is None
        assert [one.tokens for one in found if one is not None] == [0, 2, 3]
        assert found[2] is not None
        np.testing.assert_array_equal(found[2].output, VECTOR + 2)
        assert models.image_cache_bytes == 3 * ENTRY
        assert events("evicted") - evicted == 1
        kept.keep(key(4), np.zeros(ENTRY, np.float32), tokens=1)
        assert kept.find(key(4)) is None, "it is larger than all that may be kept"
        assert kept.find(key(3)) is not None


async def test_cached_outputs_are_copies(tmp_path: Path) -> None:
    async with residency(
        seeing(tmp_path, "org/a"), memory_bytes=10 * ENTRY, image_cache_bytes=3 * ENTRY
    ) as models:
        await loaded(models, "org/a")
        batch = np.ones((2, 128), np.float32)
        outputs(models, "org/a").keep(key(0), batch[0], tokens=1)
        batch[:] = 0
        found = outputs(models, "org/a").find(key(0))
        assert found is not None
        np.testing.assert_array_equal(found.output, np.ones(128, np.float32))


async def test_memory_is_given_back_before_a_model_is_evicted(tmp_path: Path) -> None:
    """A load takes only the memory that it needs. The other outputs stay, and no model is
    evicted.
    """
    store = seeing(tmp_path, "org/a")
    store.add("org/b", 2 * ENTRY)
    hand = ManualClock()
    async with residency(
        store, memory_bytes=100 + 4 * ENTRY, image_cache_bytes=4 * ENTRY, clock=hand
    ) as models:
        await loaded(models, "org/a")
        kept = outputs(models, "org/a")
        for number in range(4):
            kept.keep(key(number), VECTOR, tokens=1)
        assert models.image_cache_bytes == 4 * ENTRY
        assert models.used_bytes == 100, "memory given back at once is not in use"
        assert models.can_load()
        await loaded(models, "org/b")
        assert models.serving("org/a") is not None
        assert [kept.find(key(number)) is None for number in range(4)] == [True, True, False, False]
        assert models.peak_bytes <= 100 + 4 * ENTRY
        await unloaded(models, "org/b")
        hand.now += 2
        kept.keep(key(7), VECTOR, tokens=1)  # requests the free memory
        await until(
            lambda: _kept(kept, 8) and models.image_cache_bytes == 4 * ENTRY,
            "the memory to be taken again",
        )


def _kept(kept: ImageOutputs, first: int) -> bool:
    for number in range(first, first + 4):
        kept.keep(key(number), VECTOR, tokens=1)
    return True


async def test_out_of_memory_frees_the_whole_cache(tmp_path: Path) -> None:
    async with residency(
        seeing(tmp_path, "org/a"), memory_bytes=10 * ENTRY, image_cache_bytes=4 * ENTRY
    ) as models:
        await loaded(models, "org/a")
        outputs(models, "org/a").keep(key(0), VECTOR, tokens=1)
        assert await models.relieve("org/a")
        assert models.image_cache_bytes == 0
        assert not await models.relieve("org/a"), "there is nothing more"


async def test_outputs_are_removed_with_their_model(tmp_path: Path) -> None:
    async with residency(
        seeing(tmp_path, "org/a", "org/b"), memory_bytes=10 * ENTRY, image_cache_bytes=4 * ENTRY
    ) as models:
        await loaded(models, "org/a", "org/b")
        first, second = outputs(models, "org/a"), outputs(models, "org/b")
        first.keep(key(0), VECTOR, tokens=1)
        second.keep(key(0), VECTOR + 1, tokens=1)
        resident = models.serving("org/a")
        assert resident is not None
        model = resident.model
        assert isinstance(model, SeeingModel)
        assert model.looks()
        await unloaded(models, "org/a")
        assert not model.looks()
        assert first.find(key(0)) is None
        found = second.find(key(0))
        assert found is not None
        np.testing.assert_array_equal(found.output, VECTOR + 1)
        await unloaded(models, "org/b")
        assert models.image_cache_bytes == 0
        assert models.used_bytes == 0


async def test_accelerator_worker_caches_in_host_memory(tmp_path: Path) -> None:
    """Warm models have priority there."""
    store = seeing(tmp_path, "org/a", "org/b")
    async with residency(
        store,
        memory_bytes=10 * ENTRY,
        host_bytes=2 * ENTRY,
        shares_memory=False,
        image_cache_bytes=2 * ENTRY,
    ) as models:
        await loaded(models, "org/a", "org/b")
        kept = outputs(models, "org/a")
        for number in range(2):
            kept.keep(key(number), VECTOR, tokens=1)
        assert models.image_cache_bytes == 2 * ENTRY
        assert models.used_bytes == 200
        assert models.host_used_bytes == 0
        await unloaded(models, "org/b")
        assert models.host_used_bytes == 100, "it is warm"
        assert models.image_cache_bytes == ENTRY


async def test_cache_is_off_by_setting_and_for_models_without_images(tmp_path: Path) -> None:
    async with residency(seeing(tmp_path, "org/a"), memory_bytes=10 * ENTRY) as models:
        await loaded(models, "org/a")
        resident = models.serving("org/a")
        assert resident is not None
        assert resident.images is None
        assert isinstance(resident.model, SeeingModel)
        assert resident.model.find is None
    async with residency(
        Checkpoints(tmp_path, "org/b"), memory_bytes=10 * ENTRY, image_cache_bytes=ENTRY
    ) as models:
        await loaded(models, "org/b")
        resident = models.serving("org/b")
        assert resident is not None
        assert resident.images is None
    assert Settings.from_env({"SHOAL_IMAGE_CACHE_BYTES": "0"}).image_cache_bytes == 0
    assert Settings.from_env({}).image_cache_bytes == 128 << 20

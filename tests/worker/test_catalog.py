"""Effects of a card on a worker: reported prompts and pools, number format, fetched revision,
pin.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from shoal.v1 import models_pb2, worker_pb2

from libs.errors import InvalidInput
from libs.models import EncodeResult, EncodeWork, collect_outputs
from libs.models.interface.work import never_cancelled
from libs.store import open_store
from services.worker.machine import disk
from services.worker.machine.device import open_device
from services.worker.memory import report
from services.worker.memory.files import ModelFiles
from services.worker.memory.residency import Residency
from services.worker.settings import Settings
from tests.models.test_int8 import write_outliers
from tests.parity.checkpoints import SentenceFiles, write_checkpoint
from tests.worker.fakes import until

MODEL = "org/model"


def settings(tmp_path: Path, card: str, models: str = "", stores: str = "") -> Settings:
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards/own.yaml").write_text(card)
    return Settings.from_env(
        {
            "SHOAL_CATALOG": str(tmp_path / "cards"),
            "SHOAL_MODELS": models,
            "SHOAL_STORES": stores,
            "SHOAL_STORE_DIR": str(tmp_path / "store"),
            "SHOAL_DEVICE": "cpu",
            "SHOAL_DTYPE": "float32",
        }
    )


@asynccontextmanager
async def residency(reported: Settings) -> AsyncIterator[Residency]:
    device = open_device(reported)
    store = open_store(reported.stores, reported.store_dir, 0) if reported.stores else None
    async with asyncio.TaskGroup() as tasks:
        made = Residency(
            ModelFiles(
                reported.models,
                store,
                reported.catalog,
                item_bytes=device.item_bytes,
                has_int8=device.has_int8,
            ),
            device,
            tasks,
            clock=time.monotonic,
            changed=lambda: None,
        )
        await made.list_disk()
        tasks.create_task(made.run())
        try:
            yield made
        finally:
            made.stop()


def line(made: Residency, model: str = MODEL) -> worker_pb2.WorkerModel:
    """Return the model's entry in a heartbeat; that of the models on disk if it is not held."""
    entries = [*made.report(), *report.on_disk(made.on_disk)]
    return next((one for one in entries if one.model == model), worker_pb2.WorkerModel())


async def test_card_settings_are_reported_and_applied(tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / "models" / MODEL, sentence=SentenceFiles())
    card = (
        f'model: {MODEL}\nprompts: {{query: "a query: "}}\npools: [l4, cpu]\ndtype: bfloat16\n'
        "pinned: true\nmax_tokens: 11\n"
    )
    async with residency(settings(tmp_path, card, models=str(tmp_path / "models"))) as made:
        await until(lambda: line(made).HasField("card"))
        cold = line(made).card
        assert (list(cold.prompts), list(cold.pools), cold.max_tokens) == (
            ["query"],
            ["l4", "cpu"],
            11,
        )
        made.load(MODEL)
        await until(lambda: line(made).state == models_pb2.MODEL_STATE_RESIDENT)
        resident = made.serving(MODEL)
        assert resident is not None
        assert (line(made).pinned, line(made).card.data_type) == (True, "bfloat16")
        # Half of the encoder's bytes in float32.
        assert resident.model.bytes < (directory / "model.safetensors").stat().st_size * 0.6
        prepared = resident.model.prepare(EncodeWork(["text"], role="query"), never_cancelled)
        plain = resident.model.prepare(EncodeWork(["text"]), never_cancelled)
        assert prepared.sequences[0].tokens > plain.sequences[0].tokens
        answer = resident.model.finish(
            prepared, collect_outputs(resident.model.forward(prepared.head, prepared.sequences))
        )
        assert isinstance(answer, EncodeResult)


async def test_card_selects_int8(tmp_path: Path) -> None:
    """The claim before the load equals the use after it, and is reported as the size on disk."""
    write_checkpoint(
        "bert", tmp_path / "models" / MODEL, hidden=256, vocabulary=10_000, sentence=SentenceFiles()
    )
    wide = disk.weight_bytes(tmp_path / "models" / MODEL, 4)
    async with residency(
        settings(tmp_path, f"model: {MODEL}\ndtype: int8\n", models=str(tmp_path / "models"))
    ) as made:
        await until(lambda: line(made).bytes > 0)
        claimed = line(made).bytes
        assert claimed < 0.3 * wide
        made.load(MODEL)
        await until(lambda: line(made).state == models_pb2.MODEL_STATE_RESIDENT)
        assert line(made).card.data_type == "int8"
        assert 0.95 * claimed < line(made).bytes < 1.05 * claimed
        resident = made.serving(MODEL)
        assert resident is not None
        prepared = resident.model.prepare(EncodeWork(["text"]), never_cancelled)
        answer = resident.model.finish(
            prepared, collect_outputs(resident.model.forward(prepared.head, prepared.sequences))
        )
        assert isinstance(answer, EncodeResult)


async def test_model_with_large_int8_loss_is_not_loaded(tmp_path: Path) -> None:
    write_outliers(tmp_path / "models" / MODEL)
    async with residency(
        settings(tmp_path, f"model: {MODEL}\ndtype: int8\n", models=str(tmp_path / "models"))
    ) as made:
        made.load(MODEL)
        await until(lambda: line(made).state == models_pb2.MODEL_STATE_FAILED)
        assert (
            f"{MODEL} loses too much in int8: encode: lowest cosine 0."
            in line(made).failure.message
        )
        assert line(made).failure.reason == "MODEL_LOAD_FAILED"


def test_device_without_int8_claims_its_default_type(tmp_path: Path) -> None:
    directory = write_checkpoint("bert", tmp_path / MODEL, sentence=SentenceFiles())
    reported = settings(tmp_path, f"model: {MODEL}\ndtype: int8\n")
    with_it, without = (
        ModelFiles((), None, reported.catalog, item_bytes=2, has_int8=has) for has in (True, False)
    )
    assert without.device_bytes(MODEL, directory) == disk.weight_bytes(directory, 2)
    assert with_it.device_bytes(MODEL, directory) == disk.weight_bytes(directory, 1)


async def test_pinned_revision_is_fetched(tmp_path: Path) -> None:
    original = write_checkpoint(
        "bert", tmp_path / "bucket" / f"{MODEL}@v2", sentence=SentenceFiles()
    )
    shutil.copytree(original, tmp_path / "bucket" / MODEL)
    (tmp_path / "bucket" / MODEL / "config.json").write_text("{}")
    reported = settings(
        tmp_path, f"model: {MODEL}\nrevision: v2\n", stores=f"file://{tmp_path}/bucket"
    )
    async with residency(reported) as made:
        made.load(MODEL)
        await until(
            lambda: (
                line(made).state in (models_pb2.MODEL_STATE_RESIDENT, models_pb2.MODEL_STATE_FAILED)
            )
        )
        assert line(made).failure.message == ""
        assert line(made).card.revision == "v2"


def test_broken_card_prevents_startup(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"own\.yaml:1: the card has no key 'modle'"):
        settings(tmp_path, "modle: org/model\n")


def test_settings_report_the_number_of_cards(tmp_path: Path) -> None:
    described = settings(tmp_path, f"model: {MODEL}\n").describe()
    assert described["catalog"].endswith(" cards")
    assert int(described["catalog"].split()[0]) > 100

"""docs/models.md lists every model of the catalogue once, makes only possible claims, and is
current.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.catalog import coverage
from libs.catalog.cards import read_catalog
from libs.errors import InvalidInput, ModelBroken
from libs.kinds.generative.card import SEQUENCE_TO_SEQUENCE
from libs.kinds.image_generative.card import MODEL_TYPES as IMAGE_GENERATIVE
from libs.kinds.images.card import DETECTORS, IMAGES_ALONE, TEXTS_AND_IMAGES
from libs.kinds.registry import NAMES
from libs.kinds.static.card import FAMILIES as STATIC
from libs.kinds.vision_language.card import MODEL_TYPES as VISION_LANGUAGE
from libs.models.text.registry import model_types

CATALOGUE = Path(__file__).parent / "catalogue.txt"
"""Models that users of comparable servers run: an id and its inputs (text, image, video) a line."""


def test_every_model_is_there_once() -> None:
    wanted = [line.split()[0] for line in CATALOGUE.read_text().splitlines()]
    assert sorted(row.model for row in coverage.rows()) == sorted(wanted)


def test_cards_name_families_and_kinds_that_are_served() -> None:
    images = {*TEXTS_AND_IMAGES, *IMAGES_ALONE, *DETECTORS, *VISION_LANGUAGE}
    for row in coverage.rows():
        if row.status in ("run", "card", "incomplete"):
            assert row.kind in NAMES, row
            families = {
                "images": images,
                "generative": {*IMAGE_GENERATIVE, *SEQUENCE_TO_SEQUENCE, *model_types()},
            }.get(row.kind, {*model_types(), *STATIC})
            assert set(row.family.split(" or ")) <= families, row


def test_image_models_are_of_an_image_kind_or_not_served() -> None:
    pictures = {
        line.split()[0] for line in CATALOGUE.read_text().splitlines() if "image" in line.split()[1]
    }
    for row in coverage.rows():
        sees = row.kind == "images" or (row.kind == "generative" and row.family in IMAGE_GENERATIVE)
        assert sees == (row.model in pictures and row.status != "not yet"), row


def test_model_without_a_card_has_a_reason() -> None:
    assert all(row.reason for row in coverage.rows() if row.status in ("not yet", "unknown"))


def test_model_that_is_not_served_has_an_alternative() -> None:
    rows = coverage.rows()
    served = {row.model for row in rows if row.status in ("run", "card")}
    for row in rows:
        if row.status == "not yet":
            named = {word.strip(".,") for word in row.reason.split() if "/" in word}
            assert named & served, row


def test_published_model_that_is_not_served_is_refused_without_a_card(tmp_path: Path) -> None:
    for model in ("jinaai/jina-reranker-v3", "jinaai/jina-reranker-v3@main"):
        with pytest.raises(ModelBroken, match=r"not served: .*Use jinaai/jina-reranker-m0"):
            read_catalog().refuse_unserved(model)
    for model in ("jinaai/jina-embeddings-v3", "tencent/R3-rerank-0.6b", "some/model"):
        read_catalog().refuse_unserved(model)
    (tmp_path / "own.yaml").write_text("model: jinaai/jina-reranker-v3\nmax_tokens: 99\n")
    read_catalog([tmp_path]).refuse_unserved("jinaai/jina-reranker-v3")


def test_model_with_a_card_and_a_reason_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "uncovered.yaml"
    file.write_text("- {models: [BAAI/bge-m3], status: not yet, reason: none}\n")
    monkeypatch.setattr(coverage, "UNCOVERED", file)
    with pytest.raises(InvalidInput, match="bge-m3 has a card or a line of uncovered"):
        coverage.rows()


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage.main(["--check"]) == 0, capsys.readouterr().out


def test_stale_page_is_reported_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "models.md"
    page.write_text("old")
    monkeypatch.setattr(coverage, "FILE", page)
    assert coverage.main(["--check"]) == 1
    assert "stale: models.md" in capsys.readouterr().out
    assert page.read_text() == "old"
    assert coverage.main([]) == 0
    assert coverage.main(["--check"]) == 0

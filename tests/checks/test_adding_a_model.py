"""The tables of docs/adding-a-model.md are those of the code."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from libs.models.layers.spec import EmbeddingSpec, EncoderSpec, LayerSpec
from libs.models.text.registry import _FAMILIES
from libs.models.weights import AllowedExtra

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text("utf-8")
OWN_MODULES = {
    "bart", "deberta", "deberta_v1", "jina_code", "longformer", "nomic_moe", "privacy_filter",
    "t5_classifier",
}  # fmt: skip
"""Families with tables that have separate targets."""


def rows(title: str) -> list[list[str]]:
    """The cells of the table after a title in bold, without its head; each cell's code spans if it
    has any.
    """
    table = PAGE.split(f"**{title}**", 1)[1].split("\n\n", 2)[1]
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in table.splitlines()[2:]
    ]
    assert cells
    return cells


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("spec", [EmbeddingSpec, EncoderSpec, LayerSpec])
def test_every_field_of_a_spec_is_there_with_its_default(
    spec: type[EmbeddingSpec | EncoderSpec | LayerSpec],
) -> None:
    shown: dict[str, str | None] = {}
    for names, defaults, _ in rows(f"Fields of `{spec.__name__}`"):
        found = codes(names)
        given: list[str | None] = [*codes(defaults)]
        shown |= dict(zip(found, given or [None] * len(found), strict=True))
    wanted = {
        one.name: None if one.default is MISSING else str(one.default) for one in fields(spec)
    }
    assert shown == wanted


def test_targets_are_those_that_families_use() -> None:
    shown = {target for names, _ in rows("Targets of `WEIGHTS`") for target in codes(names)}
    used: set[str] = set()
    for family in _FAMILIES:
        if str(vars(family)["__name__"]).rpartition(".")[2] not in OWN_MODULES:
            for rule in family.WEIGHTS.values():
                if isinstance(rule, AllowedExtra):
                    used.add(rule.target)
                elif rule is not None:
                    used.add(rule if isinstance(rule, str) else rule[0])
    assert shown == used

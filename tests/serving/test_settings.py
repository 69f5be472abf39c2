"""Declared settings: reading, validation, the log line and secrets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from libs import setting
from libs.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Oven:
    oven_id: str = setting.identity("SHOAL_OVEN_ID", "oven", "The oven's name.")
    bake_seconds: float = setting.seconds(
        "SHOAL_SECONDS", 180.0, setting.above(0, 300), "Duration."
    )
    loaves: int = setting.integer(
        "SHOAL_LOAVES", 4, "loaves", setting.in_range(1, 9), "Loaves at a time."
    )
    crumbs: int = setting.integer(
        "SHOAL_CRUMBS", 100, "crumbs", setting.at_least(0), "Crumbs.", has_exponent=True
    )
    minutes: int | None = setting.integer(
        "SHOAL_MINUTES", None, "minutes", setting.at_least(1), "Time to cool."
    )
    grain: str = setting.choice("SHOAL_GRAIN", "rye", ("rye", "wheat"), "The flour.")
    has_light: bool = setting.flag("SHOAL_LIGHT", False, "Whether the light is on.")
    recipe: Path | None = setting.path("SHOAL_RECIPE", None, "The recipe.")
    guests: tuple[str, ...] = setting.items(
        "SHOAL_GUESTS",
        (),
        setting.Allowed("names in lower case", lambda names: all(map(str.islower, names))),
        "Guests, separated by commas.",
    )
    baker: str = setting.text(
        "SHOAL_BAKER", "ann", "The baker.", setting.NAME, is_empty_refused=True
    )
    shelf: str = setting.text(
        "SHOAL_SHELF", "", "The shelf.", unset=lambda environ: environ.get("SHOAL_BAKER", "middle")
    )
    key: str = setting.text(
        "SHOAL_KEY",
        "",
        "The key.",
        setting.Allowed("digits", lambda key: not key or key.isdigit()),
        is_secret=True,
    )
    times: tuple[int, ...] = setting.parsed(
        "SHOAL_TIMES",
        "whole numbers, separated by colons",
        lambda given: tuple(map(int, given.split(":"))),
        tuple,
        "Times to bake.",
        log=lambda times: sum(times),
        log_name="total",
    )
    door: tuple[str, str] = setting.group(
        lambda environ: (environ.get("SHOAL_DOOR", "shut"), environ.get("SHOAL_LOCK", "open")),
        setting.documented({"SHOAL_DOOR": "The door.", "SHOAL_LOCK": "Its lock."}),
        lambda: ("", ""),
        lambda door: {"door": door[0], "lock": door[1]},
    )

    def __post_init__(self) -> None:
        setting.check_fields(self)


def test_unset_and_empty_variables_have_the_default() -> None:
    names = [setting.variable for setting in setting.list_variables(Oven)]
    empty = dict.fromkeys(set(names) - {"SHOAL_BAKER", "SHOAL_DOOR", "SHOAL_LOCK"}, "")
    for environ in ({}, empty):
        oven = setting.read(Oven, environ)
        assert oven == Oven(oven.oven_id, shelf="middle", door=("shut", "open"))
    assert (Oven("o").bake_seconds, Oven("o").grain, Oven("o").minutes) == (180.0, "rye", None)
    assert Oven().oven_id != Oven().oven_id


def test_variables_are_parsed() -> None:
    environ = {
        "SHOAL_OVEN_ID": "o",
        "SHOAL_SECONDS": "2.5e1",
        "SHOAL_LOAVES": "9",
        "SHOAL_CRUMBS": "2e3",
        "SHOAL_MINUTES": "3",
        "SHOAL_GRAIN": "wheat",
        "SHOAL_LIGHT": "1",
        "SHOAL_RECIPE": "/r",
        "SHOAL_GUESTS": "bo, cy,,",
        "SHOAL_BAKER": "dan",
        "SHOAL_KEY": "42",
        "SHOAL_TIMES": "1:2",
        "SHOAL_LOCK": "bolt",
    }
    assert setting.read(Oven, environ) == Oven(
        oven_id="o",
        bake_seconds=25.0,
        loaves=9,
        crumbs=2000,
        minutes=3,
        grain="wheat",
        has_light=True,
        recipe=Path("/r"),
        guests=("bo", "cy"),
        baker="dan",
        shelf="dan",
        key="42",
        times=(1, 2),
        door=("shut", "bolt"),
    )
    assert setting.read(Oven, environ, without=["loaves", "door"]).loaves == 4


@pytest.mark.parametrize(
    ("variable", "given", "message"),
    [
        ("SHOAL_OVEN_ID", "a b", "must be 1..63 letters, digits, '.', '_' or '-', not 'a b'"),
        ("SHOAL_SECONDS", "0", "must be a number of seconds, above 0, at most 300, not '0'"),
        (
            "SHOAL_SECONDS",
            "nan",
            "must be a number of seconds, above 0, at most 300, not 'nan'",
        ),
        (
            "SHOAL_SECONDS",
            "hot",
            "must be a number of seconds, above 0, at most 300, not 'hot'",
        ),
        ("SHOAL_LOAVES", "10", "must be a whole number of loaves, 1..9, not '10'"),
        ("SHOAL_LOAVES", "1.5", "must be a whole number of loaves, 1..9, not '1.5'"),
        ("SHOAL_LOAVES", "1e0", "must be a whole number of loaves, 1..9, not '1e0'"),
        ("SHOAL_CRUMBS", "1.5", "must be a whole number of crumbs, at least 0, not '1.5'"),
        ("SHOAL_CRUMBS", "inf", "must be a whole number of crumbs, at least 0, not 'inf'"),
        ("SHOAL_MINUTES", "0", "must be a whole number of minutes, at least 1, not '0'"),
        ("SHOAL_GRAIN", "oat", "must be one of rye, wheat, not 'oat'"),
        ("SHOAL_LIGHT", "yes", "must be 0 or 1, not 'yes'"),
        ("SHOAL_GUESTS", "bo,Cy", "must be names in lower case, not 'bo,Cy'"),
        ("SHOAL_BAKER", "", "must be 1..63 letters, digits, '.', '_' or '-', not ''"),
        ("SHOAL_TIMES", "soon", "must be whole numbers, separated by colons, not 'soon'"),
    ],
)
def test_error_names_variable_value_and_allowed_values(
    variable: str, given: str, message: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        setting.read(Oven, {variable: given})
    assert refusal.value.message == f"{variable} {message}"
    assert refusal.value.field == variable


def test_values_given_in_code_are_checked() -> None:
    with pytest.raises(InvalidInput, match="SHOAL_GRAIN must be one of rye, wheat, not 'oat'"):
        Oven(grain="oat")
    with pytest.raises(InvalidInput, match=r"SHOAL_LOAVES must .* not '0'"):
        Oven(loaves=0)


def test_secret_is_in_no_error_log_or_repr() -> None:
    with pytest.raises(InvalidInput) as refusal:
        setting.read(Oven, {"SHOAL_KEY": "hunter2"})
    assert refusal.value.message == "SHOAL_KEY must be digits"
    oven = setting.read(Oven, {"SHOAL_KEY": "4711"})
    assert "4711" not in f"{oven!r} {setting.describe(oven)}"
    assert setting.describe(oven)["key"] == "set"


def test_log_line_has_every_setting() -> None:
    expected: dict[str, setting.Loggable] = {
        "oven_id": "o",
        "bake_seconds": 180.0,
        "loaves": 4,
        "crumbs": 100,
        "minutes": "",
        "grain": "rye",
        "has_light": True,
        "recipe": "/r",
        "guests": "bo,cy",
        "baker": "ann",
        "shelf": "",
        "key": "",
        "total": 3,
        "door": "shut",
        "lock": "bolt",
    }
    oven = Oven(
        "o",
        has_light=True,
        recipe=Path("/r"),
        guests=("bo", "cy"),
        times=(1, 2),
        door=("shut", "bolt"),
    )
    assert setting.describe(oven) == expected
    assert set(expected) - set(setting.describe(oven, without=["door", "key"])) == {
        "door",
        "lock",
        "key",
    }


def test_variables_of_a_class_include_those_of_groups() -> None:
    assert [setting.variable for setting in setting.list_variables(Oven)][-2:] == [
        "SHOAL_DOOR",
        "SHOAL_LOCK",
    ]
    assert list(setting.declared(Oven))[-1] == "door"
    assert "SHOAL_LOCK" not in {
        one.variable for one in setting.list_variables(Oven, without=["door"])
    }

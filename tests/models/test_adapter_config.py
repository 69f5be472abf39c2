"""Patterns of checkpoints: accepted ones mean the same as in Python's `re`, and none takes long."""

from __future__ import annotations

import json
import random
import re
import warnings
from pathlib import Path

import pytest

from libs.errors import ModelBroken
from libs.models.runtime.loaded.adapter_config import read_adapter
from libs.models.runtime.loaded.patterns import UnsupportedPattern, compile_pattern
from tests.fuzz import tiny
from tests.fuzz.run import limited

ATOMS = (
    "a", "b", "q_proj", "layers", "1", "2", ".", r"\.", r"\d", r"\d+", r"\w", r"\W", r"\s", r"\d1",
    "[0-9]", "[^a.]", "[a-c]",
    "[ab-]", "[]a]",
    "(", "(?:", ")", "|", "*", "+", "?", "*?", "{2}", "{1,2}", "{0,3}", "{1,}", "x{12}", "^", "$",
    ".*", r"\-",
)  # fmt: skip
NAMES = ("a", "b", "c", "x", "1", "2", ".", "q_proj", "layers.", "-", "\u0664")
MODULES = (
    "model.decoder.layers.0.encoder_attn.k_proj", "encoder.layer.11.attention.self.query",
    "layers.3.mlp.gate_proj",
    "bert.encoder.layer.1.attention.self.query", "model.layers.12.self_attn.q_proj", "query",
    "my_query", "",
)  # fmt: skip


def in_python(pattern: str, name: str) -> bool:
    """PEFT's get_pattern_key."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


@pytest.mark.parametrize(
    "pattern",
    [
        "query", "attention.self.query", "^model.decoder.layers.0.encoder_attn.k_proj",
        r"layers\.\d+\.mlp\..*_proj",
        r".*\.layers\.(0|1|2)\.self_attn\.[qkv]_proj",
        r"model\.layers\.[0-9]+\.self_attn\.(q|k|v|o)_proj", r"(?:self_attn|mlp)\..*",
        r"layer\.1[0-9]?\..*query", r"layer\.\d{1,2}\.attention.*", "", ".*", r"[^.]+_proj$",
        r"(.*)q_proj", "quer[xyz]|k_proj",
    ],
)  # fmt: skip
def test_patterns_of_adapters_match_as_in_peft(pattern: str) -> None:
    made = compile_pattern(pattern)
    assert [made.matches_end(name) for name in MODULES] == [
        in_python(pattern, name) for name in MODULES
    ]


def test_accepted_patterns_match_as_in_python() -> None:
    chance = random.Random(7)
    taken = 0
    for _ in range(4000):
        pattern = "".join(chance.choice(ATOMS) for _ in range(chance.randrange(1, 8)))
        try:
            made = compile_pattern(pattern)
        except UnsupportedPattern:
            continue
        taken += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)  # an accepted pattern is also valid there
        for name in (
            "".join(chance.choice(NAMES) for _ in range(chance.randrange(8))) for _ in range(6)
        ):
            expected = name.isascii() and in_python(pattern, name)
            assert made.matches_end(name) == expected, (pattern, name)
    assert taken > 1000


@pytest.mark.parametrize(
    "pattern",
    [
        ".?" * 40 + "[x]" * 40, "(a+)+[x]", "(.*)*" * 30 + "[x]", "(a|a)*" * 20 + "[x]",
        "(((a?){9}){9}){9}[x]", ".*" * 90 + "[x]",
        "[x]" + ".?" * 90, "(x?a?)*" * 20 + "[x]", "(" * 60 + "a*" + ")*" * 60,
    ],
)  # fmt: skip
def test_patterns_that_would_hang_an_interpreter_are_matched_in_linear_time(pattern: str) -> None:
    assert not compile_pattern(pattern).matches_end("a" * 300 + "!")


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)", r"has '\(\?=a\)'"), ("(?P<n>a)", r"has '\(\?P<n>a"), ("(?i)a", r"has '\(\?i\)a'"),
        (r"(a)\1", r"has '\\\\1'"), (r"\bquery", r"has '\\\\bquery'"), ("\\", r"has '\\\\'"),
        ("a{", "has '{'"), ("[a", r"has '\[a'"), ("[]", r"has '\[\]'"), ("\u00e9", "has '\u00e9'"),
        # RE2 and `re` read these differently.
        ("a{,3}", r"has '{,3}'"), ("a{03}", r"has '\{03\}'"), ("[[:alpha:]]", r"has '\[\[:alpha'"),
        ("(", "missing \\)"), ("a)", "unbalanced"), ("*a", "nothing to repeat"),
        ("a**", "multiple repeat"), ("a++", "refused by RE2: bad repetition operator"),
        ("^*", "nothing to repeat"), ("[b-a]", "bad character range"),
        ("x" * 201, "201 characters"), ("a{2,1}", "greater than max repeat"),
        ("((a{99}){99}){99}", "invalid repetition size"), (".{999}", "pattern too large"),
    ],
)  # fmt: skip
def test_unsupported_pattern_is_refused_with_its_reason(pattern: str, problem: str) -> None:
    with pytest.raises(UnsupportedPattern, match=problem):
        compile_pattern(pattern)


def write(directory: Path, **changes: object) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps({**tiny.ADAPTER, **changes}))
    return directory


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_adapter_with_hostile_patterns_is_read_and_matched_quickly(
    tmp_path: Path, key: str
) -> None:
    """Python's `re` never returned on these, and blocked all other threads of the worker."""
    adapter = read_adapter(write(tmp_path, **{key: {".?" * 40 + "[x]" * 40: 4, "query": 6}}))
    module = "base_model.model.encoder.layer.0.attention.self." + "a" * 60
    assert (adapter.module_rank(module), adapter.module_scale(module)) == (2, 2.0)
    assert adapter.module_scale("encoder.query") == (4 / 6 if key == "rank_pattern" else 3.0)


def test_hostile_patterns_use_bounded_memory(tmp_path: Path) -> None:
    """Each of these patterns is close to the memory that RE2 may use for one."""
    hostile = {f"{chr(97 + number % 26)}{number}(a|b?){{99}}": 1 for number in range(1700)}
    with limited(256 << 20):
        adapter = read_adapter(write(tmp_path, rank_pattern=hostile))
        assert adapter.module_rank("encoder." + "ab" * 400 + ".query") == 2


def test_adapter_has_no_end_of_neither_patterns_nor_modules(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match=r"`rank_pattern` has patterns of 1,000,000 characters"):
        read_adapter(
            write(tmp_path, rank_pattern={f"{number:0100}": 1 for number in range(10_000)})
        )
    with (
        limited(256 << 20),
        pytest.raises(ModelBroken, match=r"`target_modules` names 10,001 modules"),
    ):
        read_adapter(write(tmp_path, target_modules=["query"] * 10_001))


def test_targets_are_whole_parts_of_a_name(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, target_modules=["query", "output.dense"]))
    assert [adapter.is_target(name) for name in ("a.query", "query", "my_query", "a.output.dense",
    "a.dense", "query.a")] == [
        True, True, False, True, False, False,
    ]  # fmt: skip

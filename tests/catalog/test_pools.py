"""pools.yaml: its fields, errors, and a model's pools; the editors' schema has the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from libs.catalog import schema
from libs.catalog.cards import read_catalog
from libs.catalog.overrides import Catalog, Overrides
from libs.catalog.pools import Pools, PoolSpec, check_cards, read_pools
from libs.errors import InvalidInput

# It compiles grammars for seconds, which every process would do that only collects this file.
if TYPE_CHECKING:
    import jsonschema

EXAMPLE = Path(__file__).parents[2] / "examples" / "pools.yaml"
TWO = "pools: {cpu: {device: cpu}, l4-spot: {device: cuda}}\n"


def pools(folder: Path, text: str) -> Pools:
    file = folder / "pools.yaml"
    file.write_text(text, encoding="utf-8")
    return read_pools(file)


def test_every_key_is_read(tmp_path: Path) -> None:
    found = pools(
        tmp_path,
        """
default: b
pools:
  a: {device: cpu}
  b:
    device: cuda
    memory_bytes: 22.5GiB
    spot: true
    min_workers: 1
    max_workers: 3
    cold_start_seconds: 40
    node_seconds: 90.5
    drain_seconds: 10
    keep_warm_seconds: 0
    target_utilization: 0.5
    cost_per_hour: 0.28
""",
    )
    assert found.default == "b"
    assert found.spec("a") == PoolSpec("a")
    assert found.spec("b") == PoolSpec(
        "b", "cuda", 24_159_191_040, True, 1, 3, 40.0, 90.5, 10.0, 0.0, 0.5, 0.28
    )


def test_first_pool_is_the_default(tmp_path: Path) -> None:
    assert pools(tmp_path, "pools: {z: {device: cpu}, a: {device: cpu}}\n").default == "z"


def test_without_a_file_every_name_is_a_pool() -> None:
    assert (Pools().is_configured, Pools().spec("any")) == (False, PoolSpec("any"))


def test_example_has_four_kinds_of_hardware() -> None:
    found = read_pools(EXAMPLE)
    assert list(found.by_name) == ["cpu", "l4-spot", "a100", "h100"]
    assert [name for name, spec in found.by_name.items() if spec.spot] == ["l4-spot"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1: the file is empty"),
        ("pools: [\n", "2: is not YAML: expected the node content, but found '<stream end>'"),
        ("default: cpu\n", "1: the file has no key 'pools', which it needs"),
        ("pools: {}\n", "1: `pools` is empty"),
        ("pools:\n  cpu: {}\n", "2: `pools.cpu` has no key 'device', which it needs"),
        (
            "pools:\n  'l4 spot': {device: cuda}\n",
            "2: `pools` is 'l4 spot', which is not 1..63 letters, digits",
        ),
        (
            "pools:\n  a: {device: tpu}\n",
            "2: `pools.a.device` is 'tpu', which is not one of cpu, cuda",
        ),
        (
            "pools:\n  a: {device: cpu}\n  a: {device: cpu}\n",
            "3: `pools` has the key 'a' twice, first in line 2",
        ),
        (
            "pools:\n  a:\n    device: cpu\n    spott: true\n",
            "4: `pools.a` has no key 'spott': did you mean 'spot'?",
        ),
        (
            "pools:\n  a: {device: cpu, memory_bytes: 22 GX}\n",
            "2: `pools.a.memory_bytes` is '22 GX', which is not a number of",
        ),
        (
            "pools:\n  a: {device: cpu, node_seconds: -1}\n",
            "2: `pools.a.node_seconds` is -1, which is not a number of at least 0",
        ),
        (
            "pools:\n  a: {device: cpu, node_seconds: .inf}\n",
            "2: `pools.a.node_seconds` is .inf, which is not a number",
        ),
        (
            "pools:\n  a: {device: cpu, node_seconds: soon}\n",
            "2: `pools.a.node_seconds` must be a number, not soon",
        ),
        (
            "pools:\n  a: {device: cpu, target_utilization: 1.5}\n",
            "2: `pools.a.target_utilization` is 1.5, which is not a number in 0.05..1",
        ),
        (
            "pools:\n  a:\n    device: cpu\n    min_workers: 5\n    max_workers: 4\n",
            "4: `pools.a.min_workers` is 5, above max_workers 4",
        ),
        (f"{TWO}default: h100\n", "2: `default` is 'h100', which is none of cpu, l4-spot"),
    ],
)
def test_errors_have_file_and_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        pools(tmp_path, text)
    assert caught.value.message.startswith(f"{tmp_path}/pools.yaml:{problem}")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"none\.yaml: cannot be read"):
        read_pools(tmp_path / "none.yaml")


def test_models_pools_are_its_own_catalogs_before_a_workers(tmp_path: Path) -> None:
    cards = Catalog(
        {"org/a": Overrides("x:1", pools=("l4-spot", "cpu")), "org/b": Overrides("x:2")}
    )
    some = pools(tmp_path, TWO)
    assert some.names_for("org/a", cards, ["h100"]) == ("l4-spot", "cpu")
    assert some.names_for("org/a@v2", cards) == ("l4-spot", "cpu")
    assert some.names_for("org/b", cards, ["h100", "cpu"]) == ("cpu",)
    assert some.names_for("org/c", cards) == ()
    assert Pools().names_for("org/b", cards, ["h100", "cpu"]) == ("h100", "cpu")


def test_card_with_an_unknown_pool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cards.yaml").write_text(
        "model: org/a\npools: [cpu]\n---\nmodel: org/b\npools: [cpu, l4]\n"
    )
    cards = read_catalog([tmp_path])
    check_cards(Pools(), cards)
    with pytest.raises(InvalidInput) as caught:
        check_cards(pools(tmp_path, TWO), cards)
    assert caught.value.message == (
        f"{tmp_path}/cards.yaml:4: `pools` names 'l4', which is not a pool of pools.yaml; "
        "its pools are: cpu, l4-spot"
    )


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    import jsonschema

    made = json.loads(schema.POOLS_FILE.read_text())
    jsonschema.Draft7Validator.check_schema(made)
    return jsonschema.Draft7Validator(made)


def test_schema_takes_the_example(validator: jsonschema.Draft7Validator) -> None:
    assert not list(validator.iter_errors(yaml.safe_load(EXAMPLE.read_text())))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pools": {}},
        {"pools": {"a": {}}},
        {"pools": {"a b": {"device": "cpu"}}},
        {"pools": {"a": {"device": "cpu", "memory_bytes": "22 GX"}}},
        {"pools": {"a": {"device": "cpu", "target_utilization": 1.5}}},
        {"pools": {"a": {"device": "cpu", "min_workers": -1}}},
        {"pools": {"a": {"device": "cpu"}}, "defalt": "a"},
    ],
)
def test_schema_refuses_documents_that_the_reader_refuses(
    validator: jsonschema.Draft7Validator, tmp_path: Path, values: dict[str, object]
) -> None:
    assert list(validator.iter_errors(values))
    with pytest.raises(InvalidInput):
        pools(tmp_path, yaml.safe_dump(values))


def test_fallback_stands_in_for_another_pool_of_the_file(tmp_path: Path) -> None:
    two = "pools: {spot: {device: cuda, spot: true}, safe: {device: cuda, fallback_for: %s}}\n"
    assert pools(tmp_path, two % "spot").spec("safe").fallback_for == "spot"
    for wrong in ("safe", "neither"):
        with pytest.raises(InvalidInput, match=r"pools\.yaml:1: `pools\.safe\.fallback_for`"):
            pools(tmp_path, two % wrong)
    chain = (
        "pools: {a: {device: cpu}, b: {device: cpu, fallback_for: a}, c: {device: cpu, "
        "fallback_for: b}}\n"
    )
    with pytest.raises(
        InvalidInput,
        match="is 'b': it must name another pool, and one that has no fallback_for itself",
    ):
        pools(tmp_path, chain)

"""Metadata, imports, examples and claims of the distributions below integrations/, without their
frameworks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from shoal.version import VERSION

from tools.distributions import ROOT, read_pins
from tools.integrations import FORMS, PAGE, Integration, faults, integrations, page, results

ALL = integrations()
MODULES = {
    "haystack-ai": "haystack",
    "qdrant-client": "qdrant_client",
    "weaviate-client": "weaviate",
}
"""Module names of distributions that differ from the distribution's name."""
PUBLIC = {"shoal", "shoal.handle", "shoal.results", "shoal.tasks", "shoal.errors"}


def sources(one: Integration) -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted((one.path / "src").rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules that are imported absolutely, and the names taken from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module), [alias.name for alias in node.names]


def exported(one: Integration) -> set[str]:
    """All names in a list `__all__`."""
    found: set[str] = set()
    for tree in sources(one).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                found |= set(ast.literal_eval(node.value))
    return found


def packages(one: Integration) -> set[str]:
    """The modules that its wheel brings, those of a namespace by their whole name."""
    return {
        ".".join(file.parent.relative_to(one.path / "src").parts)
        for file in (one.path / "src").rglob("py.typed")
    }


def test_there_are_eight() -> None:
    assert {one.framework for one in ALL} == {
        "Chroma", "DSPy", "Haystack", "LanceDB", "LangChain", "LlamaIndex", "Qdrant", "Weaviate",
    }  # fmt: skip


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.folder)
class TestDistribution:
    def test_its_metadata(self, one: Integration) -> None:
        project = one.project["project"]
        assert project["name"] == f"shoal-{one.folder}"
        assert (project["version"], project["license"], project["license-files"]) == (
            VERSION,
            "Apache-2.0",
            ["LICENSE"],
        )
        assert (one.path / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
        needs = {need.name: need.specifier for need in one.needs}
        assert VERSION in needs["shoal"]
        assert {
            name for name, bounds in needs.items() if not re.search(r">=.*", str(bounds))
        } == set()
        assert {name for name, bounds in needs.items() if "<" not in str(bounds)} <= {"pyarrow"}
        for folder in {file.parent for file in sources(one) if file.name == "__init__.py"}:
            assert (folder / "py.typed").is_file()

    def test_its_pins(self, one: Integration) -> None:
        """All exact, within its own bounds, without torch, which some of them would bring with
        gigabytes of CUDA.
        """
        pins = read_pins(one.requirements)
        assert [name for name in pins if re.match("torch|nvidia|triton|cuda|shoal", name)] == []
        for need in one.needs:
            if need.name != "shoal":
                assert one.tested_with()[canonicalize_name(need.name)] in SpecifierSet(
                    str(need.specifier)
                ), need

    def test_it_imports_shoal_and_its_framework_alone(self, one: Integration) -> None:
        frameworks = {
            MODULES.get(need.name, need.name.replace("-", "_").removesuffix("_ai"))
            for need in one.needs
        }
        frameworks |= {"llama_index"} if "llama_index_core" in frameworks else set()
        allowed = frameworks | {"numpy"} | sys.stdlib_module_names
        own = packages(one)
        for file, tree in sources(one).items():
            for module, _ in imports(tree):
                if module.partition(".")[0] == "shoal":
                    assert module in PUBLIC, file
                elif not any(module == name or module.startswith(f"{name}.") for name in own):
                    assert module.partition(".")[0] in allowed, f"{file}: {module}"

    def test_asynchronous_methods_use_no_threads(self, one: Integration) -> None:
        words = re.compile("to_thread|run_in_executor|ThreadPool")
        assert [file.name for file in sources(one) if words.search(file.read_text())] == []

    def test_example_of_its_readme_compiles(self, one: Integration) -> None:
        (example,) = re.findall(
            r"^```python\n(.*?)^```", (one.path / "README.md").read_text(), re.DOTALL | re.MULTILINE
        )
        taken = [
            name
            for module, names in imports(ast.parse(example))
            if module in packages(one)
            for name in names
        ]
        assert taken
        assert set(taken) <= exported(one)

    def test_model_has_the_same_name_everywhere(self, one: Integration) -> None:
        """A field with a framework's name is also set by `model`."""
        named = 0
        for file, tree in sources(one).items():
            for node in ast.walk(tree):
                if isinstance(node, ast.arg):
                    assert node.arg not in ("model_name", "model_id"), file
                    named += node.arg == "model"
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    is_model = node.target.id in ("model", "model_name", "model_id")
                    named += is_model
                    if is_model and node.target.id != "model":
                        assert "alias='model'" in ast.unparse(node), file
        assert named

    def test_its_claims_have_passed(self, one: Integration) -> None:
        assert set(one.classes) == exported(one)
        assert {form for forms in one.classes.values() for form in forms} <= set(FORMS)
        assert faults(one, results().get(one.folder)) == []
        for form in (*FORMS, "async", "serialisation"):
            shown = form in one.also or any(form in forms for forms in one.classes.values())
            assert shown or form in one.missing, f"{form} is neither shown nor said to be missing"
        for proof in one.proofs():
            file, *names = proof.split("::")
            path = one.path / "tests" / file
            tree = ast.parse(path.read_text())
            assert names[0] in {node.name for node in ast.walk(tree) if hasattr(node, "name")}, (
                proof
            )


def test_page_is_current() -> None:
    assert page() == PAGE.read_text(), "run python -m tools.integrations"
    assert [one.name for one in ALL if f"`{one.name}`" not in PAGE.read_text()] == []


def test_claim_that_nothing_shows_is_a_fault() -> None:
    one = ALL[0]
    result = results()[one.folder]
    assert faults(one, None) == [
        f"{one.name}: its tests have not passed: run make integrations ARGS={one.folder}"
    ]
    assert len(faults(one, result | {"passed": []})) == len(list(one.proofs()))
    assert faults(one, result | {"pins": {}}) == [
        f"{one.name}: its tests passed with versions other than the pinned ones"
    ]

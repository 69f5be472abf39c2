"""Checks of terraform/ that need only its text, without a provider."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from libs.queue.connection.acl import ROUTER, SCHEDULER, User
from tests.terraform.configuration import EXAMPLES, FILES, MODULES, TERRAFORM, blocks, read, values

GIVEN_TO_BOTH = {"accelerator", "capacity", "min", "max", "zones", "disk_gib", "reservation"}


@pytest.mark.parametrize("file", FILES)
def test_every_file_can_be_parsed(file: str) -> None:
    assert read(file)


def test_files_are_formatted() -> None:
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("terraform is not on the PATH")
    done = subprocess.run(
        [terraform, "fmt", "-check", "-recursive", "-diff", TERRAFORM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("module", MODULES)
def test_readme_lists_every_input_and_output(module: str) -> None:
    readme = (TERRAFORM / "modules" / module / "README.md").read_text()
    inputs, outputs = readme[readme.index("| input |") :].split("| output |")
    for table, kind in ((inputs, "variable"), (outputs, "output")):
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(
            blocks(f"modules/{module}", kind)
        )


@pytest.mark.parametrize(
    "folder", [*(f"modules/{name}" for name in MODULES), *(f"examples/{name}" for name in EXAMPLES)]
)
def test_inputs_and_outputs_have_descriptions(folder: str) -> None:
    for name, variable in blocks(folder, "variable").items():
        assert variable["description"], name
        assert variable["type"], name
        assert ("default" in variable and variable["default"] is None) or variable[
            "nullable"
        ] is False, name
    for name, output in blocks(folder, "output").items():
        assert output["description"], name


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_use_the_local_module_and_bind_the_providers_version(example: str) -> None:
    (module,) = blocks(f"examples/{example}", "module").values()
    assert module["source"] == f"../../modules/{example.partition('-')[0]}"
    (terraform,) = read(f"examples/{example}/versions.tf")["terraform"]
    (providers,) = terraform["required_providers"]
    for provider in providers.values():
        assert re.fullmatch(r"~> \d+\.\d+", provider["version"])


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name.startswith("gke-")])
def test_no_example_uses_a_redis_with_an_unverifiable_certificate(example: str) -> None:
    """Memorystore's certificate is the case: see the README of modules/gke. Once it can be
    verified, an example may use it again.
    """
    (module,) = blocks(f"examples/{example}", "module").values()
    assert "redis" not in module


def test_gpu_pools_of_both_clouds_are_described_alike() -> None:
    for module in MODULES:
        text = (TERRAFORM / "modules" / module / "variables.tf").read_text()
        (attributes,) = re.findall(
            r'variable "gpu_pools" {.*?map\(object\({\n(.*?)}\)\)', text, re.DOTALL
        )
        assert set(re.findall(r"^ +(\w+) +=", attributes, re.MULTILINE)) >= GIVEN_TO_BOTH


@pytest.mark.parametrize(("key", "user"), [("router", ROUTER), ("scheduler", SCHEDULER)])
def test_redis_users_have_exactly_our_permissions(key: str, user: User) -> None:
    ours = user.line("x").split()[4:]  # without the name and the password
    ours.remove("resetkeys")
    assert values("modules/eks")["redis_access"][key].split() == ["on", *ours]
    assert user.name == f"shoal-{key}"

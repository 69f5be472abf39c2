"""Modules and examples as Terraform itself sees them: `init`, `validate`, and the modules' own
tests against mocked providers.

Providers are read from a folder (`terraform providers mirror`) that SHOAL_TERRAFORM_PLUGINS names,
or from the registry if it says `registry`. Checks without their provider are skipped and say so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.terraform.configuration import EXAMPLES, MODULES, TERRAFORM

PLUGINS = os.environ.get("SHOAL_TERRAFORM_PLUGINS", "/opt/tf-plugins")
PROVIDERS = {"eks": "aws", "gke": "google"}
FROM_A_FOLDER = """\
provider_installation {
  filesystem_mirror {
    path = "%s"
  }
}
"""


@dataclass(frozen=True)
class Terraform:
    """Works on a copy, for `init` leaves files behind."""

    executable: str
    copy: Path
    environment: Mapping[str, str]

    def run(self, folder: str, *arguments: str) -> str:
        """Return the command's output. Fails the test if the command fails."""
        command = [self.executable, f"-chdir={self.copy / folder}", *arguments, "-no-color"]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Terraform:
    executable = shutil.which("terraform")
    if executable is None:
        pytest.skip("terraform is not on the PATH")
    folder = tmp_path_factory.mktemp("terraform")
    settings = folder / "terraform.rc"
    settings.write_text("" if PLUGINS == "registry" else FROM_A_FOLDER % PLUGINS)
    copy = shutil.copytree(
        TERRAFORM, folder / "copy", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*")
    )
    reported = {
        "TF_CLI_CONFIG_FILE": str(settings),
        "TF_IN_AUTOMATION": "1",
        "TF_INPUT": "0",
        "CHECKPOINT_DISABLE": "1",
    }
    return Terraform(executable, copy, os.environ | reported)


def needs_provider(cloud: str) -> None:
    provider = PROVIDERS[cloud]
    if (
        PLUGINS != "registry"
        and not Path(PLUGINS, "registry.terraform.io/hashicorp", provider).is_dir()
    ):
        pytest.skip(
            f"{PLUGINS} has no hashicorp/{provider}; SHOAL_TERRAFORM_PLUGINS=registry takes it "
            "from the registry"
        )


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_valid_and_pass_their_tests(terraform: Terraform, module: str) -> None:
    needs_provider(module)
    folder = f"modules/{module}"
    terraform.run(folder, "init", "-backend=false")
    terraform.run(folder, "validate")
    reported = terraform.run(folder, "test")
    runs = sum(
        len(re.findall(r"^run ", file.read_text(), re.MULTILINE))
        for file in (TERRAFORM / folder).glob("tests/*.hcl")
    )
    assert f"Success! {runs} passed, 0 failed." in reported


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_valid(terraform: Terraform, example: str) -> None:
    needs_provider(example.partition("-")[0])
    folder = f"examples/{example}"
    terraform.run(folder, "init", "-backend=false")
    terraform.run(folder, "validate")

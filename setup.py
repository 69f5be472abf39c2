"""Build the wheel, with `libs` and `services` in the folder `shoal_mesh/_code`.

The names `libs` and `services` are too common for a shared environment. Only processes of the mesh
have that folder on their path (services/local/installed, services/local/supervision/launch.py).

If this machine can compile the native kernels, the wheel contains their library as data. Where the
library does not load, torch's operators are used, so one wheel serves all machines.
"""

import runpy
import shutil
import sys
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

INSIDE = "shoal_mesh._code"
# Folders of data count as packages (PEP 420): setuptools warns of each that is not listed.
ours = find_namespace_packages(
    include=["libs*", "services*"],
    exclude=["libs.api*", "services.local.installed*", "*__pycache__*"],
)


class BuildWithKernels(build_py):
    """Compile the kernels, except for an editable install, which uses those of `make native`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            kernels = runpy.run_path("libs/kernels/native/build.py")
            folder = Path(self.build_lib, *INSIDE.split("."), "libs/kernels/native")
            made = kernels[
                "library"
            ]()  # by its name of these very sources, if it is there (`make native`)
            try:
                if made.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    shutil.copy(made, folder)
                else:
                    kernels["build"](folder)
            except kernels["CannotBuild"] as error:
                print(f"the wheel has no native kernels: {error}", file=sys.stderr)


setup(
    cmdclass={"build_py": BuildWithKernels},
    packages=["shoal_mesh", *(f"{INSIDE}.{name}" for name in ours)],
    package_dir={
        "shoal_mesh": "services/local/installed",
        f"{INSIDE}.libs": "libs",
        f"{INSIDE}.services": "services",
    },
    package_data={
        f"{INSIDE}.libs.catalog": ["*.yaml", "*.json"],
        f"{INSIDE}.libs.catalog.models": ["*.yaml"],
        **{
            f"{INSIDE}.{name}": ["*"]
            for name in ours
            if name.startswith("libs.kernels.native.source.")
        },
        f"{INSIDE}.libs.aliases.lua": ["*.lua"],
        f"{INSIDE}.libs.fleet.lua": ["*.lua"],
        f"{INSIDE}.libs.queue.lua": ["*.lua"],
        f"{INSIDE}.services.edge.console.static": ["*"],
        f"{INSIDE}.services.edge.console.static.vendor": ["*"],
        f"{INSIDE}.services.edge.console.static.views": ["*"],
        f"{INSIDE}.services.edge.reference.static": ["*"],
        f"{INSIDE}.services.edge.reference.static.vendor": ["*"],
    },
)

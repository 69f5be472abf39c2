"""Where modules lie in a wheel: all of `libs` and `services` below `shoal_mesh/_code`, out of the way of what others install.

The names `libs` and `services` are too common to be anybody's in a shared environment. Only processes of the mesh have that folder
on their path (services/local/installed, services/local/supervision/launch.py).
"""

from setuptools import find_packages, setup

INSIDE = "shoal_mesh._code"
ours = find_packages(include=["libs*", "services*"], exclude=["libs.api*", "services.local.installed*"])

setup(
    packages=["shoal_mesh", *(f"{INSIDE}.{name}" for name in ours)],
    package_dir={"shoal_mesh": "services/local/installed", f"{INSIDE}.libs": "libs", f"{INSIDE}.services": "services"},
    package_data={
        f"{INSIDE}.libs.catalog": ["*.yaml", "*.json", "models/*.yaml"],
        f"{INSIDE}.libs.fleet": ["lua/*.lua"],
        f"{INSIDE}.libs.queue": ["lua/*.lua"],
    },
)

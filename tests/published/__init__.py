"""Published weights of the Hugging Face hub, fetched by Shoal's store and served by a mesh, against
their own packages.

`make test ARGS='--published tests/published'` runs them (CONTRIBUTING.md); `test_machinery.py` is
the same with tiny models and a fake hub, and is part of every run.
"""

import pytest

# Their assertions show what differs.
pytest.register_assert_rewrite("tests.published.generation", "tests.published.encoders")

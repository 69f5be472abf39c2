"""Everything shipped has an allowed licence; a licence that is not allowed or not declared is
reported with its distribution.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.supply.made import write_distribution
from tools.distributions import installed_distributions
from tools.supply.licences import UNKNOWN, forbidden, is_allowed, read_licence

GPL = "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"
MIT = "Classifier: License :: OSI Approved :: MIT License"


@pytest.mark.parametrize(
    ("says", "licence", "allowed"),
    [
        (["License-Expression: MIT"], "MIT", True),
        (["License-Expression: GPL-3.0-only OR Apache-2.0"], "GPL-3.0-only OR Apache-2.0", True),
        (
            ["License-Expression: Apache-2.0 WITH LLVM-exception AND (MIT OR ISC)"],
            "Apache-2.0 WITH LLVM-exception AND (MIT OR ISC)",
            True,
        ),
        (["License-Expression: MIT AND GPL-3.0-only"], "MIT AND GPL-3.0-only", False),
        (["License-Expression: AGPL-3.0-or-later"], "AGPL-3.0-or-later", False),
        ([MIT], "MIT", True),
        ([MIT, "License: AGPL-3.0"], "MIT", True),
        ([MIT, f"Classifier: {GPL}"], UNKNOWN, False),
        (
            ["Classifier: License :: OSI Approved", "License: Apache License, Version 2.0"],
            "Apache-2.0",
            True,
        ),
        (["License: BSD"], "BSD-3-Clause", True),
        (["License: ask our lawyers"], UNKNOWN, False),
        (["License-Expression: LicenseRef-Proprietary"], UNKNOWN, False),
        ([], UNKNOWN, False),
    ],
)
def test_licence_is_read_from_metadata(
    tmp_path: Path, says: list[str], licence: str, allowed: bool
) -> None:
    write_distribution(tmp_path, "some", says=says)
    found = read_licence(installed_distributions([tmp_path])["some"])
    assert (found, is_allowed(found)) == (licence, allowed)


def test_those_that_may_not_be_shipped_are_named(tmp_path: Path) -> None:
    write_distribution(tmp_path, "shoal")
    write_distribution(tmp_path, "good", says=["License-Expression: MIT"])
    write_distribution(tmp_path, "viral", says=["License-Expression: GPL-3.0-only"])
    write_distribution(tmp_path, "silent")
    assert forbidden(installed_distributions([tmp_path])) == {
        "viral": "GPL-3.0-only",
        "silent": UNKNOWN,
    }

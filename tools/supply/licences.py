"""`python -m tools.supply.licences [--all]`: check the licences of shipped distributions.

By their metadata, all distributions that the images and the client install must have a licence of
ALLOWED; any other or missing licence is an error. --all lists those of development, too. Metadata
covers a distribution's own code: libraries bundled in a wheel (libgomp in torch's, openblas in
numpy's) are named in its licence files, which this script does not read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution

from license_expression import AND, ExpressionError, LicenseSymbol, get_spdx_licensing

from tools.distributions import OURS, ROLES, closure, installed_distributions

ALLOWED = frozenset(
    {
        "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "MIT", "MIT-0", "MIT-CMU", "BSD-2-Clause",
        "BSD-3-Clause", "0BSD", "ISC",
        "PSF-2.0", "Python-2.0", "MPL-2.0", "Zlib", "BSL-1.0", "CC0-1.0", "Unlicense",
    }
)  # fmt: skip
# Licence names in metadata older than SPDX expressions, in lower case and without "license".
# "BSD" is one of two licences, both allowed.
OTHER_WORDS: Mapping[str, str] = {
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache version 2.0": "Apache-2.0",
    # pypdfium2's two licences. Those of PDFium's dependencies, all permissive, are in the wheel.
    "bsd-3-clause apache-2.0 dependency s": "BSD-3-Clause AND Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "isc": "ISC",
    "isc (iscl)": "ISC",
    "mit": "MIT",
    "mozilla public 2.0 (mpl 2.0)": "MPL-2.0",
    "psfl": "PSF-2.0",
    "python software foundation": "PSF-2.0",
}
UNKNOWN = "unknown"
_SPDX = get_spdx_licensing()


def read_licence(distribution: Distribution) -> str:
    """Return the SPDX expression of a distribution, or "unknown".

    The source is License-Expression, else the classifiers, else the License field.
    """
    metadata = distribution.metadata
    classifiers = [
        one.rpartition(" :: ")[2]
        for one in metadata.get_all("Classifier") or ()
        if one.startswith("License ::")
    ]
    words = [word for word in classifiers if word != "OSI Approved"]
    for said in (metadata.get_all("License-Expression"), words, metadata.get_all("License")):
        if said:
            found = [_expression(one) for one in said]
            return UNKNOWN if UNKNOWN in found else " AND ".join(dict.fromkeys(found))
    return UNKNOWN


def _expression(words: str) -> str:
    known = OTHER_WORDS.get(re.sub(r"[\s,]+", " ", words.lower().replace("license", "")).strip())
    if known:
        return known
    try:
        return str(_SPDX.parse(words, validate=True)) or UNKNOWN
    except ExpressionError:
        return UNKNOWN


def is_allowed(expression: str) -> bool:
    """Return True if all licences of an AND, or one of an OR, are allowed."""
    return expression != UNKNOWN and _holds(_SPDX.parse(expression))


def _holds(part: LicenseSymbol) -> bool:
    if not part.args:
        return str(part) in ALLOWED
    return (all if isinstance(part, AND) else any)(_holds(one) for one in part.args)


def forbidden(shipped: Mapping[str, Distribution]) -> dict[str, str]:
    """Return the distributions that must not be shipped, with their licences."""
    found = {name: read_licence(one) for name, one in sorted(shipped.items()) if name not in OURS}
    return {name: licence for name, licence in found.items() if not is_allowed(licence)}


def main() -> int:
    installed = installed_distributions()
    shipped = closure(ROLES.values(), installed)
    wrong = [
        f"{name}, which {asker} needs, is not installed: its licence is unknown"
        for name, asker in shipped.missing.items()
    ]
    wrong += [
        (
            f"{name} is shipped and its licence is {licence}: replace it, or add the licence to "
            "ALLOWED in tools/supply/licences.py"
        )
        for name, licence in forbidden(shipped.installed).items()
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    if "--all" in sys.argv[1:]:
        for name, one in sorted(installed.items()):
            print(
                f"{name:32} {one.version:20} "
                f"{'shipped' if name in shipped.installed else 'only here':10} "
                f"{read_licence(one)}"
            )
    if not wrong:
        print(f"{len(shipped.installed)} shipped distributions have allowed licences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

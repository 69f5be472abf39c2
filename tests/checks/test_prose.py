"""The checker of names and sentences finds each kind of fault, and leaves code and data alone."""

from __future__ import annotations

import pytest

from tools import prose


def rules(path: str, source: str) -> list[str]:
    read = prose._READERS[path[path.rindex(".") :]]
    return [finding.rule for finding in read(path, source)]


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("a.py", "# The client is told.\n", "report"),
        ("a.py", 'X = f"{a} comes from {b}"\n', "arrive"),
        ("a.py", 'def read():\n    """Of each item, its text."""\n', "fragment"),
        ("a.py", 'MAX_BYTES = 3\n"""Of a file."""\n', "fragment"),
        ("a.py", '"""How requests are read."""\n', "fragment"),
        (
            "a.py",
            'def read(size: int):\n    """Read.\n\n    Args:\n        most: Bytes.\n    """\n',
            "unknown parameter",
        ),
        ("a.py", "def look(self): ...\n", "generic function name"),
        ("a.py", "MOST_ITEMS = 3\n", "constant"),
        ("tests/test_a.py", "def test_what_is_lost_returns(): ...\n", "test name"),
        ("tests/test_a.py", "def test_card_can_be_told(): ...\n", "test name"),
        ("a.md", "The model whose name is known.\n", "two sentences"),
        ("a.md", "A pool is no queue.\n", "is not a"),
        ("a.lua", "local n = 1 -- what is left of it\n", "the noun itself"),
        ("a.proto", "// Pages, read as pictures.\n", "image"),
        ("a.cpp", "int rows = 3;  // of so many rows\n", "the number"),
        ("a.h", "// The keys come in blocks.\n", "arrive"),
    ],
)
def test_fault_is_found(path: str, source: str, rule: str) -> None:
    (found,) = rules(path, source)
    assert rule in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("a.py", 'X = {"told": 1}\n'),
        (
            "a.py",
            'def read(*, most=1):\n    """Read.\n\n    Args:\n        most: Bytes.\n    """\n',
        ),
        (
            "a.py",
            'class A:\n    """One.\n\n    Attributes:\n        end: Seconds.\n    """\n\n'
            "    def __init__(self):\n        self.end = 1\n",
        ),
        ("a.py", "# See `told` and https://example.com/what-is-new.\n"),
        ("tests/test_a.py", 'TEXT = "somebody told nobody"\n'),
        ("a.md", "```\nwhose\n```\n"),
        ("a.md", "The flag `--lately` is set.\n"),
        ("a.lua", "local told = 1 -- Count the items.\n"),
        ("a.h", "int told = 1;  // Count the items.\n"),
    ],
)
def test_code_and_data_are_not_read(path: str, source: str) -> None:
    assert rules(path, source) == []


def test_finding_names_the_line_of_a_long_string() -> None:
    source = '"""Return it.\n\nThe rest is told.\n"""\n'
    (finding,) = prose.python_findings("a.py", source)
    assert finding.line == 3


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("Read a file once", True),
        ("Bring numbers to the device, in one copy", True),
        ("Serve static embedders: Model2Vec", True),
        ("Added a file", False),
        ("Reading files", False),
        ("docs: read files", False),
        ("Read a file.", False),
        ("Return what it has", False),
        ("Read " + "a " * 40 + "file", False),
    ],
)
def test_commit_subject_is_a_short_imperative(subject: str, is_good: bool) -> None:
    assert (list(prose.subject_findings("0", subject)) == []) == is_good

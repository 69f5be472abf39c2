"""`python -m tools.prose [--count] [PATH ...]`: check names and sentences against the style rules.

This is part of `make check`. It reads comments, docstrings and messages of Python files, comments
of C++, JavaScript, Lua, proto and YAML files, and the sentences of Markdown pages, not their tables
and headings. In tests, string literals are data and are not read. Code in backticks and fenced
blocks is skipped. The parameters that a docstring lists must exist.

A line that must keep such a word (a quotation, a third party's text) is listed in `_ALLOWED`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
MAX_ALLOWED: Final = 30
MAX_SUBJECT_CHARACTERS: Final = 72

_WORDS: Final = {
    r"told|tells?|telling": "report, return, log, stream or distinguish",
    r"comes?|came|coming": "arrive, start, return or receive",
    r"what (?:is|are|was|were|it|they|an?|the)\b": "the noun itself",
    r"somebody|nobody|everybody|somebody's|nobody's|everybody's": "a client, a caller, no worker",
    r"so (?:many|much|long)\b": "the number, the limit, the duration",
    r"anew": "again",
    r"meanwhile": "while …",
    r"lately": "recently",
    r"besides?": "next to, in addition to",
    r"whose": "two sentences",
    r"mend(?:s|ed|ing)?": "fix",
    r"pictures?": "image",
    r"(?:takes?|took|taking) the places? of": "replace",
    r"of (?:(?:its|their|our|his|your) own|ours|theirs)": "its, our, their",
    r"there (?:is|are|was|were) no\b": "no … exists",
    r"(?:is|are) no (?!longer\b|more\b|less\b|\w+er\b|worse\b)\w+": "is not a",
}
_PATTERN: Final = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{words})\b)" for number, words in enumerate(_WORDS)),
    re.IGNORECASE,
)
_ADVICE: Final = list(_WORDS.values())
_FRAGMENT: Final = re.compile(
    r"(?:Of|What|How|As|Where|Which|Whose|Those|Whether|That|For|From|By|To|With|In|On|At|So) "
    r"|[a-z]"
)
"""First words of a docstring that continue the function's name instead of making a sentence."""
_ATTRIBUTE_FRAGMENT: Final = re.compile(
    r"(?:Of|What|How|As|Where|Which|Whose|Those|That|For|From|By|To|With|In|On|At|So|When|Until) "
)
"""First words of a module's or an attribute's docstring that are not a sentence or a noun."""
_TEST_NAME: Final = re.compile(
    r"test_(?:an?|the|what|how|that|which|whose)_"
    r"|test_.*_(?:told|tells?|comes?|came|coming|anew|besides?|whose|nobody|somebody|pictures?)(?:_|$)"
)
_SUBJECT: Final = re.compile(
    r"(?!(?!Bring|Embed|Feed|Seed|Speed)\w+(?:ed|ing)\b)[A-Z][a-z]+,? .*[^.]"
)
"""A commit's subject: begins with a verb in its base form, and not with an area and a colon."""
_CONSTANT: Final = re.compile(r"_?(?:MOST|LEAST|LONGEST|SHORTEST|FEWEST)(?:_|$)")
_GENERIC: Final = frozenset(
    ["of", "by", "look", "come", "comes", "told", "tell", "answer", "go_on", "between", "at_once"]
)
_SECTION: Final = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
_ARGUMENT: Final = re.compile(r"^ {4}(\w+):", re.MULTILINE)
"""An entry of such a section of a docstring without its indentation."""
_CODE: Final = re.compile(r"``[^`]+``|`[^`]*`|https?://\S+|<!--.*?-->")
_FIELD: Final = re.compile(r"\{[^{}]*\}")
"""An expression in an f-string."""
_GENERATED: Final = re.compile(
    r"pb2|^tools/prose.py|^libs/api/shoal/v1/|^docs/reference/|recorded\.json"
)
_ALLOWED: Final[frozenset[tuple[str, str]]] = frozenset(
    [
        ("README.md", "(docs/coming-from.md)"),
        ("benchmarks/mesh/throughput.py", "what is a generator expression"),  # a query
        ("benchmarks/models/attention.py", "what is the best way to store"),  # a query
        ("libs/conversion/tensors.py", "whose module"),  # a message of torch
        ("libs/models/readers/florence_tasks.py", "What is the"),  # prompts of Florence-2
        ("libs/models/readers/florence_tasks.py", "what is shown"),
    ]
)
"""Pairs of a file and a part of the line, with the reason."""

Reader = Callable[[str, str], "Iterator[Finding]"]
"""Takes a path and the file's text."""


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text.strip()[:120]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.add_argument("paths", nargs="*", help="files or folders; the whole repository if none")
    parser.add_argument("--count", action="store_true", help="print findings by folder and rule")
    parser.add_argument("--commits", metavar="RANGE", help="check commit subjects, as main..HEAD")
    options = parser.parse_args(arguments)
    if len(_ALLOWED) > MAX_ALLOWED:
        sys.exit(f"{len(_ALLOWED)} exceptions are listed; at most {MAX_ALLOWED} are allowed")
    found = sorted(findings(options.paths))
    if options.commits:
        found += commit_findings(options.commits)
    if options.count:
        for (folder, rule), count in sorted(
            Counter(("/".join(f.path.split("/")[:2]), f.rule) for f in found).items()
        ):
            print(f"{count:6} {folder:28} {rule}")
    else:
        print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(found)} findings", file=sys.stderr)
    sys.exit(bool(found))


def findings(paths: Iterable[str] = ()) -> Iterator[Finding]:
    """Check the tracked files below `paths`, or every tracked file."""
    for path in _tracked(paths):
        if _GENERATED.search(path) or not (ROOT / path).is_file():
            continue
        read = _READERS.get(Path(path).suffix)
        if read is None:
            continue
        for finding in read(path, (ROOT / path).read_text("utf-8")):
            if not any(path == file and part in finding.text for file, part in _ALLOWED):
                yield finding


def commit_findings(commits: str) -> Iterator[Finding]:
    """Check the subjects of a range of commits; merges are exempt."""
    for line in _git("log", "--no-merges", "--format=%h %s", commits).splitlines():
        commit, _, subject = line.partition(" ")
        yield from subject_findings(commit, subject)


def subject_findings(commit: str, subject: str) -> Iterator[Finding]:
    """Check the length, the first word and the words of a commit's subject."""
    if len(subject) > MAX_SUBJECT_CHARACTERS or not _SUBJECT.fullmatch(subject):
        yield Finding(commit, 0, "commit subject", subject)
    yield from _word_findings(commit, 0, subject)


def python_findings(path: str, source: str) -> Iterator[Finding]:
    tree = ast.parse(source)
    is_test = path.startswith("tests/") or "/tests/" in path
    docstrings = _docstring_lines(tree)
    for node in ast.walk(tree):
        yield from _name_findings(path, node, is_test=is_test)
        yield from _docstring_findings(path, node)
        yield from _argument_findings(path, node)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _word_findings(path, token.start[0], token.string)
        elif token.type == tokenize.STRING:
            is_docstring = token.start[0] in docstrings
            if is_docstring or (not is_test and " " in token.string):
                text = token.string if is_docstring else _FIELD.sub(_blank, token.string)
                yield from _word_findings(path, token.start[0], text)


def markdown_findings(path: str, source: str) -> Iterator[Finding]:
    is_fenced = False
    for number, line in enumerate(source.split("\n"), start=1):
        if line.lstrip().startswith(("```", "~~~")):
            is_fenced = not is_fenced
        elif not is_fenced and not line.lstrip().startswith(("|", "#")):
            yield from _word_findings(path, number, line)


def comment_findings(mark: str) -> Reader:
    def read(path: str, source: str) -> Iterator[Finding]:
        for number, line in enumerate(source.split("\n"), start=1):
            _, found, comment = line.partition(mark)
            if found:
                yield from _word_findings(path, number, comment)

    return read


def _word_findings(path: str, line: int, text: str) -> Iterator[Finding]:
    shown = _CODE.sub(_blank, text)
    lines = text.split("\n")
    for match in _PATTERN.finditer(shown):
        group = match.lastgroup or "w0"
        row = shown.count("\n", 0, match.start())
        rule = f"write {_ADVICE[int(group[1:])]!r} for {match[0].lower()!r}"
        yield Finding(path, line + row, rule, lines[row])


def _blank(code: re.Match[str]) -> str:
    return " " * len(code[0])


def _name_findings(path: str, node: ast.AST, *, is_test: bool) -> Iterator[Finding]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if is_test and _TEST_NAME.match(node.name):
            yield Finding(path, node.lineno, "test name", node.name)
        if not is_test and node.name.lstrip("_") in _GENERIC:
            yield Finding(path, node.lineno, "generic function name", node.name)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and _CONSTANT.match(target.id):
                yield Finding(path, node.lineno, "constant begins with MAX_ or MIN_", target.id)


def _docstring_findings(path: str, node: ast.AST) -> Iterator[Finding]:
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    is_named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    for before, statement in zip([None, *body], body, strict=False):
        text = _string(statement)
        if not text:
            continue
        if before is None:
            fragment = _FRAGMENT if is_named else _ATTRIBUTE_FRAGMENT
        elif isinstance(before, (ast.Assign, ast.AnnAssign)):
            fragment = _ATTRIBUTE_FRAGMENT
        else:
            continue
        if fragment.match(text):
            line = text.split("\n", 1)[0]
            yield Finding(path, statement.lineno, "docstring is a fragment", line)


def _argument_findings(path: str, node: ast.AST) -> Iterator[Finding]:
    """Check that `Args:` and `Attributes:` name parameters and attributes, because a rename does
    not change docstrings.
    """
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for section in _SECTION.finditer(ast.get_docstring(node) or ""):
        known = {name for inner in ast.walk(node) for name in _bound_names(inner)}
        for name in _ARGUMENT.findall(section[1]):
            if name not in known and "kwargs" not in known:
                yield Finding(path, node.lineno, "docstring names an unknown parameter", name)


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the parameters, variables, attributes and functions that a node defines."""
    if isinstance(node, ast.arguments):
        for parameter in (*node.posonlyargs, *node.args, *node.kwonlyargs, node.vararg):
            if parameter is not None:
                yield parameter.arg
        if node.kwarg is not None:
            yield "kwargs"
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name


def _string(statement: ast.stmt) -> str:
    """Return the string that a statement consists of, as a docstring does."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the first lines of strings that are statements: docstrings of any kind."""
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _tracked(paths: Iterable[str]) -> list[str]:
    return sorted(set(_git("ls-files", "--", *paths).splitlines()))


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


_READERS: Final[dict[str, Reader]] = {
    ".py": python_findings,
    ".md": markdown_findings,
    ".cpp": comment_findings("//"),
    ".h": comment_findings("//"),
    ".js": comment_findings("//"),
    ".lua": comment_findings("--"),
    ".proto": comment_findings("//"),
    ".yaml": comment_findings("#"),
    ".yml": comment_findings("#"),
}

if __name__ == "__main__":
    main()

"""`python -m tools.references`: check that files and headings named in pages, docstrings and
comments exist.

Part of `make check`. Checked are: links of pages, to files of this repository and their headings
(GitHub's anchors); paths in backticks, which may be the end of a path; and bare file names of the
kinds in _OURS. Web addresses and fenced code are not checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_OURS: Final = ("py", "md", "lua", "proto")
"""Extensions of bare names that are checked; not .json: `config.json` is a checkpoint's."""
_KINDS: Final = (*_OURS, "yaml", "toml", "sh", "tf")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_PATH: Final = re.compile(r"(?<![`\w])`([A-Za-z0-9_.][A-Za-z0-9_./-]*)`(?!`)")
_TOPS: Final = "libs|services|tests|docs|tools|benchmarks|k8s|protos|examples"
_PLAIN: Final = re.compile(rf"(?<![\w/.`(-])((?:{_TOPS})/[a-z0-9_/-]+\.(?:py|md|lua|yaml|proto))\b")
_FENCE: Final = re.compile(r"^(`{3,}|~{3,}).*?^\1", re.MULTILINE | re.DOTALL)
_MADE: Final = (
    "tests/support/texts.txt",  # texts to embed, an old copy
    "CHANGELOG.md",  # names removed files, too
    "services/scheduler/externalscaler/externalscaler_pb2.py",  # made by protoc
    "services/edge/teiv1/tei_pb2.py",
)


def main() -> None:
    found = list(dead(tracked_files()))
    for fault in found:
        print(fault)
    if found:
        sys.exit(1)
    print("all files and headings referred to exist")


def dead(files: frozenset[str], root: Path = ROOT) -> Iterator[str]:
    """Yield references to missing targets, each as `file:line: reference`.

    Args:
        files: The repository's files, relative to `root`.
    """
    names = frozenset(PurePosixPath(file).name for file in files)
    folders = frozenset(str(parent) for file in files for parent in PurePosixPath(file).parents)
    for file in sorted(files):
        if file in _MADE or not file.endswith((".md", ".py")):
            continue
        here = PurePosixPath(file).parent
        for line, text in _prose(root / file):
            for kind, target in _references(text, is_page=file.endswith(".md")):
                if kind == "link" and not _is_linked(
                    target, PurePosixPath(file), files, folders, root
                ):
                    yield f"{file}:{line}: no file or heading {target}"
                elif kind == "path" and not _exists(target, here, files, folders, names):
                    yield f"{file}:{line}: no file {target}"


def _references(text: str, *, is_page: bool) -> Iterator[tuple[str, str]]:
    if is_page:
        for found in _LINK.finditer(text):
            if not re.match(r"[a-z]+:", found[1]):
                yield "link", found[1]
    paths = [
        found[1]
        for found in _PATH.finditer(text)
        if found[1].rpartition(".")[2] in (_KINDS if "/" in found[1] else _OURS)
    ]
    yield from (
        ("path", path)
        for path in dict.fromkeys([*paths, *(found[1] for found in _PLAIN.finditer(text))])
    )


def _exists(
    target: str,
    here: PurePosixPath,
    files: frozenset[str],
    folders: frozenset[str],
    names: frozenset[str],
) -> bool:
    if "/" not in target:
        return target in names or target.startswith(".")
    is_here = any(
        str(base / target) in files or str(base / target) in folders
        for base in (PurePosixPath(), here, *here.parents)
    )
    return is_here or any(file.endswith(f"/{target}") for file in files)


def _is_linked(
    target: str, page: PurePosixPath, files: frozenset[str], folders: frozenset[str], root: Path
) -> bool:
    path, _, heading = target.partition("#")
    at = _plain(page.parent / path) if path else str(page)
    if at not in files:
        return not heading and at in folders
    return not heading or not at.endswith(".md") or heading in _headings(root / at)


def _plain(path: PurePosixPath) -> str:
    """Without `..`."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts) or "."


@cache
def _headings(page: Path) -> frozenset[str]:
    """GitHub's anchors: lower case, without punctuation, spaces as hyphens; a repeated one is
    numbered.
    """
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(
        r"^#{1,6} +(.+?) *#*$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE
    ):
        slug = re.sub(
            r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        ).replace(" ", "-")
        anchors.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return frozenset(anchors)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a page outside of fences; docstrings and comments of a module."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        shown = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
        yield from enumerate(shown.splitlines(), 1)
        return
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        if token.type == tokenize.COMMENT or is_docstring:
            yield from enumerate(token.string.splitlines(), token.start[0])
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type


def tracked_files() -> frozenset[str]:
    """Return the repository's files, relative to ROOT, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return frozenset(file for file in listed.splitlines() if (ROOT / file).is_file())


if __name__ == "__main__":
    main()

"""Finds the files of a job's input: a file, the files that a pattern matches, or those below a
folder.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Final, Literal

from shoal.bulk.failures import JobError
from shoal.bulk.places import detect_url_kind, found_below, local_path, read_file_version
from shoal.bulk.spec import InputFile, InputVersion

MAX_INPUT_FILES: Final = 10_000
DELIMITERS: Final[Mapping[str, str]] = {".csv": ",", ".tsv": "\t"}
"""The separator of the cells of a table with a header, by the suffix of its file."""
InputFormat = Literal["Parquet", "JSON lines", "CSV"]
_FORMATS: Final[Mapping[str, InputFormat]] = {
    ".parquet": "Parquet",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    **dict.fromkeys(DELIMITERS, "CSV"),
}
_SUFFIXES: Final = tuple(_FORMATS)


def find_input(uri: str) -> InputVersion:
    """Return the files of an input as they are now, sorted by name. Raises JobError."""
    files = _files(uri)
    if not files:
        raise JobError(f"the input {uri} has no files that end in {', '.join(_SUFFIXES)}")
    if len(files) > MAX_INPUT_FILES:
        raise JobError(
            f"the input {uri} has {len(files):,} files, and at most {MAX_INPUT_FILES:,} are "
            "allowed: run several jobs, or merge files"
        )
    formats = sorted({detect_format(file.uri) for file in files})
    if len(formats) > 1:
        raise JobError(
            f"the input {uri} has files of several formats, {' and '.join(formats)}: name those of "
            "one by a pattern such as docs/*.parquet"
        )
    tag = files[0].tag if [file.uri for file in files] == [uri] else _digest(files)
    return InputVersion(uri, sum(file.size for file in files), tag, tuple(files))


def detect_format(uri: str) -> InputFormat:
    """Return the format of a file by its suffix. Raises JobError for another suffix."""
    for suffix, name in _FORMATS.items():
        if uri.lower().endswith(suffix):
            return name
    raise JobError(f"the input {uri} must end in {', '.join(_SUFFIXES)}")


def _files(uri: str) -> list[InputFile]:
    path = local_path(uri)
    if path is None:
        return _objects(uri)
    if path.is_dir():
        root, found = uri.rstrip("/"), (one for one in path.rglob("*") if one.is_file())
    elif path.exists() or not glob.has_magic(uri):
        return [read_file_version(uri)]
    else:
        base, pattern = _divided(path)
        # `**` follows links: a file that has several names is read once, by the shortest of them.
        names = [base / name for name in glob.glob(pattern, root_dir=base, recursive=True)]
        names.sort(key=lambda name: (len(name.parts), name), reverse=True)
        # It names its files, so that those of another format are an error.
        files = {name.resolve(): name for name in names if name.is_file()}.values()
        return _sorted(map(read_file_version, map(str, files)), str(base))
    return _readable(_sorted(map(read_file_version, map(str, found)), root))


def _objects(uri: str) -> list[InputFile]:
    """Return the files of an input in an object store."""
    kind = (
        detect_url_kind(uri)
        if glob.has_magic(uri) or uri.lower().endswith(_SUFFIXES)
        else "directory"
    )
    if kind == "file":  # Also one with `[` in its name.
        return [read_file_version(uri)]
    if glob.has_magic(uri) and kind != "directory":
        return _sorted(found_below(uri, is_pattern=True), _fixed(uri))
    if kind == "":
        return [read_file_version(uri)]  # It raises the error of a missing file.
    return _readable(_sorted(found_below(uri, is_pattern=False), uri.rstrip("/")))


def _sorted(files: Iterable[InputFile], root: str) -> list[InputFile]:
    """Return the visible files below a folder, by name."""
    found = sorted(files, key=lambda file: file.uri)
    return [file for file in found if _is_visible(file.uri.removeprefix(root))]


def _readable(files: list[InputFile]) -> list[InputFile]:
    return [file for file in files if file.uri.lower().endswith(_SUFFIXES)]


def _divided(path: Path) -> tuple[Path, str]:
    """Return the folder of a local pattern, and the rest of it. An existing folder is not part of
    the pattern, even if it has brackets in its name.
    """
    parts = path.absolute().parts
    base = Path(parts[0])
    for index, part in enumerate(parts[1:], 1):
        if not (base / part).is_dir():
            return base, "/".join(parts[index:])
        base /= part
    return base, "*"


def _fixed(pattern: str) -> str:
    """Return the folders of a URL before the first one with a wildcard."""
    folders = pattern.split("/")
    first = next(index for index, name in enumerate(folders) if glob.has_magic(name))
    return "/".join(folders[:first])


def _is_visible(path: str) -> bool:
    """Return False for files such as `_SUCCESS`, and for those of hidden folders."""
    return not any(part.startswith((".", "_")) for part in path.split("/") if part)


def _digest(files: list[InputFile]) -> str:
    content = json.dumps([astuple(file) for file in files]).encode()
    return f"files:{hashlib.sha256(content).hexdigest()}"


def changed_file(then: InputVersion) -> tuple[InputFile, InputFile | None] | None:
    """Return the first file of an input that has changed or is gone, and its state now; None if
    none has. Files that were added since do not count. Raises JobError.

    Files that the input does not match are gone, so that a manifest cannot name any others.
    """
    if [file.uri for file in then.files] == [then.uri]:
        now = {then.uri: read_file_version(then.uri)}
    else:
        now = {file.uri: file for file in _files(then.uri)}
    changed = (file for file in then.files if now.get(file.uri) != file)
    return next(((file, now.get(file.uri)) for file in changed), None)

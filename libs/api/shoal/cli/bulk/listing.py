"""Finds the jobs below a folder or a URL, and prints them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

from rich.text import Text

from shoal.bulk.failures import JobError, StorageError
from shoal.bulk.manifest import MANIFEST, load
from shoal.bulk.places import entries, local_path, place
from shoal.cli.bulk.running import format_time, rows_of_total, summary
from shoal.cli.console import counted, emit, note, show, table

MAX_LISTED_JOBS: Final = 1000
MAX_LISTED_FOLDERS: Final = 10_000


@dataclass(slots=True)
class FoundJobs:
    """The jobs below a location.

    Attributes:
        jobs: The summaries of their manifests, the newest change first.
        unusable: Why manifests that cannot be read, or are not of a job, were skipped.
        unlisted: Why folders that cannot be listed were skipped.
        limit: The limit that ended the search; empty if everything was searched.
    """

    jobs: list[dict[str, Any]] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    limit: str = ""


def find_jobs(uri: str) -> FoundJobs:
    """Return the jobs in a location and in the folders below it, but not in hidden folders.

    Folders are searched level by level. Raises StorageError if the location cannot be listed.
    """
    found, waiting = FoundJobs(), deque([uri])
    for _ in range(MAX_LISTED_FOLDERS):
        if not waiting:
            break
        folder = waiting.popleft()
        try:
            listed = entries(folder)
        except StorageError as error:
            if folder == uri:
                raise
            found.unlisted.append(str(error))
            continue
        if listed is None:
            if folder == uri:
                raise StorageError(f"{uri} does not exist")
            continue  # Deleted since its parent was listed.
        files, folders = listed
        if MANIFEST in files:
            if len(found.jobs) == MAX_LISTED_JOBS:
                found.limit = counted(MAX_LISTED_JOBS, "job")
                break
            _add(found, folder)
        waiting.extend(_join(folder, name) for name in folders if not name.startswith("."))
    else:
        if waiting:
            found.limit = counted(MAX_LISTED_FOLDERS, "folder")
    found.jobs.sort(key=itemgetter("updated_at"), reverse=True)
    return found


def print_jobs(uri: str, found: FoundJobs, *, as_json: bool) -> None:
    """Print jobs to stdout, and to stderr why the list may be incomplete."""
    if as_json:
        emit(found.jobs)
    elif not found.jobs:
        show(Text(f"no jobs in {uri} or below: shoal job run --output FOLDER makes one"))
    else:
        made = table(
            "", "output", "state", "rows", "failed", "model", "changed", right=("rows", "failed")
        )
        for job in found.jobs:
            counts = job["counts"]
            made.add_row(
                job["output"],
                job["state"],
                rows_of_total(counts["rows"], counts["total_rows"]),
                f"{counts['failed_rows']:,}",
                job["recipe"]["model"],
                format_time(job["updated_at"]),
            )
        show(made)
    if found.limit:
        note(f"the search ended after {found.limit}: list a folder below {uri} to see the others")
    for reasons, noun in ((found.unlisted, "folder"), (found.unusable, "manifest")):
        if reasons:
            note(f"skipped {counted(len(reasons), noun)}; the first: {reasons[0]}")


def _add(found: FoundJobs, folder: str) -> None:
    where = place(folder)
    try:
        manifest = load(where)
    except JobError as error:
        found.unusable.append(str(error))
        return
    if manifest is not None:
        found.jobs.append(summary(where, manifest))


def _join(folder: str, name: str) -> str:
    path = local_path(folder)
    if path is not None:
        return str(path / name)
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"

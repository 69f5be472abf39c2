"""Locations that clients name must be below one of the operator's roots."""

from __future__ import annotations

from pathlib import Path

import pytest
from shoal.bulk.failures import JobError

from services.edge.jobs import roots


@pytest.mark.parametrize(
    ("root", "is_valid"),
    [
        ("/data/jobs", True),
        ("/data/{tenant}", True),
        ("s3://bucket/{tenant}/jobs", True),
        ("data/jobs", False),
        ("/data/../etc", False),
        ("s3://", False),
        ("s3://bucket/a?version=1", False),
        ("s3://key:secret@bucket", False),
        ("simplecache::s3://bucket", False),
    ],
)
def test_root_is_an_absolute_path_or_a_plain_url(root: str, *, is_valid: bool) -> None:
    assert roots.is_root(root) is is_valid


@pytest.mark.parametrize(
    ("uri", "is_allowed"),
    [
        ("s3://bucket/jobs", True),
        ("s3://bucket/jobs/a.parquet", True),
        ("s3://bucket/jobs2/a.parquet", False),
        ("s3://bucket/jobs/../secrets", False),
        ("s3://other/jobs", False),
        ("/bucket/jobs/a.parquet", False),
        ("jobs/a.parquet", False),
        ("simplecache::s3://bucket/jobs/a", False),
    ],
)
def test_location_must_be_below_a_root(uri: str, *, is_allowed: bool) -> None:
    if is_allowed:
        roots.check_location(uri, ["s3://bucket/jobs/"], "input")
        return
    with pytest.raises(JobError, match="input"):
        roots.check_location(uri, ["s3://bucket/jobs/"], "input")


def test_link_out_of_a_root_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "root", tmp_path / "secrets"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    roots.check_location(f"{inside}/a.parquet", [str(inside)], "input")
    with pytest.raises(JobError):
        roots.check_location(f"{inside}/link/a.parquet", [str(inside)], "input")
    (inside / "file").symlink_to(outside / "key")
    with pytest.raises(JobError):
        roots.check_files([f"{inside}/file"], [str(inside)])


def test_tenant_replaces_its_name_in_roots() -> None:
    assert roots.tenant_roots(["/data/{tenant}", "/shared"], "a-1") == ["/data/a-1", "/shared"]
    assert roots.tenant_roots(["/shared"], "a/b") == ["/shared"]
    with pytest.raises(JobError, match="tenant"):
        roots.tenant_roots(["/data/{tenant}"], "../b")


@pytest.mark.parametrize(
    ("root", "other", "is_overlap"),
    [
        ("/data/jobs", "/data", True),
        ("/data/jobs", "/data/jobs/a", True),
        ("/data/{tenant}/jobs", "/data/batches", True),
        ("/data/jobs", "/data/jobs2", False),
        ("s3://bucket/jobs", "/data", False),
    ],
)
def test_overlap_of_roots(root: str, other: str, *, is_overlap: bool) -> None:
    assert roots.overlap(root, other) is is_overlap

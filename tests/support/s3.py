"""A bucket of a real S3 API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a bucket of moto's S3 server, which this process and its children reach."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3")
    files.mkdir("jobs")
    yield "s3://jobs"
    files.rm("jobs", recursive=True)
    server.stop()
    fsspec.filesystem("s3").clear_instance_cache()

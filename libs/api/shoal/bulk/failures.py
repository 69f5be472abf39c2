"""The errors of bulk jobs that are not errors of the mesh."""

from __future__ import annotations

import re
from typing import Final

_CREDENTIALS: Final = re.compile(r"://[^/\n]*@")


def without_credentials(text: str) -> str:
    """Return a text with URLs, without their user names and passwords."""
    return _CREDENTIALS.sub("://", text)


class JobError(Exception):
    """A job cannot go on; the message says why and what to do."""


class InputChanged(JobError):
    """The input is not the file with which the job began."""


class StorageError(JobError):
    """A file of the output cannot be read or written. The message has no credentials of URLs."""

    def __init__(self, message: str) -> None:
        super().__init__(without_credentials(message))


class Busy(JobError):
    """Another process runs the job."""

"""The errors of bulk jobs that are not errors of the mesh."""

from __future__ import annotations


class JobError(Exception):
    """A job cannot go on; the message says why and what to do."""


class InputChanged(JobError):
    """The input is not the file with which the job began."""


class StorageError(JobError):
    """A file of the output cannot be read or written."""


class Busy(JobError):
    """Another process runs the job."""

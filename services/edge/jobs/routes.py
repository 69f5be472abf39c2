"""The routes of submitted jobs, for the table of routes and the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from services.edge.batches.routes import PAGE, served_route
from services.edge.intake.served import Serve, ServedRequest
from services.edge.jobs.jobs import JobRequest, JobResume, Jobs
from services.edge.messages.base import Answer, HttpError


class Job(msgspec.Struct, kw_only=True):
    """A job. `status` is queued, running, paused, failed, expired, cancelled or completed.

    Times that are not known yet are null. `counts`, `progress` and `cost` are as in the manifest.
    """

    id: str
    object: str
    status: str
    error: str | None
    recipe: dict[str, Any]
    input: str
    output: str
    limits: dict[str, Any]
    created_at: int
    started_at: int | None
    ended_at: int | None
    counts: dict[str, int | None]
    progress: dict[str, float]
    cost: dict[str, float]
    embedding_id: str | None
    revision: str | None


class JobsPage(msgspec.Struct, kw_only=True):
    """A page of jobs, newest first."""

    object: str
    data: list[Job]
    has_more: bool
    first_id: str | None
    last_id: str | None


_JOB: Final = "/v1/jobs/{job_id}"
ROUTES: Final = (
    served_route("POST", "/v1/jobs", "Submits a bulk job", Job, body=JobRequest),
    served_route("GET", "/v1/jobs", "Lists submitted jobs", JobsPage, query=PAGE),
    served_route("GET", _JOB, "Describes a submitted job", Job),
    served_route("POST", f"{_JOB}/cancel", "Ends a job for good", Job),
    served_route("POST", f"{_JOB}/pause", "Stops a job after its chunks in flight", Job),
    served_route("POST", f"{_JOB}/resume", "Runs a job that stopped again", Job, body=JobResume),
    served_route("POST", f"{_JOB}/retry", "Sends the failed rows again", Job, body=JobResume),
)


def handlers(jobs: Jobs) -> dict[tuple[str, str], Serve]:
    """Return the handler of each route, by method and path."""
    return {
        ("POST", "/v1/jobs"): jobs.create,
        ("GET", "/v1/jobs"): jobs.list_jobs,
        ("GET", _JOB): jobs.retrieve,
        ("POST", f"{_JOB}/cancel"): jobs.cancel,
        ("POST", f"{_JOB}/pause"): jobs.pause,
        ("POST", f"{_JOB}/resume"): jobs.resume,
        ("POST", f"{_JOB}/retry"): jobs.retry,
    }


def refusals() -> dict[tuple[str, str], Serve]:
    """Return handlers of all routes for an edge without roots."""
    return {(route.method, route.path): _refuse for route in ROUTES}


async def _refuse(request: ServedRequest) -> Answer:
    raise HttpError(
        "JOBS_DISABLED",
        "submitted jobs are switched off: set SHOAL_BATCHES_URL, and SHOAL_JOBS_ROOTS to the "
        "directories or URLs below which jobs may read and write, on the edge",
    )

"""Jobs that a worker holds: their flow, weight, deadline and completeness."""

from __future__ import annotations

import numpy as np
import pytest
from shoal.v1 import inference_pb2, worker_pb2

from libs.errors import DeadlinePassed
from libs.models import EncodeWork, Prepared
from libs.models.interface.sequences import InputSequence
from services.worker.jobs.held import HeldJob, Lease, Unwanted
from services.worker.memory.resident import Resident
from services.worker.scheduling.batcher import Flow
from tests.worker.fakes import FakeModel, encode_job


def hold(job: worker_pb2.Job, adapter: str = "") -> HeldJob:
    lease = Lease(worker_pb2.Lane(model="org/fake", adapter=adapter), "1", 15.0)
    resident = Resident("org/fake", FakeModel(), 0.0, 0.0, 0.0)
    return HeldJob(0, job, lease, resident, received_at=0.0, queue_seconds=0.0)


def test_flow_is_adapter_tenant_and_priority() -> None:
    job = encode_job("1", "text")
    job.tenant = "red"
    assert hold(job, "org/adapter").flow == Flow("org/adapter", "red", False)
    job.encode.priority = inference_pb2.PRIORITY_BULK
    assert hold(job).flow == Flow("", "red", True)


@pytest.mark.parametrize(
    ("sent", "used"), [(0.0, 1.0), (-1.0, 1.0), (2.5, 2.5), (1e-9, 1e-3), (1e9, 1e3)]
)
def test_weight_is_bounded_and_one_by_default(sent: float, used: float) -> None:
    job = encode_job("1", "text")
    job.weight = sent
    assert hold(job).weight == used


def test_expired_and_cancelled_jobs_are_not_wanted() -> None:
    job = encode_job("1", "text")
    job.deadline_unix_ms = 5_000
    held = hold(job)
    held.check_wanted(4.9, "prepared")
    with pytest.raises(DeadlinePassed, match="before the job was prepared"):
        held.check_wanted(5.0, "prepared")
    held.unwanted = True
    with pytest.raises(Unwanted):
        held.check_wanted(4.9, "prepared")


def test_job_is_complete_once_every_sequence_has_its_output() -> None:
    held = hold(encode_job("1", "text"))
    with pytest.raises(RuntimeError, match="not prepared"):
        _ = held.is_complete
    sequences = [InputSequence(np.array([1, 2], np.int32)), InputSequence(np.array([3], np.int32))]
    held.prepared, held.is_growing = Prepared(EncodeWork(["text"]), "dense", sequences), True
    held.outputs[0] = np.zeros(1, np.float32)
    assert not held.is_complete
    held.outputs[1] = np.zeros(1, np.float32)
    assert not held.is_complete
    held.is_growing = False
    assert held.is_complete


def test_operation_is_dropped_and_its_flow_stays() -> None:
    job = encode_job("1", "text")
    job.encode.priority = inference_pb2.PRIORITY_BULK
    held = hold(job)
    held.drop_operation()
    assert held.job.WhichOneof("operation") is None
    assert held.flow.is_bulk

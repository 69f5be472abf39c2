"""The lanes: job queues in Redis. `services/router/lanes/dispatch.py` enqueues,
`services/router/lanes/pull.py` dequeues.
"""

from libs.queue.connection.client import connect, open_all
from libs.queue.connection.requirements import UnsuitableRedis
from libs.queue.connection.trust import RedisTrust
from libs.queue.jobs import (
    Completed,
    Idle,
    LaneGauges,
    Priority,
    Pulled,
    PulledJob,
    QueuedJob,
    RenewedBatch,
)
from libs.queue.keys import LaneKey, WakeupLeft, WorkerWakeup
from libs.queue.lanes import Lanes
from libs.queue.redis_check import RedisCheck

__all__ = [
    "Completed",
    "Idle",
    "LaneGauges",
    "LaneKey",
    "Lanes",
    "Priority",
    "Pulled",
    "PulledJob",
    "QueuedJob",
    "RedisCheck",
    "RedisTrust",
    "RenewedBatch",
    "UnsuitableRedis",
    "WakeupLeft",
    "WorkerWakeup",
    "connect",
    "open_all",
]

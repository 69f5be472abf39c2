"""Choose the models to evict from a device when another one needs memory: eviction policies and the
rules above them. Pure.
"""

from libs.eviction.choose import Challenger, choose_victims, may_yield
from libs.eviction.policies import DEFAULT, POLICIES, Candidate, Policy, cost_aware, gdsf, lru

__all__ = [
    "DEFAULT",
    "POLICIES",
    "Candidate",
    "Challenger",
    "Policy",
    "choose_victims",
    "cost_aware",
    "gdsf",
    "lru",
    "may_yield",
]

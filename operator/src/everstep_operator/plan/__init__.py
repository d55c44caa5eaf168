"""The planner: pure functions (what was observed, now) -> what to do. One file per policy, one test file per policy.

Here belongs every decision of the operator. What does not: input and output of any kind, clocks, randomness, and raw
API objects (`observed.py` is the only door for those).
"""

from everstep_operator.plan.actions import Plan
from everstep_operator.plan.observed import Observed


def plan(observed: Observed, now: float) -> Plan:
    """What is to be done about one job, given all that is known about it at `now` (Unix seconds)."""
    raise NotImplementedError

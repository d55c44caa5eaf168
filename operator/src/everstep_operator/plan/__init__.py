"""The planner: pure functions (what was observed, now) -> what to do. One file per policy, one test file per policy.

Here belongs every decision of the operator; `planner.make_plan` asks the policies in their order. What does not: input
and output of any kind, clocks, randomness, and raw API objects (`observation.py` is the only door for those).
"""

from everstep_operator.plan.actions import JobPlan
from everstep_operator.plan.planner import make_plan

__all__ = ["JobPlan", "make_plan"]

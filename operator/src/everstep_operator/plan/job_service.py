"""The headless Service of a job, and which of its pods it gives names in DNS.

While a job starts, the addresses of its pods appear one after the other. Kubernetes writes an EndpointSlice and the
Endpoints, with everything in them, each time it has noticed some of them: 380 times for 1,000 pods of one job, and
1,000 times for 100 jobs of ten. So the Service of all but the smallest jobs selects pod 0 alone until all pods have
addresses, and then all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.plan.actions import NamePods
from everstep_operator.plan.labels import LABEL_INDEX, LABEL_JOB
from everstep_operator.plan.plan_context import PlanContext
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.template import build_metadata

MAX_NAMED_SINGLY = 4  # so many pods are as few writes as to select pod 0 first and all of them then


def build_service(job: TrainingJob, settings: PlanSettings, *, is_complete: bool) -> dict[str, Any]:
    """Return the headless Service that gives the pods their names before they are ready.

    Args:
        job: The job.
        settings: What the operator was started with.
        is_complete: Whether all pods have addresses already, or are the few that lack in a set that has run.
    """
    selector = {LABEL_JOB: job.metadata.name}
    if not is_complete and job.spec.num_nodes > MAX_NAMED_SINGLY:
        selector[LABEL_INDEX] = "0"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(job, job.metadata.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": "agent", "port": settings.agent_port, "protocol": "TCP"}],
        },
    }


def name_pods(s: PlanContext) -> NamePods | None:
    """Return the action that gives all pods of all but the smallest jobs their names, once all have addresses."""
    # One that has ended had its address: in plain mode the containers of a set neither begin nor end together.
    begun = sum(1 for pod in s.current.values() if pod.ended is not None or (pod.live and pod.ip))
    if s.wanted <= MAX_NAMED_SINGLY or begun < s.wanted:
        return None
    return NamePods(build_service(s.job, s.observed.settings, is_complete=True))


def lacks_names(service: Mapping[str, Any]) -> bool:
    """Tell whether a job's Service still selects pod 0 alone."""
    spec = service.get("spec")
    selector = spec.get("selector") if isinstance(spec, Mapping) else None
    return isinstance(selector, Mapping) and LABEL_INDEX in selector

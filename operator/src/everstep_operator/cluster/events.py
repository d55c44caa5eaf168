"""Kubernetes Events: those about a job, and what node autoscalers say about its pods.

Ours are sent after the status is stored: no event tells what did not happen.
"""

from __future__ import annotations

import datetime
import secrets

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import EVENTS, JOBS
from everstep_operator.plan.actions import JobEvent
from everstep_operator.plan.observation import parse_timestamp

log = structlog.get_logger(__name__)

COMPONENT = "everstep-operator"
MAX_EVENT_MESSAGE = 1024  # the API server refuses longer ones
# Reasons of events by which an autoscaler says that a node is being made for a pod: Cluster Autoscaler's, Karpenter's.
SCALE_UP_REASONS = frozenset({"TriggeredScaleUp", "Nominated"})


async def send_event(client: Client, namespace: str, name: str, uid: str, event: JobEvent, at: float) -> None:
    """Post one Event of this time; a failure is only logged. Nobody may depend on an Event."""
    stamp = datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{secrets.token_hex(8)}", "namespace": namespace},
        "involvedObject": {
            "apiVersion": JOBS.api_version,
            "kind": JOBS.kind,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:MAX_EVENT_MESSAGE],
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
    try:
        await client.create(EVENTS, namespace, body)
    except (errors.ApiError, errors.Unreachable) as error:
        log.warning("an event was not stored", reason=event.reason, error=str(error))


async def find_last_scale_up(client: Client, namespace: str, pod_uid: str) -> float:
    """Return when an autoscaler last said that it makes a node for this pod (Unix seconds); 0 if it never has.

    One list of one pod's events. To watch all events of a cluster would cost more than everything else together.
    """
    latest = 0.0
    fields = f"involvedObject.kind=Pod,involvedObject.uid={pod_uid}"
    async for page in client.list(EVENTS, namespace, fields=fields):
        for item in page.items:
            if item.get("reason") in SCALE_UP_REASONS:
                latest = max(latest, _last_seen(item))
    return latest


def _last_seen(item: ApiObject) -> float:
    """Return when an event was last seen. Repeated events are one object; which of its times is kept up depends on the
    sender's library."""
    series = item.get("series") or {}
    times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"))
    return max((at for text in times if (at := parse_timestamp(text)) is not None), default=0.0)

"""Kubernetes Events about a job. They are sent after the status is stored: no event tells what did not happen."""

from __future__ import annotations

import datetime
import secrets

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import EVENTS, JOBS
from everstep_operator.plan.actions import Event

log = structlog.get_logger(__name__)

COMPONENT = "everstep-operator"
MAX_MESSAGE = 1024  # the API server refuses longer ones


async def send(client: Client, namespace: str, name: str, uid: str, event: Event) -> None:
    """Post one Event; a failure is only logged. Nobody may depend on an Event."""
    now = datetime.datetime.now(datetime.UTC)
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
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
        "message": event.message[:MAX_MESSAGE],
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

"""Decodes pods from JSON, only those fields that the operator reads.

A pod has 6 KB and more, nearly half of it managedFields, and there are thousands, each with several events. What is not
declared here is skipped while the text is read, and never becomes an object. The result has the shape of the API's, so
that `parse_pod` remains the only place that judges a pod; a test compares what it makes of both.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

import msgspec


class ProjectedMetadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    labels: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any
    ownerReferences: Any
    finalizers: Any


class ProjectedContainer(TypedDict, total=False):
    name: Any
    command: Any
    env: Any


class ProjectedVolume(TypedDict, total=False):
    name: Any
    secret: Any
    configMap: Any
    projected: Any


class ProjectedAffinity(TypedDict, total=False):
    nodeAffinity: Any


class ProjectedSpec(TypedDict, total=False):
    nodeName: Any
    schedulingGates: Any
    affinity: ProjectedAffinity | None
    containers: list[ProjectedContainer] | None
    volumes: list[ProjectedVolume] | None


class ProjectedContainerStatus(TypedDict, total=False):
    name: Any
    state: Any


class ProjectedStatus(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    podIP: Any
    conditions: Any
    containerStatuses: list[ProjectedContainerStatus] | None
    initContainerStatuses: list[ProjectedContainerStatus] | None


class ProjectedPod(TypedDict, total=False):
    """A pod; also the `Status` that an event of the type ERROR carries, by its code and message."""

    metadata: ProjectedMetadata
    spec: ProjectedSpec
    status: ProjectedStatus | str
    code: Any
    reason: Any
    message: Any


class ProjectedEvent(TypedDict, total=False):
    type: str
    object: ProjectedPod


class ProjectedList(TypedDict, total=False):
    metadata: Any
    items: list[ProjectedPod] | None


_EVENTS, _LISTS, _PODS = (msgspec.json.Decoder(kind) for kind in (ProjectedEvent, ProjectedList, ProjectedPod))


def decode_pod_event(line: bytes) -> Any:
    """Return an event of a watch of pods, with pods as far as the operator reads them."""
    return _project(_EVENTS, line)


def decode_pod_list(text: bytes) -> Any:
    """Return a page of a list of pods, as far as the operator reads them."""
    return _project(_LISTS, text)


def decode_pod(text: bytes) -> Any:
    """Return one pod, as far as the operator reads it."""
    return _project(_PODS, text)


def _project(decoder: msgspec.json.Decoder[Any], text: bytes) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.DecodeError:  # text or types that no API server writes: `parse_pod` makes the best of them
        return json.loads(text)

"""Decodes pods from JSON, only those fields that the operator reads.

A pod has 6 KB and more, nearly half of it managedFields, and there are thousands, each with several events. What is not
declared here is skipped while the text is read, and never becomes an object. The result has the shape of the API's, so
that `parse_pod` remains the only place that judges a pod; a test compares what it makes of both.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class ProjectedMetadata(msgspec.Struct, gc=False):
    name: Any = UNSET
    namespace: Any = UNSET
    uid: Any = UNSET
    resourceVersion: Any = UNSET
    labels: Any = UNSET
    creationTimestamp: Any = UNSET
    deletionTimestamp: Any = UNSET
    deletionGracePeriodSeconds: Any = UNSET
    ownerReferences: Any = UNSET
    finalizers: Any = UNSET


class ProjectedContainer(msgspec.Struct, gc=False):
    name: Any = UNSET
    command: Any = UNSET
    env: Any = UNSET


class ProjectedVolume(msgspec.Struct, gc=False):
    name: Any = UNSET
    secret: Any = UNSET
    configMap: Any = UNSET
    projected: Any = UNSET


class ProjectedAffinity(msgspec.Struct, gc=False):
    nodeAffinity: Any = UNSET


class ProjectedSpec(msgspec.Struct, gc=False):
    nodeName: Any = UNSET
    schedulingGates: Any = UNSET
    affinity: ProjectedAffinity | UnsetType | None = UNSET
    containers: list[ProjectedContainer] | UnsetType | None = UNSET
    volumes: list[ProjectedVolume] | UnsetType | None = UNSET


class ProjectedContainerStatus(msgspec.Struct, gc=False):
    name: Any = UNSET
    state: Any = UNSET


class ProjectedStatus(msgspec.Struct, gc=False):
    phase: Any = UNSET
    reason: Any = UNSET
    message: Any = UNSET
    podIP: Any = UNSET
    conditions: Any = UNSET
    containerStatuses: list[ProjectedContainerStatus] | UnsetType | None = UNSET
    initContainerStatuses: list[ProjectedContainerStatus] | UnsetType | None = UNSET


class ProjectedPod(msgspec.Struct, gc=False):
    """A pod; also the `Status` that an event of the type ERROR carries, by its code and message."""

    metadata: ProjectedMetadata | UnsetType = UNSET
    spec: ProjectedSpec | UnsetType = UNSET
    status: ProjectedStatus | str | UnsetType = UNSET
    code: Any = UNSET
    reason: Any = UNSET
    message: Any = UNSET


class ProjectedEvent(msgspec.Struct, gc=False):
    type: str
    object: ProjectedPod


class ProjectedList(msgspec.Struct, gc=False):
    metadata: Any = UNSET
    items: list[ProjectedPod] | UnsetType | None = UNSET


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
        return msgspec.to_builtins(decoder.decode(text))
    except msgspec.DecodeError:  # text or types that no API server writes: `parse_pod` makes the best of them
        return json.loads(text)

"""A pod that is decoded in part reads like the whole one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.cluster import pod_projection
from everstep_operator.cluster.action_executor import JobRef, check_ownership, controller_reference
from everstep_operator.cluster.cache import ClusterCache, object_key, resource_version
from everstep_operator.cluster.pod_projection import decode_pod, decode_pod_event, decode_pod_list
from everstep_operator.cluster.resources import PODS
from everstep_operator.plan.observation import parse_pod

EXCLUDED = {"key": "metadata.name", "operator": "NotIn", "values": ["bad-node"]}
REQUIRED = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [EXCLUDED]}]}}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "digits-1", "namespace": "ns", "uid": "u", "resourceVersion": "7", "generation": 1,
        "creationTimestamp": "2026-01-01T12:00:00Z", "deletionTimestamp": "2026-01-01T12:30:00Z",
        "deletionGracePeriodSeconds": 30, "finalizers": ["team.example/keep"],
        "labels": {"everstep.dev/job": "digits", "everstep.dev/index": "1", "everstep.dev/epoch": "2"},
        "annotations": {"a": "b"},
        "ownerReferences": [{"kind": "TrainingJob", "name": "digits", "uid": "j", "controller": True}],
        "managedFields": [{"manager": "everstep-operator", "fieldsV1": {"f:spec": {}}}],
    },
    "spec": {
        "nodeName": "n1", "hostname": "algo-2", "tolerations": [{"operator": "Exists"}],
        "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}],
        "affinity": {"nodeAffinity": REQUIRED, "podAntiAffinity": {}},
        "containers": [
            {"name": "trainer", "image": "i", "command": ["run"], "env": [{"name": "EVERSTEP_EPOCH", "value": "2"}]},
            {"name": "sidecar", "image": "i"},
        ],
        "volumes": [
            {"name": "everstep-agent", "configMap": {"name": "everstep-agent-0"}},
            {"name": "everstep-token", "secret": {"secretName": "digits-2-token"}},
            {"name": "everstep-job", "projected": {"sources": [{"configMap": {"name": "digits-2"}}]}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "c"}},
        ],
    },
    "status": {
        "phase": "Failed", "reason": "Evicted", "message": "The node was low on memory", "podIP": "10.0.0.7",
        "hostIP": "10.0.0.1", "qosClass": "Burstable",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T12:00:01Z"},
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
        ],
        "initContainerStatuses": [{"name": "prepare", "state": {"terminated": {"exitCode": 3, "message": "no"}}}],
        "containerStatuses": [
            {"name": "sidecar", "state": {"running": {}}},
            {"name": "trainer", "restartCount": 0, "state": {"terminated": {"exitCode": 137, "message": "killed"}}},
        ],
    },
}  # fmt: skip
KINDS: dict[tuple[str, ...], type] = {
    (): pod_projection.ProjectedPod,
    ("metadata",): pod_projection.ProjectedMetadata,
    ("spec",): pod_projection.ProjectedSpec,
    ("spec", "containers"): pod_projection.ProjectedContainer,
    ("spec", "volumes"): pod_projection.ProjectedVolume,
    ("spec", "affinity"): pod_projection.ProjectedAffinity,
    ("status",): pod_projection.ProjectedStatus,
    ("status", "containerStatuses"): pod_projection.ProjectedContainerStatus,
    ("status", "initContainerStatuses"): pod_projection.ProjectedContainerStatus,
}


class Recorder(dict[str, Any]):
    """A part of a pod that notes which of its fields are read."""

    def __init__(self, path: tuple[str, ...], content: dict[str, Any], read: set[tuple[str, ...]]) -> None:
        super().__init__({name: record((*path, name), value, read) for name, value in content.items()})
        self._path, self._read = path, read

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add((*self._path, name))
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._read.add((*self._path, name))
        return super().__getitem__(name)


def record(path: tuple[str, ...], value: Any, read: set[tuple[str, ...]]) -> Any:
    if isinstance(value, dict):
        return Recorder(path, value, read)
    return [record(path, each, read) for each in value] if isinstance(value, list) else value


def put_in_cache(raw: Any) -> Any:
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    cache.pods.put(raw)
    return cache.pods.get(object_key(raw))


def test_no_field_that_the_operator_reads_is_missing() -> None:
    read: set[tuple[str, ...]] = set()
    for pod in (POD, {**POD, "spec": {**POD["spec"], "nodeName": None}}, {**POD, "status": {"phase": "Failed"}}):
        recorded = record((), pod, read)
        put_in_cache(recorded)
        check_ownership(PODS, JobRef("ns", "digits", "j", "1", True), recorded)
    declared = {(*path, name) for path, kind in KINDS.items() for name in kind.__annotations__}
    assert ("metadata", "finalizers") in read, "the pod is read at all"
    assert {path for path in read if path[:-1] in KINDS} <= declared


@pytest.mark.parametrize("gone", [(), *((part, name) for part in ("metadata", "spec", "status") for name in POD[part])])
def test_a_pod_reads_as_if_it_were_whole(gone: tuple[str, ...]) -> None:
    pod = json.loads(json.dumps(POD))
    if gone:
        del pod[gone[0]][gone[1]]
    text = json.dumps(pod).encode()
    projected = decode_pod(text)
    assert put_in_cache(projected) == put_in_cache(pod)
    assert resource_version(projected) == resource_version(pod)
    if "ownerReferences" not in gone:
        assert controller_reference(projected) == controller_reference(pod)
    assert decode_pod_list(b'{"metadata": {"resourceVersion": "9"}, "items": [' + text + b"]}") == {
        "metadata": {"resourceVersion": "9"}, "items": [projected]
    }  # fmt: skip
    assert decode_pod_event(b'{"type": "ADDED", "object": ' + text + b"}") == {"type": "ADDED", "object": projected}
    assert "managedFields" not in projected["metadata"]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.text(max_size=5), below, max_size=2),
    max_leaves=5,
)


@given(part=st.sampled_from(["metadata", "spec", "status"]), data=st.data())
def test_odd_values_are_decoded_all_the_same(part: str, data: st.DataObject) -> None:
    """Text that no API server writes must not end a watch: whatever reads the pod judges it."""
    name = data.draw(st.sampled_from(sorted(POD[part])))
    pod = {**POD, part: {**POD[part], name: data.draw(ODD)}}
    decoded = decode_pod_event(json.dumps({"type": "ADDED", "object": pod}).encode())["object"]
    try:
        whole = parse_pod(pod)
    except (AttributeError, TypeError, ValueError):
        return
    assert parse_pod(decoded) == whole


def test_an_error_tells_its_code() -> None:
    gone = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}
    event = decode_pod_event(json.dumps({"type": "ERROR", "object": gone}).encode())
    assert (event["object"]["code"], event["object"]["message"]) == (410, "too old")


def test_a_later_state_of_a_pod_reads_as_if_it_were_the_first_and_its_successor_takes_nothing_from_it() -> None:
    trainer = {"name": "trainer", "command": ["python", "--epoch=3"]}
    token = {"name": "everstep-agent", "projected": {"sources": [{"secret": {"name": "token-3"}}]}}
    first = {**POD, "spec": {**POD["spec"], "containers": [trainer], "volumes": [token]}}
    before = parse_pod(first)
    assert (before.epoch, before.is_epoch_fixed, before.token_secret) == (3, True, "token-3")
    later = {**first, "status": {"phase": "Failed", "reason": "Evicted"}}
    assert parse_pod(later, before) == parse_pod(later)
    successor = {
        **first,
        "metadata": {**first["metadata"], "uid": "another"},
        "spec": {**first["spec"], "containers": [{**trainer, "command": ["python", "--epoch=4"]}]},
    }
    assert parse_pod(successor, before) == parse_pod(successor)
    assert parse_pod(successor, before).epoch == 4


def test_a_pod_that_was_told_of_without_its_owner_reads_as_one_that_never_was() -> None:
    trainer = {"name": "trainer", "command": ["python", "--epoch=3"]}
    sources = [{"secret": {"name": "token-3"}}, {"configMap": {"name": "job-7"}}]
    agent = {"name": "everstep-agent", "projected": {"sources": sources}}
    owner = {"uid": "u", "name": "job", "controller": True}
    spec = {**POD["spec"], "containers": [trainer], "volumes": [agent]}
    owned = {**POD, "metadata": {**POD["metadata"], "ownerReferences": [owner]}, "spec": spec}
    lost = {**owned, "metadata": {**owned["metadata"], "ownerReferences": None}}
    assert parse_pod(owned, parse_pod(lost)) == parse_pod(owned)
    assert parse_pod(owned).template == 7

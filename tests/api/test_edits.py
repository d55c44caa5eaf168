"""Edits of a running job: what the API server accepts changes nothing that the job's pods are made from."""

from __future__ import annotations

import copy
import http.client
import random
from collections import Counter
from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_models

from everstep_operator.api.crdgen import build_crd
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pod_fields import FIELDS_BY_PATH
from everstep_operator.api.resources import TRAINING_JOBS
from tests.api.conftest import ApiServer, collection
from tests.api.tables import manifest

EDITS = 150
VALUES: list[Any] = [{"a": "b"}, {"a": "c"}, [{"name": "x"}], "w", 5, True]
SPEC: dict[str, Any] = {
    "command": ["a"],
    "args": ["b"],
    "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}],
    "hyperparameters": {"a": "1"},
    "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": 1}},
    "pools": [{"name": "a"}, {"name": "b", "wait": "5m"}],
    "checkpoint": {"volume": {"csi": {"driver": "x", "fsType": "y"}}},
    "restart": {"onExitCodes": [{"codes": [1, 2], "action": "Fail"}]},
    "timeouts": {"hang": "1h"},
    "podTemplate": {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {
            "terminationGracePeriodSeconds": 30,
            "containers": [{"name": "trainer"}, {"name": "log", "env": [{"name": "A"}], "resources": {}}],
            "volumes": [{"name": "d"}, {"name": "e"}],
        },
    },
}
NAMES = sorted({name for names in FIELDS_BY_PATH.values() for name in names} | {"a", "image", "keepLast", "store"})


def objects(value: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Every object in a value, with the path of its schema."""
    if isinstance(value, list):
        return [found for item in value for found in objects(item, f"{path}[]")]
    if not isinstance(value, dict):
        return []
    return [(path, value), *(found for name, item in value.items() for found in objects(item, f"{path}.{name}"))]


def fill(chance: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """Give each object some of the fields that are passed through."""
    for path, value in objects(spec, "spec"):
        for name in chance.sample(FIELDS_BY_PATH.get(path, ()), min(2, len(FIELDS_BY_PATH.get(path, ())))):
            value.setdefault(name, chance.choice(VALUES))
    return spec


def edit(chance: random.Random, spec: dict[str, Any]) -> None:
    """Rename, change, remove or add a field somewhere."""
    _, place = chance.choice(objects(spec, "spec"))
    what, known = chance.choice(["rename", "rename", "change", "remove", "add"]), sorted(place)
    value = place.pop(chance.choice(known)) if known and what in ("rename", "remove") else chance.choice(VALUES)
    if what == "change" and known:
        place[chance.choice(known)] = value
    elif what != "remove":
        place[chance.choice(NAMES)] = value


@pytest.mark.integration
def test_no_edit_that_is_accepted_changes_what_pods_are_made_from(api_server: ApiServer) -> None:
    seen: Counter[int] = Counter()
    for number in range(EDITS):
        chance = random.Random(number)
        old = manifest({"spec": fill(chance, copy.deepcopy(SPEC))})
        code, stored = api_server.request("POST", collection(old), old)
        assert code == http.client.CREATED, stored
        new = copy.deepcopy(old)
        new["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        edit(chance, new["spec"])
        path = f"{collection(old)}/{old['metadata']['name']}"
        code, answer = api_server.request("PUT", f"{path}?dryRun=All&fieldValidation=Strict", new)
        api_server.request("DELETE", path)
        seen[code] += 1
        if code == http.client.OK:
            before, after = (TrainingJob.parse(each).spec for each in (stored, answer))
            assert before.pods_hash() == after.pods_hash(), (old["spec"], new["spec"])
    assert seen[http.client.UNPROCESSABLE_ENTITY] > EDITS / 2, seen


@pytest.mark.integration
def test_a_list_is_stored_as_it_is_written_and_a_default_in_it_may_be_written_out(api_server: ApiServer) -> None:
    def write(pools: list[Any]) -> tuple[int, Any]:
        new = copy.deepcopy(old)
        new["spec"]["pools"] = pools
        new["metadata"]["resourceVersion"] = stored["metadata"]["resourceVersion"]
        return api_server.request("PUT", f"{collection(old)}/{old['metadata']['name']}?dryRun=All", new)

    old = manifest({"spec": {**copy.deepcopy(SPEC), "pools": [{"name": "a"}, {"name": "b", "wait": "10m"}]}})
    code, stored = api_server.request("POST", collection(old), old)
    assert code == http.client.CREATED, stored
    assert stored["spec"]["pools"] == old["spec"]["pools"]
    code, answer = write([{"name": "a", "wait": "10m"}, {"name": "b"}])
    assert code == http.client.OK, answer
    code, answer = write([{"name": "a", "wait": "11m"}, {"name": "b"}])
    assert code == http.client.UNPROCESSABLE_ENTITY, answer
    assert "pools cannot change while the job is active" in answer["message"]
    api_server.request("DELETE", f"{collection(old)}/{old['metadata']['name']}")


MODELS = {
    "spec.env[].valueFrom": kubernetes_models.V1EnvVarSource,
    "spec.podTemplate.spec": kubernetes_models.V1PodSpec,
    "spec.podTemplate.spec.containers[]": kubernetes_models.V1Container,
    "spec.podTemplate.spec.containers[].env[]": kubernetes_models.V1EnvVar,
    "spec.podTemplate.spec.containers[].resources": kubernetes_models.V1ResourceRequirements,
    "spec.podTemplate.spec.volumes[]": kubernetes_models.V1Volume,
}


@pytest.mark.parametrize("path", MODELS)
def test_every_field_of_a_pod_is_declared(path: str) -> None:
    """Those that are not are compared by their number alone."""
    schema = build_crd(TRAINING_JOBS)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for step in path.split("."):
        schema = schema["properties"][step.removesuffix("[]")]
        schema = schema["items"] if step.endswith("[]") else schema
    assert set(MODELS[path].attribute_map.values()) <= set(schema["properties"])

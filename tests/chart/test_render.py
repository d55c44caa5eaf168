"""The chart installs a restricted operator, CRDs that outlive it, and nothing that was not asked for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "everstep"
Render = Callable[..., list[dict[str, Any]]]
Run = Callable[..., subprocess.CompletedProcess[str]]


def only(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = only(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def environment(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in pod(objects)["containers"][0]["env"]}


def test_lint_finds_nothing_to_say(helm: Run) -> None:
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_namespaced_object_names_its_namespace(render: Render) -> None:
    """For those who pipe `helm template` into kubectl."""
    objects = render(
        metrics={"service": {"enabled": True}, "serviceMonitor": {"enabled": True}}, networkPolicy={"enabled": True}
    )
    cluster_scoped = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    homeless = [
        (each["kind"], each["metadata"]["name"])
        for each in objects
        if each["kind"] not in cluster_scoped and "namespace" not in each["metadata"]
    ]
    assert homeless == []


def test_no_object_is_rendered_twice(render: Render) -> None:
    objects = render(watchNamespaces=["a", "everstep-system"])
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_the_operator_satisfies_the_restricted_pod_security_standard(render: Render) -> None:
    spec = pod(render(operatorKey={"previousSecretNames": ["old"]}))
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {field for field in ("hostNetwork", "hostPID", "hostIPC") if spec.get(field)} == set()
    assert all(set(volume) & {"emptyDir", "secret", "projected"} for volume in spec["volumes"])


def test_the_operators_user_may_be_left_to_the_cluster(render: Render) -> None:
    """OpenShift gives each namespace users and groups of its own, and refuses all others."""
    theirs = pod(render(podSecurityContext={"runAsUser": None, "runAsGroup": None, "fsGroup": None}))
    assert theirs["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "securityContext" not in pod(render(podSecurityContext=None))
    ours = pod(render())["securityContext"]
    assert [ours[field] for field in ("runAsUser", "runAsGroup", "fsGroup")] == [65532] * 3


def test_the_operator_can_write_to_tmp_under_its_read_only_root(render: Render) -> None:
    spec = pod(render())
    mounts = {mount["mountPath"]: mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert "emptyDir" in next(volume for volume in spec["volumes"] if volume["name"] == mounts["/tmp"])


def test_the_operator_starts_before_its_key_exists(render: Render) -> None:
    (key,) = [volume["secret"] for volume in pod(render())["volumes"] if "secret" in volume]
    assert key["optional"] is True
    assert key["secretName"] == "everstep-operator-key"


def test_a_rotated_key_is_another_secret_and_the_one_before_stays_mounted(render: Render) -> None:
    old, new = "everstep-operator-key", "everstep-operator-key-2"
    objects = render(operatorKey={"secretName": new, "previousSecretNames": [old, "older"]})
    assert environment(objects)["EVERSTEP_KEY_SECRET"] == new
    volumes = {volume["name"]: volume for volume in pod(objects)["volumes"]}
    assert volumes["key"]["secret"]["secretName"] == new
    sources = [source["secret"] for source in volumes["previous-keys"]["projected"]["sources"]]
    assert [(each["name"], each["items"]) for each in sources] == [
        (name, [{"key": "key", "path": name}]) for name in (old, "older")
    ]
    assert not any(each.get("optional") for each in sources), "without it running jobs would lose their templates"
    mounts = {mount["name"]: mount for mount in pod(objects)["containers"][0]["volumeMounts"]}
    assert mounts["previous-keys"]["readOnly"] is True
    assert mounts["previous-keys"]["mountPath"] == str(OperatorSettings.load({}).previous_keys_folder)
    assert "previous-keys" not in {volume["name"] for volume in pod(render())["volumes"]}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rollout_makes_a_new_operator_stand_by_before_an_old_one_goes(render: Render, replicas: int) -> None:
    """Whichever holds the Lease, the new one is ready: a rollout that waits for it ends."""
    deployment = only(render(replicas=replicas), "Deployment")["spec"]
    assert deployment["replicas"] == replicas
    assert deployment["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_operators_are_spread_over_nodes(render: Render) -> None:
    assert "topologySpreadConstraints" not in pod(render())
    objects = render(replicas=2)
    (constraint,) = pod(objects)["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", (
        "a cluster of one node is no reason to have one operator"
    )
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_lost_node_gives_the_operator_up_after_seconds(render: Render) -> None:
    tolerations = pod(render(nodeLostSeconds=7, tolerations=[{"key": "mine", "operator": "Exists"}]))["tolerations"]
    seconds = {each["key"]: each.get("tolerationSeconds") for each in tolerations}
    assert seconds == {"node.kubernetes.io/unreachable": 7, "node.kubernetes.io/not-ready": 7, "mine": None}


def test_a_slow_start_is_not_taken_for_a_dead_operator(render: Render) -> None:
    (container,) = pod(render())["containers"]
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 120
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {"/healthz"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_requests_and_a_memory_limit_are_set(render: Render) -> None:
    resources = pod(render())["containers"][0]["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert "memory" in resources["limits"]


def test_a_digest_wins_over_a_tag(render: Render) -> None:
    digest = "sha256:" + "a" * 64
    image = pod(render(image={"repository": "r/o", "tag": "x", "digest": digest}))["containers"][0]["image"]
    assert image == f"r/o@{digest}"


def test_an_image_without_a_tag_is_the_chart_s_own_version(render: Render) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert pod(render())["containers"][0]["image"].endswith(f":{version}")


def test_helm_s_own_objects_are_not_taken_for_children_of_jobs(render: Render) -> None:
    owners = {each["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") for each in render()}
    assert "everstep" not in owners


def test_pools_become_trainingpools(render: Render) -> None:
    spec = {"nodeSelector": {"node": "gpu"}}
    pool = only(render(pools=[{"name": "a100", "spec": spec}]), "TrainingPool")
    assert pool["metadata"]["name"] == "a100"
    assert pool["spec"] == spec


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, set()),
        ({"metrics": {"service": {"enabled": True}}}, {"Service"}),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, {"Service", "ServiceMonitor"}),
        ({"networkPolicy": {"enabled": True}}, {"NetworkPolicy"}),
    ],
)
def test_optional_objects_appear_only_when_asked_for(render: Render, values: dict[str, Any], kinds: set[str]) -> None:
    optional = {"Service", "ServiceMonitor", "NetworkPolicy", "TrainingPool"}
    assert {each["kind"] for each in render(**values)} & optional == kinds


def test_services_select_the_operator_s_pod(render: Render) -> None:
    objects = render(metrics={"service": {"enabled": True}})
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert only(objects, "Service")["spec"]["selector"].items() <= labels.items()
    assert only(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()

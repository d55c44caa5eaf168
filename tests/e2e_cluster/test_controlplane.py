"""The control plane that integration tests use: real, quick, and gone afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl, Object

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def control() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="module")
def kubectl(control: ControlPlane) -> Kubectl:
    return Kubectl(control.kubeconfig)


def _pod(name: str, **security: object) -> Object:
    container = {"name": "main", "image": "x", "securityContext": security}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"serviceAccountName": "x", "automountServiceAccountToken": False, "containers": [container]},
    }


def test_data_survive_a_restart_of_the_api_server(control: ControlPlane, kubectl: Kubectl) -> None:
    kubectl.run("create", "configmap", "kept", "--from-literal=a=b")
    control.restart_apiserver()
    assert kubectl.run("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"


def test_a_user_may_do_what_rbac_gives_and_nothing_else(control: ControlPlane, kubectl: Kubectl) -> None:
    user = Kubectl(control.user_kubeconfig("tester"))
    with pytest.raises(ClusterError, match="forbidden"):
        user.items("configmaps")
    kubectl.run("create", "configmap", "read-by-it")
    kubectl.run("create", "role", "reader", "--verb=list", "--resource=configmaps")
    kubectl.run("create", "rolebinding", "reader", "--role=reader", "--user=tester")
    assert "read-by-it" in {item["metadata"]["name"] for item in user.items("configmaps")}


def test_pod_security_is_enforced(kubectl: Kubectl) -> None:
    kubectl.run("create", "namespace", "strict")
    kubectl.run("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    kubectl.run("create", "serviceaccount", "x", "-n", "strict")
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        kubectl.run("create", "-n", "strict", "-f", "-", stdin=json.dumps(_pod("bad", privileged=True)))


def test_the_audit_log_names_who_made_which_pod(control: ControlPlane, kubectl: Kubectl) -> None:
    kubectl.run("create", "serviceaccount", "x")
    kubectl.run("create", "-f", "-", stdin=json.dumps(_pod("audited")))
    uid = kubectl.run("get", "pod", "audited", "-o", "jsonpath={.metadata.uid}")
    events = [json.loads(line) for line in control.audit_log.read_text().splitlines()]
    (made,) = [
        event
        for event in events
        if event["verb"] == "create" and event.get("responseObject", {}).get("metadata", {}).get("name") == "audited"
    ]
    assert made["user"]["username"] == "admin"
    assert made["responseObject"]["metadata"]["uid"] == uid


def test_nothing_is_left() -> None:
    with ControlPlane() as plane:
        running = plane.processes.all()
        assert {process.name for process in running} == {"etcd", "kube-apiserver"}
    assert not any(process.alive for process in running)
    assert not plane.folder.exists()


def test_a_control_plane_whose_etcd_died_says_so() -> None:
    with ControlPlane() as plane:
        plane.processes.stop(["etcd"])
        with pytest.raises(ClusterError, match="etcd is not running"):
            plane.ready()

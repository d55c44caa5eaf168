"""The promises of the cluster itself, on a local cluster that is up: network, names, logs, faults.

Slow where Kubernetes is slow: a silent node is called NotReady after 50 s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import network_policy, oci, packages
from e2e.cluster.kubectl import Kubectl, Object, is_ready
from e2e.cluster.local import LocalCluster
from e2e.cluster.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

IMAGE = "localhost/everstep/busybox:1"
NAMESPACE = "cluster-test"
NOT_READY = 90


@pytest.fixture(scope="module")
def cluster() -> LocalCluster:
    found = LocalCluster()
    if not found.is_up():
        pytest.skip("no local cluster is up")
    return found


@pytest.fixture(scope="module")
def image(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    packages.ensure({"busybox": "busybox-static"})
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{applet}": "busybox" for applet in applets if applet != "busybox"}
    archive = tmp_path_factory.mktemp("image") / "busybox.tar"
    oci.write_archive(archive, IMAGE, {"bin/busybox": busybox.read_bytes()}, ["/bin/busybox"], links)
    cluster.load_images({IMAGE: archive})
    return IMAGE


def _pod(node: str, image: str) -> Object:
    number = node.removeprefix("node-")
    script = "echo hello from $HOSTNAME; echo $HOSTNAME > /www/index.html; exec httpd -f -p 8080 -h /www"
    container = {
        "name": "main",
        "image": image,
        "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "www", "mountPath": "/www"}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"gang-{number}", "labels": {"app": "gang"}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "hostname": f"algo-{number}",
            "subdomain": "gang",
            "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "www", "emptyDir": {}}],
            "containers": [container],
        },
    }


def _service(name: str, **spec: object) -> Object:
    selected = {"selector": {"app": "gang"}, "ports": [{"port": 80, "targetPort": 8080}], **spec}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": selected}


@pytest.fixture(scope="module")
def gang(cluster: LocalCluster, image: str) -> Iterator[Kubectl]:
    """A pod on each node under the restricted profile; a headless Service and one with an address."""
    kubectl = cluster.kubectl
    kubectl.run("create", "namespace", NAMESPACE)
    kubectl.run("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    items = [_service("gang", clusterIP="None", publishNotReadyAddresses=True), _service("web")]
    items += [_pod(node.name, image) for node in cluster.nodes]
    until(lambda: bool(kubectl.items("serviceaccounts", "-n", NAMESPACE)), "default service account", 20)
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    kubectl.run("create", "-n", NAMESPACE, "-f", "-", stdin=document)
    kubectl.run("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod", "-l", "app=gang", "--timeout=40s")
    yield kubectl
    # The API server was restarted: a kubelet that lost its watch before tries again only after up to 45 s, and so does
    # the controller that looks for what is left in the namespace.
    kubectl.run("delete", "namespace", NAMESPACE, "--timeout=150s")


def _inside(kubectl: Kubectl, pod: str, script: str) -> str:
    return kubectl.run("exec", "-n", NAMESPACE, pod, "--", "sh", "-c", script).strip()


def _ready(cluster: LocalCluster, name: str) -> bool:
    return any(is_ready(node) for node in cluster.kubectl.items("nodes") if node["metadata"]["name"] == name)


def test_pods_reach_each_other_by_name_over_nodes(cluster: LocalCluster, gang: Kubectl) -> None:
    for node in cluster.nodes:
        number = node.place.index
        assert _inside(gang, "gang-1", f"wget -qO- http://algo-{number}.gang:8080") == f"algo-{number}"
        full = f"algo-{number}.gang.{NAMESPACE}.svc.cluster.local"
        assert _inside(gang, f"gang-{number}", f"nslookup {full} | tail -n +4 | grep Address")


def test_an_address_leads_back_to_its_name(gang: Kubectl) -> None:
    names = _inside(gang, "gang-1", "nslookup $(hostname -i)")
    assert f"algo-1.gang.{NAMESPACE}.svc.cluster.local" in names


def test_a_service_spreads_over_nodes(cluster: LocalCluster, gang: Kubectl) -> None:
    answers = _inside(gang, "gang-1", "for i in $(seq 40); do wget -qO- http://web; done").split()
    assert set(answers) == {f"algo-{node.place.index}" for node in cluster.nodes}


def test_the_api_server_answers_behind_its_service(gang: Kubectl) -> None:
    assert _inside(gang, "gang-1", "wget --no-check-certificate -qO- https://kubernetes.default.svc/readyz") == "ok"


def test_outside_names_fail_at_once(gang: Kubectl) -> None:
    assert "NXDOMAIN" in _inside(gang, "gang-1", "nslookup example.com || true")


def test_logs(gang: Kubectl) -> None:
    assert gang.run("logs", "-n", NAMESPACE, "gang-2") == "hello from algo-2\n"


def test_the_host_reaches_pods(gang: Kubectl) -> None:
    address = gang.run("get", "pod", "-n", NAMESPACE, "gang-2", "-o", "jsonpath={.status.podIP}")
    with urllib.request.urlopen(f"http://{address}:8080", timeout=5) as answer:
        assert answer.read() == b"algo-2\n"


def _rules(cluster: LocalCluster) -> list[str]:
    """Filter rules and IP sets of all nodes, without what kube-proxy changes by itself at any time."""
    found = []
    for node in cluster.nodes:
        command = [*node.inside(), "sh", "-c", "iptables-save -t filter; ipset list -name"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found += [
            f"{node.name} {line.split(' [')[0]}" for line in lines if line[:1] != "#" and "KUBE-SERVICES" not in line
        ]
    return found


def test_policies_hold_while_they_are_asked_for_and_leave_nothing(cluster: LocalCluster, gang: Kubectl) -> None:
    last = len(cluster.nodes)
    deny = {"podSelector": {"matchLabels": {"closed": "yes"}}, "policyTypes": ["Ingress"]}
    named = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "first-is-closed"}}
    gang.run("label", "-n", NAMESPACE, "pod", "gang-1", "closed=yes")
    gang.run("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps({**named, "spec": deny}))

    def reached(number: int) -> bool:
        script = f"timeout 5 wget -qO- http://algo-{number}.gang:8080 || true"
        return _inside(gang, f"gang-{last}", script) == f"algo-{number}"

    packages.ensure(network_policy.PACKAGES)
    before = _rules(cluster)
    assert reached(1), "nobody enforces policies by default"
    with network_policy.enforced(cluster):
        until(lambda: not reached(1), "gang-1 is closed", 10)
        assert reached(2)
    assert reached(1)
    assert _rules(cluster) == before


@pytest.mark.chaos
def test_a_killed_node_is_noticed_and_comes_back(cluster: LocalCluster, gang: Kubectl) -> None:
    name = cluster.nodes[-1].name
    cluster.kill_node(name)
    assert cluster.node(name).process is None
    until(lambda: not _ready(cluster, name), f"{name} is NotReady", NOT_READY, interval=0.5)
    cluster.restart_node(name)
    until(cluster.is_up, "the cluster is well again", 30, interval=0.5)
    number = cluster.nodes[-1].place.index
    gang.run("wait", "-n", NAMESPACE, "--for=condition=Ready", "pod", f"gang-{number}", "--timeout=60s")


@pytest.mark.chaos
def test_a_frozen_node_is_silent_until_it_is_thawed(cluster: LocalCluster, gang: Kubectl) -> None:
    name = cluster.nodes[-1].name
    address = gang.run("get", "pod", "-n", NAMESPACE, name.replace("node", "gang"), "-o", "jsonpath={.status.podIP}")
    cluster.freeze_node(name)
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"http://{address}:8080", timeout=2)
    cluster.thaw_node(name)
    with urllib.request.urlopen(f"http://{address}:8080", timeout=5) as answer:
        assert answer.status == 200


@pytest.mark.chaos
def test_a_partitioned_node_runs_on_unseen(cluster: LocalCluster, gang: Kubectl) -> None:
    node = cluster.nodes[-1]
    cluster.partition_node(node.name)
    until(lambda: not _ready(cluster, node.name), f"{node.name} is NotReady", NOT_READY, interval=0.5)
    running = subprocess.run([*node.inside(), "pidof", "httpd"], capture_output=True, check=False)
    assert running.returncode == 0
    cluster.heal_node(node.name)
    until(lambda: _ready(cluster, node.name), f"{node.name} is Ready", 40, interval=0.5)


def test_the_api_server_restarts_in_place(cluster: LocalCluster, gang: Kubectl) -> None:
    before = gang.run("get", "pod", "-n", NAMESPACE, "gang-1", "-o", "jsonpath={.metadata.uid}")
    cluster.restart_apiserver()
    assert gang.run("get", "pod", "-n", NAMESPACE, "gang-1", "-o", "jsonpath={.metadata.uid}") == before


def test_up_repairs_a_node_that_is_off(cluster: LocalCluster, gang: Kubectl) -> None:
    cluster.kill_node(cluster.nodes[-1].name)
    assert not cluster.is_up()
    cluster.up()
    assert cluster.is_up()

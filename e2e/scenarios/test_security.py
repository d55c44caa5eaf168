"""Least privilege, seen from inside the pods and from their neighbours."""

from __future__ import annotations

import base64

from e2e.harness import Cluster, condition, python, training_job

KNOCK = """
import json, socket, sys, urllib.request, urllib.error, os
peer = socket.gethostbyname(os.environ['PEER'])
base = f'http://{peer}:8470'
def ask(path, headers={}, data=None):
    try:
        return urllib.request.urlopen(urllib.request.Request(base + path, data=data, headers=headers), timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
nonce = json.load(urllib.request.urlopen(base + '/v1/challenge', timeout=5))['nonce']
wrong = {'X-Everstep-Nonce': nonce, 'X-Everstep-Client': '0' * 32, 'X-Everstep-MAC': '0' * 64}
answers = [ask('/v1/state'), ask('/v1/stop', data=b'{}'), ask('/v1/link', wrong, b'{}'), ask('/v1/peers', wrong, b'{}')]
print('KNOCK', answers, flush=True)
"""
SLEEP = "import time; time.sleep(600)"


def test_pods_are_restricted_and_hold_no_service_account_token(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("plain", python(SLEEP), numNodes=2), namespace=namespace)
    cluster.wait_phase(namespace, "plain", "Running")
    for pod in cluster.reported(namespace, "plain"):
        assert pod["spec"]["automountServiceAccountToken"] is False
        name = pod["metadata"]["name"]
        assert "No such file" in cluster.exec(namespace, name, "ls", "/var/run/secrets/kubernetes.io", check=False)


def test_the_agents_refuse_callers_without_the_token(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("guarded", python(SLEEP), numNodes=1), namespace=namespace)
    cluster.wait_phase(namespace, "guarded", "Running")
    address = cluster.reported(namespace, "guarded")[0]["status"]["podIP"]
    knock = training_job("knock", python(KNOCK), env=[{"name": "PEER", "value": address}])
    cluster.apply(knock, namespace=namespace)
    cluster.wait_phase(namespace, "knock", "Succeeded")
    assert "KNOCK [401, 401, 401, 401]" in cluster.all_logs(namespace, "knock")


def test_the_job_token_appears_nowhere(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("quiet", python(SLEEP), numNodes=2), namespace=namespace)
    cluster.wait_phase(namespace, "quiet", "Running")
    cluster.reported(namespace, "quiet")
    secret = next(
        s for s in cluster.items(f"/api/v1/namespaces/{namespace}/secrets") if s["metadata"]["name"].startswith("quiet")
    )
    raw = base64.b64decode(secret["data"]["token"])
    needles = {raw.hex(), secret["data"]["token"], raw.decode("latin-1")}
    environments = cluster.exec(namespace, "quiet-0", "sh", "-c", "cat /proc/[0-9]*/environ 2>/dev/null || true")
    haystack = "\n".join(
        [
            cluster.explain(namespace, "quiet"),
            cluster.kubectl("get", "tj,pods,cm", "-n", namespace, "-o", "yaml"),
            cluster.kubectl("logs", "-n", "everstep-system", "deploy/everstep"),
            environments,
        ]
    )
    assert not [needle for needle in needles if needle in haystack]


def test_a_pool_refuses_namespaces_it_does_not_allow(cluster: Cluster, namespace: str) -> None:
    pool = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingPool",
        "metadata": {"name": f"closed-{namespace}"},
        "spec": {"capacityType": "on-demand", "allowedNamespaces": ["somewhere-else"]},
    }
    cluster.apply(pool, namespace=namespace)
    try:
        job = training_job("outsider", ["true"], pools=[{"name": f"closed-{namespace}"}])
        cluster.apply(job, namespace=namespace)
        failed = cluster.wait_phase(namespace, "outsider", "Failed")
        assert condition(failed, "Failed")["reason"] == "NamespaceNotAllowed"
        assert not cluster.pods(namespace, "outsider")
    finally:
        cluster.kubectl("delete", "trainingpool", f"closed-{namespace}")


def test_there_is_no_sshd_in_the_trainer_image(cluster: Cluster, namespace: str) -> None:
    source = "import os, shutil, sys; sys.exit(bool(shutil.which('sshd')) or os.path.exists('/usr/sbin/sshd'))"
    job = training_job("nossh", ["python", "-c", source], image="docker.io/everstep/trainer:0.1.0")
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, "nossh", "Succeeded")

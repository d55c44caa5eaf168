"""Tests of what works, and what is said, in namespaces whose NetworkPolicies deny by default.

All jobs live at the same time, since what they have in common is that silence takes its time to be noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from e2e import deploy
from e2e.harness import Cluster, Object, condition, phase, python, training_job

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "install-with-helm.md"
DENY: Object = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "default-deny"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}
# Two ranks that speak, and that try the API server, which nothing of theirs needs.
SPEAK = """
import os, socket, time
def reach(host, port):
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return 'refused'
    return 'reached'
print('API SERVER', reach(os.environ['KUBERNETES_SERVICE_HOST'], 443), flush=True)
here = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
if os.environ['RANK'] == '0':
    with socket.create_server(('', here[1])) as server:
        server.accept()[0].close()
else:
    deadline = time.monotonic() + 30
    while reach(*here) == 'refused' and time.monotonic() < deadline:
        time.sleep(0.1)
    print('PEER', reach('algo-1', 8470), flush=True)
with open(os.environ['EVERSTEP_PROGRESS'], 'w') as progress:
    progress.write('step=1 total=1\\n')
time.sleep({seconds})
"""
ALONE = "import time; print('RAN', flush=True); time.sleep(3)"
SILENCE = 15  # seconds without an answer after which the operator goes by the pods


def documented() -> list[Object]:
    """Return the policies of the page on installation, as they are there."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    found = [each for block in blocks for each in yaml.safe_load_all(block) if each.get("kind") == "NetworkPolicy"]
    assert {policy["metadata"]["name"] for policy in found} == {"everstep-agents", "everstep-ranks"}
    return found


def without_the_operator(policies: list[Object]) -> list[Object]:
    """Return the same, for pods of the namespace alone."""
    for policy in policies:
        for rule in policy["spec"].get("ingress", []):
            rule["from"] = [peer for peer in rule["from"] if "namespaceSelector" not in peer]
    return policies


def pair(name: str, seconds: int, **spec: object) -> Object:
    return training_job(name, python(SPEAK.replace("{seconds}", str(seconds))), numNodes=2, **spec)


@pytest.fixture(scope="module")
def denied(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Three namespaces that deny by default, with jobs in them: what they allow -> their name."""
    with deploy.network_policies(cluster), ExitStack() as stack:
        spaces = {kind: stack.enter_context(cluster.namespace(kind)) for kind in ("nothing", "ranks", "documented")}
        for space in spaces.values():
            cluster.apply(DENY, namespace=space)
        cluster.apply(*without_the_operator(documented()), namespace=spaces["ranks"])
        cluster.apply(*documented(), namespace=spaces["documented"])
        quick = {"spec": {"terminationGracePeriodSeconds": 15}}
        cluster.apply(
            pair("apart", 1, timeouts={"runtime": "1s"}, podTemplate=quick),
            training_job("alone", python(ALONE)),
            namespace=spaces["nothing"],
        )
        cluster.apply(pair("unwatched", SILENCE + 5), namespace=spaces["ranks"])
        hold = training_job("guarded", python("import time; time.sleep(600)"))
        cluster.apply(pair("usual", 1), hold, namespace=spaces["documented"])
        yield spaces


@pytest.mark.timeout(120)
def test_with_the_documented_policies_a_job_runs_as_anywhere(cluster: Cluster, denied: dict[str, str]) -> None:
    space = denied["documented"]
    done = cluster.wait_phase(space, "usual", "Succeeded", timeout=90)
    # Where pod 1's end is seen first, what pod 0 says last comes a moment later.
    cluster.wait_job(space, "usual", lambda job: job["status"].get("progress", {}).get("step") == 1, 30)
    # A job of a second may have ended before the operator first asks: that its agent answers is seen at the other one.
    assert condition(done, "Degraded").get("status") != "True"
    reached = cluster.wait_job(space, "guarded", lambda job: condition(job, "Degraded").get("status") == "False", 90)
    assert condition(reached, "Degraded")["reason"] == "AgentReachable"
    output = cluster.all_logs(space, "usual")
    assert output.count("API SERVER refused") == 2, (
        f"what no policy allows is refused, or this proves nothing: {output}"
    )
    assert "PEER reached" in output


@pytest.mark.timeout(120)
def test_where_the_operator_is_kept_out_jobs_run_by_dns_and_say_degraded(
    cluster: Cluster, denied: dict[str, str]
) -> None:
    space = denied["ranks"]
    silent = cluster.wait_job(
        space, "unwatched", lambda job: condition(job, "Degraded").get("status") == "True", 60, "Degraded"
    )
    assert condition(silent, "Degraded")["reason"] == "AgentUnreachable"
    assert phase(silent) == "Running"
    assert "all ranks are started" not in condition(silent, "Ready")["message"], "nobody told the operator so"
    done = cluster.wait_phase(space, "unwatched", "Succeeded", timeout=60)
    assert done["status"]["restarts"]["application"] == done["status"]["restarts"]["infrastructure"] == 0
    assert "PEER reached" in cluster.all_logs(space, "unwatched")


@pytest.mark.timeout(120)
def test_one_pod_needs_no_network(cluster: Cluster, denied: dict[str, str]) -> None:
    space = denied["nothing"]
    cluster.wait_phase(space, "alone", "Succeeded", timeout=60)
    assert "RAN" in cluster.all_logs(space, "alone")


@pytest.mark.timeout(180)
def test_pods_that_may_not_speak_start_no_rank_and_time_out(cluster: Cluster, denied: dict[str, str]) -> None:
    space = denied["nothing"]
    failed = cluster.wait_phase(space, "apart", "Failed", timeout=120)
    assert condition(failed, "Failed")["reason"] == "RuntimeTimeout"
    assert condition(failed, "Degraded")["status"] == "True"
    assert condition(failed, "Degraded")["reason"] == "AgentUnreachable"
    assert "API SERVER" not in cluster.all_logs(space, "apart"), "no rank ran"


@pytest.mark.timeout(120)
def test_a_stranger_reaches_no_agent(cluster: Cluster, denied: dict[str, str], namespace: str) -> None:
    """From a namespace without policies to one whose policies name who may come in."""
    space = denied["documented"]
    running = cluster.wait_job(space, "guarded", lambda job: condition(job, "Degraded").get("status") == "False")
    assert phase(running) == "Running", "the operator reads from the agent that the stranger tries"
    target = cluster.reported(space, "guarded")[0]["status"]["podIP"]
    source = f"""
import socket
try:
    socket.create_connection(('{target}', 8470), timeout=3)
except OSError as error:
    print('REFUSED', type(error).__name__)
"""
    cluster.apply(training_job("stranger", python(source)), namespace=namespace)
    cluster.wait_phase(namespace, "stranger", "Succeeded")
    assert "REFUSED" in cluster.all_logs(namespace, "stranger")

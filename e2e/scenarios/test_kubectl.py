"""The view of a person with nothing but kubectl, at every moment."""

from __future__ import annotations

import pytest

from e2e.harness import Cluster, Object, phase, python, training_job

STEPS = """
import os, time
for step in range(1, 200):
    with open(os.environ['EVERSTEP_PROGRESS'], 'w') as progress:
        progress.write(f'step={step} total=200 loss=0.5\\n')
    time.sleep(0.05)
time.sleep(600)
"""


def test_the_columns_tell_phase_ready_step_and_restarts(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("seen", python(STEPS), numNodes=2), namespace=namespace)
    cluster.wait_phase(namespace, "seen", "Running")

    # Two reports that come in any order: the leader's of a step, and each kubelet's of its own probe.
    def trains_on_both_nodes(job: Object) -> bool:
        status: Object = job["status"]
        return status.get("progress", {}).get("step", 0) > 0 and bool(status.get("readyNodes") == 2)

    job = cluster.wait_job(namespace, "seen", trains_on_both_nodes, 60, "a step, and both nodes ready")
    table = cluster.kubectl("get", "tj", "-n", namespace)
    header, row = table.splitlines()
    assert header.split()[:2] == ["NAME", "PHASE"]
    assert "Running" in row
    # The table is read after the status: the step may have grown meanwhile, by what 30 s bring at most.
    columns = {name: row[header.index(name) :].partition(" ")[0] for name in header.split()}  # some cells are empty
    assert (columns["PHASE"], columns["READY"], columns["RESTARTS"]) == ("Running", "2", "0")
    assert columns["CHECKPOINT"] == "", "this program saves nothing"
    assert int(columns["STEP"]) >= job["status"]["progress"]["step"]
    described = cluster.kubectl("describe", "tj", "-n", namespace, "seen")
    assert "Events:" in described
    assert "everstep" in described.split("Events:")[1], "transitions are told as events"


def test_kubectl_wait_ends_with_the_job(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("short", ["true"]), namespace=namespace)
    cluster.kubectl("wait", "-n", namespace, "tj/short", "--for=condition=Complete", "--timeout=180s", timeout=200)


def settled(cluster: Cluster, namespace: str, name: str) -> tuple[object, ...]:
    job = cluster.job(namespace, name)
    assert job is not None
    return job["metadata"]["generation"], job["metadata"]["resourceVersion"], *cluster.versions(namespace, name)


def test_applying_twice_changes_nothing(cluster: Cluster, namespace: str) -> None:
    job = training_job("twice", python("import time; time.sleep(600)"), numNodes=2)
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, "twice", "Running")
    cluster.wait_job(namespace, "twice", lambda j: j["status"].get("readyNodes") == 2, what="both nodes ready")
    before = settled(cluster, namespace, "twice")
    assert "unchanged" in cluster.apply(job, namespace=namespace)
    assert settled(cluster, namespace, "twice")[0] == before[0]
    assert settled(cluster, namespace, "twice")[2:] == before[2:]


def owners(job: Object) -> dict[str, set[str]]:
    """Field manager -> the top-level fields it owns."""
    found: dict[str, set[str]] = {}
    for entry in job["metadata"].get("managedFields", []):
        found.setdefault(entry["manager"], set()).update(entry.get("fieldsV1", {}))
    return found


@pytest.mark.parametrize("labels", [{"app.kubernetes.io/instance": "argo", "team": "vision"}])
def test_what_gitops_compares_is_never_written(cluster: Cluster, namespace: str, labels: dict[str, str]) -> None:
    job = training_job("git", ["true"])
    job["metadata"]["labels"] = labels
    cluster.apply(job, namespace=namespace)
    done = cluster.wait_phase(namespace, "git", "Succeeded")
    assert done["metadata"]["labels"] == labels
    assert done["metadata"]["generation"] == 1
    ours = [fields for manager, fields in owners(done).items() if "everstep" in manager]
    assert ours, "the operator's own field manager"
    assert set().union(*ours) == {"f:status"}
    for pod in cluster.pods(namespace, "git"):
        assert "app.kubernetes.io/instance" not in pod["metadata"]["labels"], "Argo CD would prune such a pod"
    assert phase(done) == "Succeeded"

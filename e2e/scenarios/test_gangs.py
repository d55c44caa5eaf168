"""Jobs that do not fit together run one after the other, and pools are what they were when a job started."""

from __future__ import annotations

import pytest

from e2e.harness import Cluster, Object, phase, python, training_job, wait


@pytest.mark.timeout(240)
def test_two_gangs_of_eight_on_twelve_both_finish(cluster: Cluster, gangs: str) -> None:
    for name in ("first", "second"):
        cluster.wait_phase(gangs, name, "Succeeded", timeout=200)


def test_the_next_pool_after_its_wait(cluster: Cluster, namespace: str) -> None:
    pool: Object = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingPool",
        "metadata": {"name": f"nowhere-{namespace}"},
        "spec": {"capacityType": "spot", "nodeSelector": {"everstep.dev/pool": "nowhere"}},
    }
    cluster.apply(pool, namespace=namespace)
    try:
        pools = [{"name": f"nowhere-{namespace}", "wait": "3s"}, {"name": "on-demand"}]
        cluster.apply(training_job("roam", ["true"], pools=pools), namespace=namespace)
        done = cluster.wait_phase(namespace, "roam", "Succeeded")
        assert done["status"]["template"]["pool"] == "on-demand"
    finally:
        cluster.kubectl("delete", "trainingpool", f"nowhere-{namespace}")


def test_a_pool_edited_while_a_job_runs_does_not_change_a_replaced_pod(cluster: Cluster, namespace: str) -> None:
    name = f"moving-{namespace}"
    pool: Object = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingPool",
        "metadata": {"name": name},
        "spec": {"capacityType": "on-demand", "nodeSelector": {"kubernetes.io/os": "linux"}},
    }
    cluster.apply(pool, namespace=namespace)
    try:
        job = training_job("still", python("import time; time.sleep(600)"), numNodes=2, pools=[{"name": name}])
        cluster.apply(job, namespace=namespace)
        cluster.wait_phase(namespace, "still", "Running")
        before = cluster.pods(namespace, "still")
        pool["spec"]["nodeSelector"] = {"everstep.dev/pool": "nowhere"}
        cluster.apply(pool, namespace=namespace)
        cluster.kubectl("delete", "pod", "-n", namespace, "still-1", "--grace-period=1", "--wait=false")
        uid = before[1]["metadata"]["uid"]

        def replaced() -> Object | None:
            pods = cluster.pods(namespace, "still")
            return pods[1] if len(pods) == 2 and pods[1]["metadata"]["uid"] != uid else None

        pod = wait(replaced, 60, "still-1 replaced")
        assert pod["spec"]["nodeSelector"] == before[1]["spec"]["nodeSelector"]
        cluster.wait_job(namespace, "still", lambda j: phase(j) == "Running" and j["status"]["readyNodes"] == 2)
    finally:
        cluster.kubectl("delete", "trainingpool", name)

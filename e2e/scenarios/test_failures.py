"""Failures cost a restart of processes or of one pod, are charged once, and are told in status."""

from __future__ import annotations

import json

import pytest

from e2e import deploy
from e2e.harness import Cluster, Object, condition, phase, python, training_job, wait

# A rank that counts its generations in scratch that a restart in place keeps (the pod's own /tmp emptyDir or layer).
HOLD = """
import os, time, sys
print('generation', os.environ['EVERSTEP_GENERATION'], 'pod', os.environ['HOSTNAME'], flush=True)
time.sleep(600)
"""


STUBBORN = """
import os, signal, sys, time
if os.environ['RANK'] == '1':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('this is', sys.argv[1], flush=True)
time.sleep(600)
"""


def generation(job: Object) -> tuple[int, int]:
    status = job.get("status", {})
    return status.get("epoch", 0), status.get("generation", 0)


def uids(cluster: Cluster, namespace: str, job: str) -> list[str]:
    return [pod["metadata"]["uid"] for pod in cluster.pods(namespace, job)]


def running(
    cluster: Cluster, namespace: str, name: str, after: tuple[int, int] = (0, 0), timeout: float = 60
) -> Object:
    """Wait until the job runs in a later (epoch, generation) than ``after``."""
    return cluster.wait_job(
        namespace,
        name,
        lambda job: phase(job) == "Running" and generation(job) > after,
        timeout,
        f"job {name} Running after {after}",
    )


def test_a_failing_script_shows_its_own_exception(cluster: Cluster, namespace: str) -> None:
    source = """
import os, time
if os.environ['RANK'] == '1':
    raise ValueError('the answer is not 41')
time.sleep(600)
"""
    job = training_job("boom", python(source), numNodes=2, restart={"application": 0})
    cluster.apply(job, namespace=namespace)
    failed = cluster.wait_phase(namespace, "boom", "Failed")
    last = failed["status"]["lastFailure"]
    assert last["rank"] == 1
    assert last["exitCode"] == 1
    assert "ValueError: the answer is not 41" in last["message"]
    assert any("ValueError: the answer is not 41" in line for line in last["logTail"])
    assert condition(failed, "Failed")["status"] == "True"


def test_a_rank_that_exits_restarts_the_set_in_place_until_the_budget_ends(cluster: Cluster, namespace: str) -> None:
    source = "import os, sys, time\ntime.sleep(600 if os.environ['RANK'] != '2' else 0.5)\nsys.exit(3)"
    job = training_job(
        "again", python(source), numNodes=2, numProcPerNode=2, restart={"application": 3, "maxBackoff": "0s"}
    )
    cluster.apply(job, namespace=namespace)
    running(cluster, namespace, "again")
    before = uids(cluster, namespace, "again")
    failed = cluster.wait_phase(namespace, "again", "Failed")
    status = failed["status"]
    assert uids(cluster, namespace, "again") == before, "restarts happen in the same pods"
    assert status["restarts"]["application"] == 3
    charges = [charge["id"] for charge in status["restarts"]["charges"]]
    assert charges == ["1.1", "1.2", "1.3"], "each generation is charged once"
    assert status["lastFailure"]["exitCode"] == 3
    assert status["lastFailure"]["rank"] == 2


def test_nothing_of_an_old_generation_survives(cluster: Cluster, namespace: str) -> None:
    source = """
import os, sys, time, subprocess
shm = os.listdir('/dev/shm')
mark = b'remains-' + b'of-1'
alive = [p for p in os.listdir('/proc') if p.isdigit() and mark in open(f'/proc/{p}/cmdline', 'rb').read()]
print('FOUND', shm, alive, flush=True)
if os.environ['EVERSTEP_GENERATION'] == '1':
    open('/dev/shm/leftover', 'w').write('x' * 1000)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'
            os.execvp('python3', ['python3', '-c', deaf, 'remains-' + 'of-1'])
        os._exit(0)
    time.sleep(1)
    sys.exit(1)
sys.exit(0 if not shm and not alive else 7)
"""
    cluster.apply(training_job("tidy", python(source), restart={"application": 1}), namespace=namespace)
    cluster.wait_phase(namespace, "tidy", "Succeeded")
    output = cluster.all_logs(namespace, "tidy")
    assert output.count("FOUND [] []") == 2, output


@pytest.mark.parametrize("index", [0, 1])
def test_a_deleted_pod_is_replaced_alone(cluster: Cluster, namespace: str, index: int) -> None:
    cluster.apply(training_job("gone", python(HOLD), numNodes=2), namespace=namespace)
    first = running(cluster, namespace, "gone")
    before = uids(cluster, namespace, "gone")
    cluster.kubectl("delete", "pod", "-n", namespace, f"gone-{index}", "--wait=false", "--grace-period=2")
    second = running(cluster, namespace, "gone", after=generation(first))
    after = uids(cluster, namespace, "gone")
    assert after[index] != before[index]
    assert after[1 - index] == before[1 - index], "the survivor waits in place"
    assert second["status"]["restarts"]["infrastructure"] == 1
    assert second["status"]["restarts"]["application"] == 0
    assert (second["status"]["epoch"] > first["status"]["epoch"]) == (index == 0), "only a new leader raises the epoch"


def test_a_killed_container_is_replaced(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("shot", python(HOLD), numNodes=2), namespace=namespace)
    first = running(cluster, namespace, "shot")
    before = uids(cluster, namespace, "shot")
    # From inside, PID 1 is immune to its children's signals: the node's own runtime has to do it.
    deploy.kill_container(cluster, namespace, "shot", 1)
    running(cluster, namespace, "shot", after=generation(first))
    after = uids(cluster, namespace, "shot")
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_suspend_frees_all_pods_and_resume_goes_on(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("pause", python(HOLD), numNodes=2), namespace=namespace)
    first = running(cluster, namespace, "pause")
    cluster.kubectl("patch", "tj", "-n", namespace, "pause", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    suspended = cluster.wait_phase(namespace, "pause", "Suspended")
    assert condition(suspended, "Suspended")["status"] == "True"
    wait(lambda: not cluster.pods(namespace, "pause"), 30, "no pods of a suspended job")
    cluster.kubectl("patch", "tj", "-n", namespace, "pause", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    resumed = running(cluster, namespace, "pause", after=generation(first))
    assert condition(resumed, "Suspended").get("status") != "True"
    assert resumed["status"]["restarts"]["application"] == 0


def test_delete_leaves_nothing(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("trace", python(HOLD), numNodes=2), namespace=namespace)
    running(cluster, namespace, "trace")
    cluster.kubectl("delete", "tj", "-n", namespace, "trace", "--timeout=90s", timeout=100)

    def left() -> list[str]:
        kinds = ("pods", "services", "secrets", "configmaps")
        paths = [cluster.items(f"/api/v1/namespaces/{namespace}/{kind}") for kind in kinds]
        return [o["metadata"]["name"] for found in paths for o in found if o["metadata"]["name"].startswith("trace")]

    # The pods' ranks sleep through TERM only as long as Python's default handler takes: at once.
    wait(lambda: not left(), 60, "nothing of the job left")


def test_a_job_that_is_applied_anew_beside_pods_of_the_former_one_runs_its_own_manifest(
    cluster: Cluster, namespace: str
) -> None:
    """The kubelet of their node gives each pod what it has read of an immutable object, by its name."""
    node = next(each for each in cluster.items("/api/v1/nodes") if not each["spec"].get("taints"))
    # Rank 1 ends with its grace, so the first pod of the new job is made while the second one of the former job stops.
    selector = {"kubernetes.io/hostname": node["metadata"]["name"]}
    template: Object = {"nodeSelector": selector, "terminationGracePeriodSeconds": 20}
    for which in ("former", "new"):
        job = training_job("again", [*python(STUBBORN), which], numNodes=2, podTemplate={"spec": template})
        cluster.apply(job, namespace=namespace)
        running(cluster, namespace, "again")
        wait(lambda: cluster.all_logs(namespace, "again").count("this is") == 2, 30, "both ranks say what they are")
        assert cluster.all_logs(namespace, "again").count(f"this is {which}") == 2
        if which == "former":
            cluster.kubectl("delete", "tj", "-n", namespace, "again")


def test_ttl_deletes_a_finished_job(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("brief", ["true"], ttlAfterFinished="2s"), namespace=namespace)
    wait(lambda: cluster.job(namespace, "brief") is None, 60, "the finished job deleted by its TTL")


def test_startup_timeout_names_its_reason(cluster: Cluster, namespace: str) -> None:
    job = training_job("late", ["true"], image="docker.io/everstep/absent:never", timeouts={"startup": "5s"})
    cluster.apply(job, namespace=namespace)
    failed = cluster.wait_phase(namespace, "late", "Failed")
    assert condition(failed, "Failed")["reason"] == "StartupTimeout"


def test_pending_timeout_names_its_reason(cluster: Cluster, namespace: str) -> None:
    resources = {"requests": {"cpu": "10m"}, "limits": {"nvidia.com/gpu": "1000"}}
    job = training_job("never", ["true"], numProcPerNode=1, resources=resources, timeouts={"pending": "4s"})
    cluster.apply(job, namespace=namespace)
    failed = cluster.wait_phase(namespace, "never", "Failed")
    assert condition(failed, "Failed")["reason"] == "PendingTimeout"


def test_runtime_timeout_stops_the_ranks_with_grace(cluster: Cluster, namespace: str) -> None:
    source = """
import signal, sys, time
def told(*_):
    print('told to stop', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, told)
time.sleep(600)
"""
    cluster.apply(training_job("long", python(source), timeouts={"runtime": "4s"}), namespace=namespace)
    failed = cluster.wait_phase(namespace, "long", "Failed")
    assert condition(failed, "Failed")["reason"] == "RuntimeTimeout"


def test_a_template_that_only_the_pod_api_refuses(cluster: Cluster, namespace: str) -> None:
    template = {"spec": {"tolerations": [{"key": "a", "operator": "Perhaps"}]}}
    cluster.apply(training_job("odd", ["true"], podTemplate=template), namespace=namespace)
    failed = cluster.wait_phase(namespace, "odd", "Failed")
    reason = condition(failed, "Failed")
    assert reason["reason"] == "InvalidTemplate"
    assert "Perhaps" in reason["message"], json.dumps(reason)

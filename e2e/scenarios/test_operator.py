"""The operator may die at any moment: the next one reads the cluster and goes on."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest

from e2e import deploy
from e2e.harness import Cluster, Object, phase, python, training_job, wait

FLAKY = """
import os, sys, time
time.sleep(1)
sys.exit(4 if os.environ['EVERSTEP_GENERATION'] == '1' and os.environ['RANK'] == '1' else 0)
"""


def charges(job: Object) -> list[str]:
    return [charge["id"] for charge in job["status"].get("restarts", {}).get("charges", [])]


def outcome(cluster: Cluster, namespace: str, name: str) -> Object | None:
    job = cluster.job(namespace, name)
    return job if job is not None and phase(job) in ("Succeeded", "Failed") else None


def lives(cluster: Cluster, namespace: str, jobs: int, kills: int, seed: int) -> None:
    """``jobs`` jobs of three kinds live while the operator is killed ``kills`` times at random moments."""
    dice = random.Random(seed)
    for number in range(jobs):
        kind = number % 4
        if kind == 0:
            job = training_job(f"good-{number}", python("import time; time.sleep(2)"), numNodes=2)
        elif kind == 1:
            job = training_job(f"flaky-{number}", python(FLAKY), numNodes=2, restart={"application": 2})
        elif kind == 2:
            job = training_job(
                f"bad-{number}", python("raise SystemExit(5)"), restart={"application": 1, "maxBackoff": "0s"}
            )
        else:
            job = training_job(f"paused-{number}", python("import time; time.sleep(2)"), numNodes=2)
        cluster.apply(job, namespace=namespace)
    for kill in range(kills):
        time.sleep(dice.uniform(0.05, 1.5))  # the moment of the kill is the fault that is injected, not a wait
        deploy.kill_operator(cluster)
        if kill == kills // 3:
            for number in range(3, jobs, 4):
                suspend(cluster, namespace, f"paused-{number}", True)
        if kill == 2 * kills // 3:
            for number in range(3, jobs, 4):
                suspend(cluster, namespace, f"paused-{number}", False)
    for number in range(jobs):
        name = f"{('good', 'flaky', 'bad', 'paused')[number % 4]}-{number}"
        cluster.wait_phase(namespace, name, "Failed" if number % 4 == 2 else "Succeeded", timeout=240)
    for number in range(jobs):
        name = f"{('good', 'flaky', 'bad', 'paused')[number % 4]}-{number}"
        job_seen = cluster.job(namespace, name)
        assert job_seen is not None
        counted = Counter(charges(job_seen))
        assert not [c for c, times in counted.items() if times > 1], f"{name}: a generation charged twice: {counted}"
    assert not deploy.two_live_pods(namespace), "by the audit log an index had two live pods"


def suspend(cluster: Cluster, namespace: str, name: str, on: bool) -> None:
    body = json.dumps({"spec": {"suspend": on}})
    cluster.kubectl("patch", "tj", "-n", namespace, name, "--type=merge", "-p", body)


@pytest.mark.timeout(400)
def test_the_operator_is_killed_while_jobs_live(cluster: Cluster, namespace: str) -> None:
    lives(cluster, namespace, jobs=8, kills=6, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_the_operator_is_killed_at_a_hundred_moments(cluster: Cluster, namespace: str) -> None:
    lives(cluster, namespace, jobs=20, kills=100, seed=2)


@pytest.mark.timeout(180)
def test_the_api_server_restarts_under_running_jobs(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("before", python("import time; time.sleep(600)"), numNodes=2), namespace=namespace)
    cluster.wait_phase(namespace, "before", "Running")
    uids = [pod["metadata"]["uid"] for pod in cluster.pods(namespace, "before")]
    deploy.restart_apiserver(cluster)
    wait(lambda: outcome_after_apply(cluster, namespace), 90, "a job applied after the restart to succeed")
    assert [pod["metadata"]["uid"] for pod in cluster.pods(namespace, "before")] == uids
    job = cluster.job(namespace, "before")
    assert job is not None
    assert phase(job) == "Running"


def outcome_after_apply(cluster: Cluster, namespace: str) -> bool:
    cluster.apply(training_job("after", ["true"]), namespace=namespace)
    done = outcome(cluster, namespace, "after")
    return done is not None and phase(done) == "Succeeded"


@pytest.mark.timeout(180)
def test_an_upgraded_operator_leaves_jobs_untouched_and_replaces_their_pods(cluster: Cluster, namespace: str) -> None:
    cluster.apply(training_job("old", python("import time; time.sleep(600)"), numNodes=2), namespace=namespace)
    first = cluster.wait_phase(namespace, "old", "Running")
    before = [(p["metadata"]["uid"], p["metadata"]["resourceVersion"]) for p in cluster.pods(namespace, "old")]
    with deploy.another_agent(cluster):
        assert versions(cluster, namespace, "old") == before
        cluster.apply(training_job("new", python("import time; time.sleep(600)")), namespace=namespace)
        cluster.wait_phase(namespace, "new", "Running")
        cluster.kubectl("delete", "pod", "-n", namespace, "old-1", "--grace-period=1", "--wait=false")
        generation = first["status"]["generation"]

        def running_again(job: Object) -> bool:
            return phase(job) == "Running" and job["status"]["generation"] > generation

        cluster.wait_job(namespace, "old", running_again, 60, "old running again")
        survivor, replaced = cluster.pods(namespace, "old")
        assert deploy.agent_of(replaced) == deploy.agent_of(survivor), "a replacement runs what the job started with"
        assert deploy.agent_of(cluster.pods(namespace, "new")[0]) != deploy.agent_of(survivor)


def versions(cluster: Cluster, namespace: str, name: str) -> list[tuple[str, str]]:
    return [(p["metadata"]["uid"], p["metadata"]["resourceVersion"]) for p in cluster.pods(namespace, name)]

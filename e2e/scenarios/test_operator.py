"""The operator may die at any moment: the next one reads the cluster and goes on."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest

from e2e import deploy
from e2e.cluster import backend
from e2e.harness import Cluster, Object, phase, python, training_job, wait
from e2e.lives import lives, two_at_once

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


KINDS: dict[str, Callable[[str], Object]] = {
    "good": lambda name: training_job(name, python("import time; time.sleep(2)"), numNodes=2),
    "flaky": lambda name: training_job(name, python(FLAKY), numNodes=2, restart={"application": 2}),
    "bad": lambda name: training_job(
        name, python("raise SystemExit(5)"), restart={"application": 1, "maxBackoff": "0s"}
    ),
    "paused": lambda name: training_job(name, python("import time; time.sleep(2)"), numNodes=2),
    "deleted": lambda name: training_job(name, python("import time; time.sleep(600)"), numNodes=2),
}


def jobs_live_while_the_operator_is_killed(cluster: Cluster, namespace: str, jobs: int, kills: int, seed: int) -> None:
    """``jobs`` jobs of every kind, begun one after the other, while the operator dies ``kills`` times."""
    dice = random.Random(seed)
    names = [f"{kind}-{number}" for number, kind in zip(range(jobs), cycle(KINDS), strict=False)]
    acts: dict[int, list[Callable[[], object]]] = defaultdict(list)
    for number, name in enumerate(names):
        kind = kind_of(name)
        begin, later = number * kills // (2 * jobs), max(1, kills // 6)
        acts[begin].append(partial(cluster.apply, KINDS[kind](name), namespace=namespace))
        if kind == "paused":
            acts[begin + later].append(partial(suspend, cluster, namespace, name, True))
            acts[begin + 2 * later].append(partial(suspend, cluster, namespace, name, False))
        elif kind == "deleted":
            acts[begin + later].append(partial(delete, cluster, namespace, name))
    for kill in range(kills):
        for act in acts.pop(kill, ()):
            act()
        time.sleep(dice.uniform(0.05, 1.5))  # the moment of the kill is the fault that is injected, not a wait
        deploy.kill_operator(cluster)
    assert not acts, "every act falls between two kills"

    for name in names:
        ends_as_it_would_have(cluster, namespace, name)
    seen = lives(backend.local_cluster().control.read_audit_log(), namespace)
    assert {life.job for life in seen} >= {name for name in names if kind_of(name) != "deleted"}
    assert not two_at_once(seen)


def kind_of(name: str) -> str:
    return name.partition("-")[0]


def ends_as_it_would_have(cluster: Cluster, namespace: str, name: str) -> None:
    kind = kind_of(name)
    if kind == "deleted":
        wait(lambda: not left_of(cluster, namespace, name), 240, f"nothing left of {name}")
        return
    cluster.wait_phase(namespace, name, "Failed" if kind == "bad" else "Succeeded", timeout=240)
    job = cluster.job(namespace, name)
    assert job is not None
    counted = Counter(charges(job))
    assert not [c for c, times in counted.items() if times > 1], f"{name}: a generation charged twice: {counted}"
    assert len(counted) == (1 if kind in ("flaky", "bad") else 0), f"{name}: {counted}"


def delete(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.kubectl("delete", "tj", "-n", namespace, name, "--wait=false")


def left_of(cluster: Cluster, namespace: str, name: str) -> str:
    kinds = "tj,pods,services,secrets,configmaps"
    found = cluster.kubectl("get", kinds, "-n", namespace, "-o", "name").split()
    return " ".join(item for item in found if item.partition("/")[2].startswith(name))


def suspend(cluster: Cluster, namespace: str, name: str, on: bool) -> None:
    body = json.dumps({"spec": {"suspend": on}})
    cluster.kubectl("patch", "tj", "-n", namespace, name, "--type=merge", "-p", body)


@pytest.mark.timeout(400)
def test_the_operator_is_killed_while_jobs_live(cluster: Cluster, namespace: str) -> None:
    jobs_live_while_the_operator_is_killed(cluster, namespace, jobs=10, kills=12, seed=1)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_the_operator_is_killed_at_a_hundred_moments(cluster: Cluster, namespace: str) -> None:
    jobs_live_while_the_operator_is_killed(cluster, namespace, jobs=20, kills=100, seed=2)


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
    before = cluster.versions(namespace, "old")
    with deploy.another_agent(cluster):
        assert cluster.versions(namespace, "old") == before
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

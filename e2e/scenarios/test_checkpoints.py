"""A rank, a pod or all pods that end cost no more than the steps since the last save, and the status says so."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from e2e.harness import Cluster, Object, phase, python, training_job, wait
from e2e.stores import PodStore, pod_store

# Two ranks; one of them exits after the fifth save of the first generation, without a word to anybody.
SAVES = """
import os, torch, torch.distributed as dist, everstep
dist.init_process_group('gloo')
first, rank = os.environ['EVERSTEP_GENERATION'] == '1', dist.get_rank()
weight = torch.nn.Parameter(torch.zeros(1 << 20))
with everstep.checkpointer('/opt/ml/checkpoints', every_steps=1, policy='wait') as checkpoints:
    start = checkpoints.restore(weight=weight.data)
    weight_now = f'{weight.data[-1].item():g}'
    print('rank', rank, 'begins at', start.step, 'from', start.tier or 'nothing', 'with', weight_now, flush=True)
    for step in range(start.step + 1, 9):
        weight.data += 1
        checkpoints.step(step)
        if first and step == 5:
            checkpoints.wait()
            if rank == 1:
                os._exit(3)
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_ranks_that_are_started_again_in_place_restore_from_memory(cluster: Cluster, namespace: str) -> None:
    job = training_job(
        "crash",
        python(SAVES),
        image="everstep/trainer:0.1.0",
        numNodes=1,
        numProcPerNode=2,
        restart={"maxBackoff": "0s"},
        resources={"requests": {"cpu": "100m", "memory": "1Gi"}},
    )
    cluster.apply(job, namespace=namespace)
    ended = cluster.wait_phase(namespace, "crash", "Succeeded", timeout=120)
    assert ended["status"]["restarts"]["application"] == 1
    begins = re.findall(r"rank (\d) begins at (\d+) from (\w+) with (\d+)", cluster.all_logs(namespace, "crash"))
    assert sorted(begins) == [(r, s, t, s) for r in "01" for s, t in (("0", "nothing"), ("5", "memory"))]


# Saves every second step; ends with the same sum of weights however often it is interrupted. Its last step waits for
# what is to break before.
GOES_ON = """
import os, pathlib, time, torch, torch.distributed as dist, everstep
dist.init_process_group('gloo')
torch.manual_seed(0)
model, rank = torch.nn.Linear(64, 64), dist.get_rank()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with everstep.checkpointer() as checkpoints:
    start = checkpoints.restore(model=model, optimizer=optimizer)
    for step in range(start.step + 1, 201):
        optimizer.zero_grad()
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        checkpoints.step(step)
        everstep.progress(step, total=200)
        time.sleep(0.2)
print('rank', rank, 'sum', model.weight.double().sum().item(), flush=True)
dist.destroy_process_group()
"""
KILL_RANK = 'kill -9 $(cut -d" " -f1 /proc/1/task/1/children)'
needs_own_cluster = pytest.mark.skipif("KUBECONFIG" in os.environ, reason="its pods may not reach this machine")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodStore]:
    with pod_store(tmp_path_factory.mktemp("store")) as found:
        yield found


def saving_job(name: str, store: PodStore) -> Object:
    return training_job(
        name,
        python(GOES_ON),
        image="everstep/trainer:0.1.0",
        numNodes=2,
        numProcPerNode=1,
        checkpoint=store.policy(name, everySteps=2),
        restart={"maxBackoff": "0s"},
        resources={"requests": {"cpu": "100m", "memory": "1Gi"}},
    )


def wait_until_saved(cluster: Cluster, namespace: str, name: str, store: PodStore, step: int) -> Object:
    """Wait until a checkpoint of this step or a later one is in the store, and return the job."""
    wait(lambda: store.newest_step(name) >= step, 120, f"{name} has saved step {step}")
    found = cluster.job(namespace, name)
    assert found is not None
    return found


def wait_until_restored(cluster: Cluster, namespace: str, name: str, after: Object) -> Object:
    before = ((after["status"].get("checkpoint") or {}).get("restored") or {}).get("id")

    def restored(job: Object) -> bool:
        found = (job["status"].get("checkpoint") or {}).get("restored") or {}
        return found.get("id") != before and phase(job) == "Running"

    ended = cluster.wait_job(namespace, name, restored, 120, f"{name} has restored")
    found: Object = ended["status"]["checkpoint"]["restored"]
    return found


@needs_own_cluster
@pytest.mark.timeout(400)
def test_a_rank_and_a_pod_that_end_cost_the_steps_since_the_last_save(
    cluster: Cluster, namespace: str, store: PodStore
) -> None:
    calm = saving_job("calm", store)
    cluster.apply(store.secret(), calm, saving_job("storm", store), namespace=namespace)

    before = wait_until_saved(cluster, namespace, "storm", store, 10)
    cluster.kubectl("exec", "-n", namespace, "storm-1", "--", "sh", "-c", KILL_RANK)
    crashed = wait_until_restored(cluster, namespace, "storm", before)
    assert crashed["tier"] == "memory"
    assert crashed["step"] >= 10
    assert crashed["lostSteps"] <= 4, "every second step is saved"

    before = wait_until_saved(cluster, namespace, "storm", store, crashed["step"] + 10)
    cluster.kubectl("delete", "pod", "-n", namespace, "storm-1", "--grace-period=1", "--wait=false")
    replaced = wait_until_restored(cluster, namespace, "storm", before)
    assert replaced["tier"] == "peer", "the other pod holds a copy"
    assert replaced["lostSteps"] <= 4

    before = wait_until_saved(cluster, namespace, "storm", store, replaced["step"] + 10)
    cluster.kubectl("delete", "pod", "-n", namespace, "storm-0", "storm-1", "--grace-period=1", "--wait=false")
    both = wait_until_restored(cluster, namespace, "storm", before)
    assert both["tier"] == "store", "nobody's memory has it"

    ended = [cluster.wait_phase(namespace, name, "Succeeded", timeout=120) for name in ("storm", "calm")]
    sums = {name: set(re.findall(r"sum (\S+)", cluster.all_logs(namespace, name))) for name in ("storm", "calm")}
    assert len(sums["calm"]) == 1
    assert sums["storm"] == sums["calm"]
    assert ended[0]["status"]["checkpoint"]["step"] == 200
    assert store.newest_step("storm") == 200
    events = cluster.items(f"/api/v1/namespaces/{namespace}/events", fieldSelector="involvedObject.name=storm")
    assert len([event for event in events if event["reason"] == "Restored"]) >= 4


@needs_own_cluster
@pytest.mark.timeout(300)
def test_a_pod_that_is_told_to_stop_costs_no_step(cluster: Cluster, namespace: str, store: PodStore) -> None:
    """A drain, or the shutdown of a node: the TERM of the leader's own pod is all that anybody hears, and no save is
    due."""
    name = "drained"
    job = saving_job(name, store)
    job["spec"]["checkpoint"]["everySteps"] = 10_000
    cluster.apply(store.secret(), job, namespace=namespace)
    trains = cluster.wait_job(namespace, name, lambda job: _trained(job) >= 5, 120, f"{name} has made five steps")
    cluster.kubectl("delete", "pod", "-n", namespace, f"{name}-0", "--wait=false")
    restored = wait_until_restored(cluster, namespace, name, trains)
    assert restored["step"] >= 5
    assert restored.get("lostSteps", 0) == 0
    found = cluster.job(namespace, name)
    assert found is not None
    assert found["status"]["restarts"]["application"] == 0


def _trained(job: Object) -> int:
    return int((job.get("status", {}).get("progress") or {}).get("step") or 0)


HANGS = """
import os, threading, torch.distributed as dist, everstep
dist.init_process_group('gloo')
first, rank = os.environ['EVERSTEP_GENERATION'] == '1', dist.get_rank()

def waits_for_nobody():
    threading.Event().wait()

for step in range(1, 6):
    if first and rank == 1 and step == 4:
        waits_for_nobody()
    dist.barrier()
    everstep.progress(step, total=5)
print('done', rank, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_a_rank_that_hangs_leaves_its_stack_and_training_goes_on(cluster: Cluster, namespace: str) -> None:
    job = training_job(
        "hangs",
        python(HANGS),
        image="everstep/trainer:0.1.0",
        numNodes=2,
        numProcPerNode=1,
        restart={"maxBackoff": "0s"},
        timeouts={"hang": "5s"},
        resources={"requests": {"cpu": "100m", "memory": "1Gi"}},
    )
    cluster.apply(job, namespace=namespace)
    ended = cluster.wait_phase(namespace, "hangs", "Succeeded", timeout=120)
    failure = ended["status"]["lastFailure"]
    assert (failure["reason"], failure["cause"]) == ("Hang", "Application")
    assert failure["message"].startswith("no step for 5 s (timeouts.hang): ")
    assert "in waits_for_nobody" in cluster.logs(namespace, "hangs-1")
    assert ended["status"]["restarts"]["application"] == 1


# Ends after ten more steps than it finds.
TEN_MORE = """
import os, torch, torch.distributed as dist, everstep
dist.init_process_group('gloo')
model = torch.nn.Linear(8, 8)
with everstep.checkpointer() as checkpoints:
    start = checkpoints.restore(model=model).step
    print('begins at', start, flush=True)
    for step in range(start + 1, start + 11):
        checkpoints.save(step)
dist.destroy_process_group()
"""


@needs_own_cluster
@pytest.mark.timeout(300)
def test_a_job_that_is_applied_anew_goes_on_and_another_one_does_not_take_its_store(
    cluster: Cluster, namespace: str, store: PodStore
) -> None:
    def make(name: str) -> Object:
        return training_job(
            name,
            python(TEN_MORE),
            image="everstep/trainer:0.1.0",
            numNodes=1,
            numProcPerNode=1,
            checkpoint=store.policy("owned"),
            restart={"application": 2, "maxBackoff": "0s"},
            resources={"requests": {"cpu": "50m", "memory": "512Mi"}},
        )

    for begins in (0, 10):
        cluster.apply(store.secret(), make("mine"), namespace=namespace)
        ended = cluster.wait_phase(namespace, "mine", "Succeeded", timeout=120)
        assert ended["status"]["restarts"]["total"] == 0, "a former job of the name keeps nobody from going on"
        assert re.findall(r"begins at (\d+)", cluster.all_logs(namespace, "mine")) == [str(begins)]
        cluster.kubectl("delete", "tj", "-n", namespace, "mine")
    cluster.apply(make("other"), namespace=namespace)
    failed = cluster.wait_phase(namespace, "other", "Failed", timeout=120)
    assert failed["status"]["restarts"]["application"] == 2, "it was refused at each start"
    assert f"is the store of job {namespace}/mine" in failed["status"]["lastFailure"]["message"]
    assert store.newest_step("owned") == 20

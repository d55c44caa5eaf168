"""Whatever breaks within ten minutes, a run ends with the weights and the losses of an undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e import deploy
from e2e.cluster import backend
from e2e.harness import Cluster, Object, phase, python, training_job, wait
from e2e.lives import lives, two_at_once
from e2e.scenarios.test_lost_nodes import APART, find_victim
from e2e.scenarios.test_notices import SPOT
from e2e.stores import PodStore, pod_store

STEPS = 1200
KILL_RANK = 'kill -9 $(cut -d" " -f1 /proc/1/task/1/children)'

# The example as it is, which tells each loss as an exact number, and the sum of the bytes of what it has learned.
PROGRAM = """
import hashlib, os, sys, time
sys.path.insert(0, '/opt/everstep/examples/char-lm')
import torch, everstep
tell, save, rank = everstep.progress, torch.save, int(os.environ['RANK'])
def progress(step, **more):
    if 'loss' in more:
        print('TELL', rank, step, more['loss'].hex(), flush=True)
        time.sleep(PAUSE)
    return tell(step, **more)
def save_and_tell(state, path):
    print('WEIGHTS', hashlib.sha256(b''.join(v.numpy().tobytes() for v in state.values())).hexdigest(), flush=True)
    save(state, path)
everstep.progress, torch.save = progress, save_and_tell
import train
train.main()
"""


class Run:
    """A job in the cluster, and what its ranks have told so far, also in pods that are gone since."""

    def __init__(self, cluster: Cluster, namespace: str, store: PodStore, name: str, pause: float) -> None:
        self.cluster, self.namespace, self.store, self.name = cluster, namespace, store, name
        self.losses: dict[tuple[int, int], set[str]] = defaultdict(set)  # by rank and step: one value, if all is well
        self.weights: set[str] = set()
        self.given_up: set[str] = set()  # UIDs of pods whose machines are dead or cut off: nobody waits for their end
        job = training_job(
            name,
            python(PROGRAM.replace("PAUSE", str(pause))),
            image="everstep/trainer:0.1.0",
            numNodes=2,
            hyperparameters={"steps": str(STEPS), "save-every": "20", "batch-size": "4", "context": "32"},
            # All are kept: who committed them, and in which order, is looked at in the end.
            checkpoint=store.policy(name, keepLast=100),
            restart={"maxBackoff": "0s", "application": 3},
            resources={"requests": {"cpu": "100m", "memory": "512Mi"}},
            podTemplate={"spec": {"affinity": APART}},
        )
        cluster.apply(job, namespace=namespace)

    def pods(self) -> dict[str, Object]:
        """Return the job's pods, by name."""
        return {pod["metadata"]["name"]: pod for pod in self.cluster.pods(self.namespace, self.name)}

    def look(self) -> Object:
        """Read what is new in the logs; return the job."""
        for name in self.pods():
            text = self.cluster.logs(self.namespace, name)
            for rank, step, loss in re.findall(r"TELL (\d+) (\d+) (\S+)\n", text):
                self.losses[int(rank), int(step)].add(loss)
            self.weights |= set(re.findall(r"WEIGHTS (\w+)\n", text))
        job = self.cluster.job(self.namespace, self.name)
        assert job is not None
        assert phase(job) != "Failed", self.cluster.explain(self.namespace, self.name)
        return job

    @property
    def step(self) -> int:
        """The last step that both ranks have told."""
        return min(max((step for of, step in self.losses if of == rank), default=0) for rank in (0, 1))

    def wait(self, until: Callable[[Object], object], seconds: float, what: str) -> Object:
        def look() -> Object | None:
            job = self.look()
            return job if until(job) else None

        return wait(look, seconds, f"{self.name}: {what}")

    def go_on(self, steps: int = 15) -> None:
        """Wait until both ranks have made so many steps that nobody has made before."""
        target = self.step + steps
        self.wait(lambda _: self.step >= target, 240, f"step {target} after {self.step}")


@pytest.fixture
def store(cluster: Cluster, namespace: str) -> Iterator[PodStore]:
    with tempfile.TemporaryDirectory(prefix="storm-") as folder, pod_store(Path(folder)) as made:
        cluster.apply(made.secret(), namespace=namespace)
        yield made


@pytest.mark.chaos
@pytest.mark.skipif("KUBECONFIG" in os.environ, reason="breaks nodes, which are somebody's here")
@pytest.mark.timeout(2000)
def test_a_storm_leaves_weights_and_losses_as_they_are_without_it(
    cluster: Cluster, namespace: str, store: PodStore
) -> None:
    calm = Run(cluster, namespace, store, "calm", 0.0)
    calm.wait(lambda job: phase(job) == "Succeeded", 600, "ends")
    calm.look()

    run = Run(cluster, namespace, store, "stormy", 0.15)
    run.wait(lambda _: run.step > 20, 180, "trains")
    began = time.monotonic()
    _crash_rank(run)
    _announce_node(run)
    _kill_node(run)
    _crash_rank(run)
    deploy.kill_operator(cluster)
    run.go_on()
    _cut_off_node(run)
    _corrupt_newest_checkpoint(run)
    _announce_node(run)
    _crash_rank(run)
    assert run.step < STEPS, "all of it came while the run trained"
    print(f"the storm took {time.monotonic() - began:.0f} s")
    job = run.wait(lambda job: phase(job) == "Succeeded", 400, "ends")
    run.look()

    assert calm.weights
    assert run.weights == calm.weights
    both = [(rank, step) for rank in (0, 1) for step in range(1, STEPS + 1)]
    assert [key for key in both if run.losses[key] != calm.losses[key] or len(calm.losses[key]) != 1] == []
    restarts = job["status"]["restarts"]
    ids = [charge["id"] for charge in restarts["charges"]]
    assert len(ids) == len(set(ids)), f"a generation is charged twice: {ids}"
    seen = lives(backend.local_cluster().control.read_audit_log(), namespace)
    for life in seen:
        life.forced &= life.uid not in run.given_up
    assert not two_at_once(seen)
    _assert_publishers_followed_each_other(store, run.name)


def _crash_rank(run: Run) -> None:
    run.cluster.exec(run.namespace, f"{run.name}-1", "sh", "-c", KILL_RANK)
    run.go_on()


def _announce_node(run: Run) -> None:
    """Let a node be reclaimed, as its provider says; it is whole again once the pod has left."""
    pod, node = find_victim(run.cluster, run.namespace, run.name)
    run.cluster.kubectl("taint", "node", node, f"{SPOT}=notice:NoSchedule")
    try:
        run.wait(lambda _: _find_node(run, pod) not in (node, ""), 240, f"{pod} leaves")
    finally:
        run.cluster.kubectl("taint", "node", node, f"{SPOT}-")
    run.go_on()


def _find_node(run: Run, name: str) -> str:
    """Return the node of a pod; nothing while it has none."""
    pod = run.pods().get(name)
    return str(pod["spec"].get("nodeName", "")) if pod is not None else ""


def _give_up_node(run: Run) -> str:
    """Return a node with a pod of the job that the operator is to give up."""
    name, node = find_victim(run.cluster, run.namespace, run.name)
    run.given_up.add(run.pods()[name]["metadata"]["uid"])
    return node


def _kill_node(run: Run) -> None:
    node = _give_up_node(run)
    backend.faulty().kill_node(node)
    try:
        run.go_on()
    finally:
        backend.faulty().restart_node(node)


def _cut_off_node(run: Run) -> None:
    """Cut a node off for longer than it takes to be given up, so that its ranks still run when it is back."""
    node = _give_up_node(run)
    backend.faulty().partition_node(node)
    try:
        run.go_on()
    finally:
        backend.faulty().heal_node(node)
    run.go_on()


def _corrupt_newest_checkpoint(run: Run) -> None:
    """Damage the newest checkpoint in the store while no memory holds another copy."""
    _suspend(run, True)
    run.wait(lambda job: phase(job) == "Suspended", 120, "is suspended")
    wait(lambda: not run.cluster.pods(run.namespace, run.name), 120, "its pods are gone")
    newest = max((run.store.folder / run.name / "manifests").glob("*.json"))
    attempt, _, step = newest.stem.partition("-")
    for part in (run.store.folder / run.name / "data" / attempt / step).glob("*.part"):
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    _suspend(run, False)
    run.go_on()


def _suspend(run: Run, on: bool) -> None:
    body = json.dumps({"spec": {"suspend": on}})
    run.cluster.kubectl("patch", "tj", "-n", run.namespace, run.name, "--type=merge", "-p", body)


def _assert_publishers_followed_each_other(store: PodStore, name: str) -> None:
    """No attempt has committed anything after a later one has."""
    manifests = [
        json.loads(path.read_text().splitlines()[0]) for path in (store.folder / name).glob("manifests/*.json")
    ]
    attempts = [manifest["attempt"] for manifest in sorted(manifests, key=lambda each: each["created"])]
    assert len(set(attempts)) > 1
    assert attempts == sorted(attempts)

"""`make bench-recovery`: what breaks on a real cluster, until all ranks have trained a step again."""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.ending import clean_up_on_term
from benchmarks.indexed_job import IndexedJob
from benchmarks.interval import Interval
from benchmarks.measure import report
from e2e import deploy
from e2e.cluster import backend
from e2e.harness import Cluster, Object, phase, python, training_job, wait
from e2e.stores import PodStore, pod_store

RESULT = Path("build/bench/recovery.json")
REPEATS = 5
KILL_RANK = 'kill -9 $(cut -d" " -f1 /proc/1/task/1/children)'
_numbers = itertools.count()

# Tells each step and its time; the clock is that of the machine, which all nodes of a local cluster share.
TRAINS = """
import os, time
ticks = int(open('/proc/self/stat').read().rpartition(')')[2].split()[19]) / os.sysconf('SC_CLK_TCK')
began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks
import torch, torch.distributed as dist, everstep
dist.init_process_group('gloo')
attempt = os.environ['EVERSTEP_EPOCH'] + '.' + os.environ['EVERSTEP_GENERATION']
print('TELL imported', attempt, time.time() - began, flush=True)
weight, rank = torch.zeros(BYTES // 4), dist.get_rank()
root = next(p for p in ('/sys/fs/cgroup/', '/sys/fs/cgroup/memory/') if os.path.exists(p + 'memory.stat'))
def tell_memory():
    used = dict(line.split() for line in open(root + 'memory.stat'))
    files = (root + name for name in ('memory.max', 'memory.limit_in_bytes'))
    limit = next(open(file).read() for file in files if os.path.exists(file))
    print('TELL memory', used.get('anon') or used['rss'], used['shmem'], limit.strip(), flush=True)
with everstep.checkpointer() as checkpoints:
    start = checkpoints.restore(weight=weight)
    print('TELL ready', attempt, time.time(), flush=True)
    for step in range(start.step + 1, 100000):
        weight[:1000] += 1
        dist.all_reduce(torch.zeros(1))
        checkpoints.step(step)
        everstep.progress(step)
        tell_memory()
        print('TELL step', attempt, step, time.time(), flush=True)
        if CRASH and attempt == '1.1' and step == CRASH:
            checkpoints.wait()
            print('TELL exit', attempt, step, time.time(), flush=True)
            os._exit(3)
        time.sleep(0.1)
"""
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchExpressions": [{"key": "everstep.dev/job", "operator": "Exists"}]},
            }
        ]
    }
}


@dataclass(frozen=True)
class Site:
    """A place to break things: a cluster, a namespace of it, and a store that its pods reach."""

    cluster: Cluster
    namespace: str
    store: PodStore


@dataclass(frozen=True)
class Row:
    """A measurement, and its target in the unit; `floor` is the same fault under an Indexed Job."""

    target: float
    measure: Callable[[Site], float]
    unit: str = "s"
    repeats: int = REPEATS
    floor: Callable[[Site], float] | None = None
    floors: int = REPEATS


def main(names: Annotated[list[str] | None, typer.Argument(help="Rows; all when none is named.")] = None) -> None:
    """Measure, print tables, write build/bench/recovery.json; exit 1 when a row misses its target."""
    unknown = set(names or ()) - set(ROWS)
    if unknown:
        raise typer.BadParameter(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    clean_up_on_term()
    console = Console(width=None if sys.stdout.isatty() else 120)
    report(measured(names or list(ROWS)), console, RESULT)


def measured(names: list[str]) -> Iterator[Interval]:
    with (
        deploy.cluster() as cluster,
        cluster.namespace("recovery") as namespace,
        tempfile.TemporaryDirectory(prefix="recovery-") as folder,
        pod_store(Path(folder)) as store,
    ):
        cluster.apply(store.secret(), namespace=namespace)
        site = Site(cluster, namespace, store)
        for name in names:
            row = ROWS[name]
            samples = {"ours": [row.measure(site) for _ in range(row.repeats)]}
            if row.floor is not None:
                samples["floor"] = [row.floor(site) for _ in range(row.floors)]
            yield Interval(name, row.unit, row.target, samples, absolute=True)


def crash_rank(site: Site) -> float:
    """Return the seconds from a rank's exit to the next step, without what its imports take; 1 GB, from memory."""
    name = start_job(site, nodes=1, size=1_000_000_000, crash=25, memory="6Gi")
    try:
        told = wait_for_step(site, name, "1.2")
        assert read_restored_tier(site, name, "1.2") == "memory"
        return told["step 1.2"] - told["exit 1.1"] - told["imported 1.2"]
    finally:
        delete_job(site, name)


def crash_rank_of_indexed_job(site: Site) -> float:
    """Return the same for an Indexed Job, whose state comes from the store."""
    job = IndexedJob(site.cluster, site.namespace, site.store)
    try:
        job.start(1, 1_000_000_000, {}, crash=25, memory="6Gi")
        return job.wait_for_step(job.find_exit) - job.read_imports()
    finally:
        job.delete()


def delete_pod(site: Site) -> float:
    """Return the seconds from the deletion of a pod to the next step; its share comes from the other pod."""
    name = start_job(site, nodes=2, size=64_000_000)
    try:
        wait(lambda: site.store.newest_step(name) >= 20, 120, "a checkpoint is stored")
        began = time.time()
        site.cluster.kubectl("delete", "pod", "-n", site.namespace, f"{name}-1", "--grace-period=1", "--wait=false")
        told = wait_for_step(site, name, "1.2")
        assert read_restored_tier(site, name, "1.2") == "peer"
        return told["step 1.2"] - began
    finally:
        delete_job(site, name)


def delete_pod_of_indexed_job(site: Site) -> float:
    """Return the same for an Indexed Job, both of whose ranks start anew from the store."""
    job = IndexedJob(site.cluster, site.namespace, site.store)
    try:
        job.start(2, 64_000_000, {})
        began = time.time()
        pod = job.pods()[1]["metadata"]["name"]
        site.cluster.kubectl("delete", "pod", "-n", site.namespace, pod, "--grace-period=1", "--wait=false")
        return job.wait_for_step(lambda: began)
    finally:
        job.delete()


def kill_node(site: Site) -> float:
    """Return the seconds from the loss of a node's power to the next step; pod 0 is elsewhere."""
    return _kill_node_of(site, 1, "1.2")


def kill_node_of_leader(site: Site) -> float:
    """Return the seconds from the loss of the power of pod 0's node to the next step."""
    return _kill_node_of(site, 0, "2.1")


def kill_node_of_indexed_job(site: Site, index: int) -> float:
    """Return the seconds from the loss of the power of the node of an Indexed Job's pod to the next step."""
    job = IndexedJob(site.cluster, site.namespace, site.store)
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"indexed": job.name}}}
    node = ""
    try:
        job.start(2, 64_000_000, {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}})
        node = str(job.pods()[index]["spec"]["nodeName"])
        began = time.time()
        backend.faulty().kill_node(node)
        return job.wait_for_step(lambda: began)
    finally:
        if node:
            backend.faulty().restart_node(node)
        job.delete()


def _kill_node_of(site: Site, index: int, attempt: str) -> float:
    name, node = _start_away_from_operator(site, index)
    try:
        wait(lambda: site.store.newest_step(name) >= 20, 120, "a checkpoint is stored")
        began = time.time()
        backend.faulty().kill_node(node)
        told = wait_for_step(site, name, attempt, seconds=400)
        return told[f"step {attempt}"] - began
    finally:
        backend.faulty().restart_node(node)
        delete_job(site, name)


def notice_spot_node(site: Site) -> float:
    """Return the seconds in which nobody trains after a spot notice of 120 s, less the start of the new pod.

    That is: the save that was asked for, the departure of its pod, the restore, and what the operator takes. No step
    may be lost.
    """
    name, node = _start_away_from_operator(site, 1)
    taint = "aws-node-termination-handler/spot-itn"
    try:
        wait(lambda: site.store.newest_step(name) >= 20, 120, "a checkpoint is stored")
        site.cluster.kubectl("taint", "node", node, f"{taint}=true:NoSchedule", "--overwrite")
        told = wait_for_step(site, name, "1.2", seconds=240)
        restored = read_restored(site, name, "1.2")
        assert restored.get("lostSteps", 0) == 0, restored
        (pod,) = (p for p in site.cluster.pods(site.namespace, name) if p["metadata"]["name"] == f"{name}-1")
        created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()
        return told["step 1.2"] - told["last 1.1"] - (told["ready 1.2"] - created)
    finally:
        site.cluster.kubectl("taint", "node", node, f"{taint}-", check=False)
        delete_job(site, name)


def restart_kubelet(site: Site) -> float:
    """Return the longest pause between two steps while the kubelet of a node is killed and comes back."""
    return _measure_pause(site, lambda node: backend.faulty().restart_kubelet(node), 20.0)


def kill_operator(site: Site) -> float:
    """Return the longest pause between two steps while the operator is killed and comes back."""
    return _measure_pause(site, lambda node: deploy.kill_operator(site.cluster), 30.0)


def take_api_server_away(site: Site) -> float:
    """Return the longest pause between two steps while there is no API server for a minute."""
    return _measure_pause(site, lambda node: backend.faulty().restart_apiserver(60.0), 30.0)


def measure_memory(site: Site) -> float:
    """Return the largest part of its limit that a pod has used: 2 pods of 2 ranks with a state of 1 GB, 20 saves and 5
    crashes of ranks."""
    name = start_job(site, nodes=2, procs=2, size=1_000_000_000, memory="6Gi", is_limited=True)
    try:
        for crash in range(1, 6):
            step = 40 * crash
            wait(partial(_is_stored, site, name, step), 300, f"step {step} is stored")
            site.cluster.kubectl("exec", "-n", site.namespace, f"{name}-1", "--", "sh", "-c", KILL_RANK)
            wait_for_step(site, name, f"1.{crash + 1}")
        parts = []
        for pod in site.cluster.pods(site.namespace, name):
            text = site.cluster.logs(site.namespace, pod["metadata"]["name"])
            told = [tuple(map(int, each)) for each in re.findall(r"TELL memory (\d+) (\d+) (\d+)", text)]
            anonymous, shared, limit = max(told, key=sum)
            print(f"{pod['metadata']['name']}: {anonymous=}, {shared=}, {limit=}", file=sys.stderr)
            parts.append((anonymous + shared) / limit)
        return max(parts)
    finally:
        delete_job(site, name)


def _is_stored(site: Site, name: str, step: int) -> bool:
    return site.store.newest_step(name) >= step


def _measure_pause(site: Site, disturb: Callable[[str], None], seconds: float) -> float:
    """Return the longest pause between two steps of a rank, from the disturbance to so many seconds after it; the
    generation must stay the same."""
    name = start_job(site, nodes=2, size=64_000_000, spread=True)
    try:
        wait(lambda: site.store.newest_step(name) >= 20, 120, "a checkpoint is stored")
        node = str(site.cluster.pods(site.namespace, name)[1]["spec"]["nodeName"])
        began = time.time()
        disturb(node)
        until = time.time() + seconds
        told = wait(lambda: _read_steps(site, name, until), seconds + 120, f"{name} goes on")
        job = site.cluster.job(site.namespace, name)
        assert job is not None
        assert (job["status"]["epoch"], job["status"]["generation"]) == (1, 1), job["status"]
        return max(
            later - earlier
            for steps in told
            for earlier, later in itertools.pairwise(steps)
            if later > began and earlier < until
        )
    finally:
        delete_job(site, name)


def _read_steps(site: Site, name: str, until: float) -> list[list[float]] | None:
    """Return the times of all steps of each pod, once all have told one after `until`."""
    found = []
    for pod in site.cluster.pods(site.namespace, name):
        text = site.cluster.logs(site.namespace, pod["metadata"]["name"])
        found.append([float(at) for at in re.findall(r"TELL step 1\.1 \d+ (\S+)", text)])
    return found if found and all(steps and steps[-1] > until for steps in found) else None


def _start_away_from_operator(site: Site, index: int) -> tuple[str, str]:
    """Return a job of two nodes, and the node of this pod, on which no operator runs: its own recovery is another
    matter."""
    for _ in range(10):
        name = start_job(site, nodes=2, size=64_000_000, spread=True)
        pods = site.cluster.pods(site.namespace, name)
        node = str(pods[index]["spec"]["nodeName"])
        operators = site.cluster.items(f"/api/v1/namespaces/{deploy.SYSTEM}/pods")
        if node not in {pod["spec"].get("nodeName") for pod in operators}:
            return name, node
        delete_job(site, name)
    raise AssertionError("the scheduler places this pod beside the operator, again and again")


def start_job(
    site: Site,
    *,
    nodes: int,
    size: int,
    procs: int = 1,
    crash: int = 0,
    memory: str = "1Gi",
    spread: bool = False,
    is_limited: bool = False,
) -> str:
    """Create a job that trains until it is deleted, wait until it runs, and return its name."""
    name = f"recovery-{next(_numbers)}"
    program = TRAINS.replace("BYTES", str(size)).replace("CRASH", str(crash))
    job = training_job(
        name,
        python(program),
        image="everstep/trainer:0.1.0",
        numNodes=nodes,
        numProcPerNode=procs,
        checkpoint=site.store.policy(name, everySteps=10),
        restart={"maxBackoff": "0s", "application": 9},
        resources={
            "requests": {"cpu": "100m", "memory": memory},
            "limits": {"memory": memory} if is_limited else {},
        },
        podTemplate={"spec": {"affinity": APART if spread else {}}},
    )
    site.cluster.apply(job, namespace=site.namespace)
    site.cluster.wait_job(site.namespace, name, lambda job: phase(job) == "Running", 120, f"{name} runs")
    return name


def wait_for_step(site: Site, name: str, attempt: str, seconds: float = 180) -> dict[str, float]:
    """Wait until all pods have told a step of an attempt, and return what they told: of steps the latest first one."""

    def look() -> dict[str, float] | None:
        found: dict[str, float] = {}
        pods = [pod["metadata"]["name"] for pod in site.cluster.pods(site.namespace, name)]
        for pod in pods:
            text = site.cluster.logs(site.namespace, pod)
            first = re.search(rf"TELL step {re.escape(attempt)} \d+ (\S+)", text)
            if first is None:
                return None
            for kind, of, value in re.findall(r"TELL (imported|exit|ready) (\S+)(?: \d+)? (\S+)", text):
                found[f"{kind} {of}"] = float(value)
            for of, value in re.findall(r"TELL step (\S+) \d+ (\S+)", text):
                found[f"last {of}"] = max(found.get(f"last {of}", 0.0), float(value))
            found[f"step {attempt}"] = max(found.get(f"step {attempt}", 0.0), float(first[1]))
        return found if len(pods) and found else None

    return wait(look, seconds, f"{name} trains in {attempt}")


def read_restored_tier(site: Site, name: str, attempt: str) -> str:
    """Return the place from which an attempt has restored, once the status tells it."""

    return str(read_restored(site, name, attempt).get("tier"))


def read_restored(site: Site, name: str, attempt: str) -> Object:
    """Return what an attempt began from, once the status tells it."""

    def look() -> Object | None:
        job = site.cluster.job(site.namespace, name)
        restored = ((job or {"status": {}})["status"].get("checkpoint") or {}).get("restored") or {}
        return dict(restored) if restored.get("id") == attempt else None

    return wait(look, 60, f"the status of {name} tells what {attempt} began from")


def delete_job(site: Site, name: str) -> None:
    site.cluster.kubectl("delete", "tj", name, "-n", site.namespace, "--wait=false")
    wait(lambda: not site.cluster.pods(site.namespace, name), 180, f"{name} is gone")
    # What was broken on purpose shall not keep the next job from its nodes.
    site.cluster.kubectl("delete", "configmap", "-n", deploy.SYSTEM, "everstep-node-failures", "--ignore-not-found")


ROWS = {
    "rank-crash-memory": Row(3.0, crash_rank, floor=crash_rank_of_indexed_job),
    "pod-deleted-peer": Row(20.0, delete_pod, floor=delete_pod_of_indexed_job),
    "memory-of-limit": Row(1.0, measure_memory, unit="×", repeats=1),
    "spot-notice": Row(3.0, notice_spot_node),
    "kubelet-restart": Row(3.0, restart_kubelet),
    "operator-killed": Row(3.0, kill_operator),
    "api-server-down": Row(3.0, take_api_server_away),
    # Each repeat of the floor takes six minutes.
    "node-killed": Row(45.0, kill_node, floor=partial(kill_node_of_indexed_job, index=1), floors=1),
    "node-killed-leader": Row(45.0, kill_node_of_leader, floor=partial(kill_node_of_indexed_job, index=0), floors=1),
}


if __name__ == "__main__":
    typer.run(main)

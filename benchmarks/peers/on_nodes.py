"""Rows on real nodes: a start, and what each contender does when a rank exits, a pod is deleted or a node is killed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from kubernetes.client import ApiException

from benchmarks.barrier import Ear
from benchmarks.peers.comparison import LONGEST_S, Comparison, Sample, measure_all
from benchmarks.peers.contenders import CONTENDERS, LABEL, PATHS, Contender, Object, RankRequest
from e2e import deploy
from e2e.cluster import backend
from e2e.harness import Cluster, wait

START_RANKS = 4
RANKS = 2
REPEATS = 3
TRIES = 12  # until the scheduler has put a rank on the node that is to be killed
_numbers = itertools.count()


@dataclass(frozen=True)
class Site:
    """The place of the rows: a namespace, an ear, and the node of the controllers, which is never broken."""

    cluster: Cluster
    namespace: str
    ear: Ear
    controllers: str

    def request(self, contender: Contender, ranks: int) -> RankRequest:
        """Return a request for ranks on the other nodes."""
        name = f"{contender.name}-{next(_numbers)}"
        affinity = {"affinity": {"nodeAffinity": elsewhere(self.controllers)}}
        return RankRequest(name, ranks, self._env(name), affinity, affinity)

    def request_apart(self, contender: Contender, ranks: int) -> RankRequest:
        """Return a request for ranks on a node each, which may use the node of the controllers when another is lost. A
        pod that only starts ranks runs there from the beginning."""
        name = f"{contender.name}-{next(_numbers)}"
        placement = {"affinity": {"nodeAffinity": rather_elsewhere(self.controllers), "podAntiAffinity": apart(name)}}
        return RankRequest(name, ranks, self._env(name), placement, {"nodeSelector": on_node(self.controllers)})

    def find_pod(self, name: str, rank: int) -> Object:
        """Return the pod in which a rank of a job runs, by the address from which it has told its start."""
        address, _ = self.ear.heard(name).address[rank]
        path = f"/api/v1/namespaces/{self.namespace}/pods"

        def look() -> Object | None:
            found = (pod for pod in self.cluster.items(path) if is_of(pod, name))
            return next((pod for pod in found if pod["status"].get("podIP") == address), None)

        # A rank is heard sooner than its kubelet has reported the pod's address.
        return wait(look, 60, f"the pod of rank {rank} of {name}")

    def _env(self, name: str) -> dict[str, str]:
        return {each["name"]: each["value"] for each in self.ear.env(name)}


@contextmanager
def running(site: Site, contender: Contender, request: RankRequest) -> Iterator[float]:
    """Provide the ranks for the time of the block: the seconds from the first request until all have met."""
    try:
        began = time.monotonic()
        create(site, contender, request)
        yield site.ear.listen(request.name, request.ranks, timeout=LONGEST_S) - began
    finally:
        delete(site, contender, request.name)


def create(site: Site, contender: Contender, request: RankRequest) -> None:
    for body in contender.objects(request):
        site.cluster.request("POST", PATHS[body["kind"]].format(namespace=site.namespace), body)


def delete(site: Site, contender: Contender, name: str) -> None:
    """Delete a job, and wait until its pods are gone: the next contender must not share the nodes with them."""
    site.ear.dismiss(name)
    for kind in contender.kinds:
        with suppress(ApiException):  # some belong to others, which take them along
            path = f"{PATHS[kind].format(namespace=site.namespace)}/{name}"
            site.cluster.request("DELETE", path, {"propagationPolicy": "Background"})
    pods = f"/api/v1/namespaces/{site.namespace}/pods"
    wait(lambda: not any(is_of(pod, name) for pod in site.cluster.items(pods)), 150, f"pods of {name} gone")


def wait_for_second_barrier(site: Site, name: str, began: float, ranks: int = RANKS) -> Sample:
    """Return the seconds until all ranks of a job have met once more, at most `LONGEST_S`."""
    try:
        timeout = max(0.1, began + LONGEST_S - time.monotonic())
        return Sample(site.ear.listen(name, ranks, barriers=2, timeout=timeout) - began)
    except AssertionError:
        back = sum(len(times) > 1 for times in site.ear.heard(name).passed.values())
        return Sample(LONGEST_S, f"{back} of {ranks} ranks")


def start(site: Site, contender: Contender) -> Sample:
    """Return the seconds from the first request until the last rank has passed its first barrier."""
    with running(site, contender, site.request(contender, START_RANKS)) as seconds:
        return Sample(seconds)


def exit_rank(site: Site, contender: Contender) -> Sample:
    """Let a rank exit with 1, and return the seconds until all meet again; a rank that loses a peer exits too."""
    request = site.request(contender, RANKS)
    with running(site, contender, request):
        return wait_for_second_barrier(site, request.name, site.ear.say(request.name, 1, "exit"))


def delete_pod(site: Site, contender: Contender) -> Sample:
    """Delete the pod of a rank, and return the seconds until all meet again."""
    request = site.request(contender, RANKS)
    with running(site, contender, request):
        pod = site.find_pod(request.name, 1)["metadata"]["name"]
        began = time.monotonic()
        path = f"/api/v1/namespaces/{site.namespace}/pods/{pod}"
        site.cluster.request("DELETE", path, {"gracePeriodSeconds": 5})
        return wait_for_second_barrier(site, request.name, began)


def kill_node(site: Site, row: Comparison) -> Comparison:
    """Kill the node on which each contender has its rank 1, and add the seconds until all ranks of each meet again.

    All wait side by side for the same node: what they wait for is time, six minutes of it, and hardly the processors.
    """
    nodes = [node["metadata"]["name"] for node in site.cluster.items("/api/v1/nodes")]
    victim = max(name for name in nodes if name != site.controllers)
    names: dict[Contender, str] = {}
    try:
        for contender in CONTENDERS:
            names[contender] = _start_with_rank_on(site, contender, victim)
        began = time.monotonic()
        backend.faulty().kill_node(victim)
        try:
            for contender, name in names.items():
                row.add(contender, wait_for_second_barrier(site, name, began))
        finally:
            backend.faulty().restart_node(victim)
    finally:
        for contender, name in names.items():
            delete(site, contender, name)
        # What was broken on purpose shall not keep the next job from its node.
        site.cluster.kubectl("delete", "configmap", "-n", deploy.SYSTEM, "everstep-node-failures", "--ignore-not-found")
    return row


def _start_with_rank_on(site: Site, contender: Contender, node: str) -> str:
    """Return a job of two ranks on two nodes, of which rank 1 is on this one."""
    for _ in range(TRIES):
        request = site.request_apart(contender, RANKS)
        is_placed = False
        try:
            create(site, contender, request)
            site.ear.listen(request.name, RANKS, timeout=LONGEST_S)
            is_placed = site.find_pod(request.name, 1)["spec"]["nodeName"] == node
        finally:
            if not is_placed:
                delete(site, contender, request.name)
        if is_placed:
            return request.name
    raise AssertionError(f"the scheduler never places rank 1 of {contender.title} on {node}")


ROWS = {"start-4": start, "rank-exit": exit_rank, "pod-deleted": delete_pod}
NODE_KILLED = "node-killed"
NAMES = (*ROWS, NODE_KILLED)


def rows(site: Site, wanted: set[str], repeats: int = REPEATS) -> Iterator[Comparison]:
    """Measure the rows that are wanted; the loss of a node once, as each contender waits for minutes."""
    for name, measure in ROWS.items():
        if name in wanted:
            yield measure_all(Comparison(name, "s", 1.0), partial(measure, site), repeats, warm_up=True)
    if NODE_KILLED in wanted:
        yield kill_node(site, Comparison(NODE_KILLED, "s", 1.0))


# -- placement ---------------------------------------------------------------------------------------------------------


def is_of(pod: Object, name: str) -> bool:
    """Return whether a pod belongs to a job: every contender begins its pods' names with the job's."""
    return str(pod["metadata"]["name"]).startswith(f"{name}-")


def on_node(node: str) -> Object:
    return {"kubernetes.io/hostname": node}


def elsewhere(node: str) -> Object:
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_not_on(node)]}}


def rather_elsewhere(node: str) -> Object:
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": _not_on(node)}]}


def _not_on(node: str) -> Object:
    return {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": [node]}]}


def apart(name: str) -> Object:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {LABEL: name}}}
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}

"""Nodes and node autoscalers, as a real API server tells of them."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.app import Operator
from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import object_key, resource_version
from everstep_operator.cluster.node_leases import NODE_LEASES_NAMESPACE
from everstep_operator.cluster.resources import CONFIG_MAPS, EVENTS, LEASES, NODES, POOLS, ApiResource
from everstep_operator.plan import gang
from everstep_operator.plan.affinity import list_excluded_nodes
from everstep_operator.plan.gang import STALL_SECONDS_ALONE
from everstep_operator.plan.node_failures import RECORD_NAME
from everstep_operator.plan.observation import parse_pod
from everstep_operator.settings import OperatorSettings
from tests.integration.conftest import USER
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import World, until

LIMIT_RANGES = ApiResource("", "v1", "limitranges", "LimitRange")
LEASE = {"apiVersion": LEASES.api_version, "kind": LEASES.kind}
LATER = STALL_SECONDS_ALONE + 60


async def running(world: World, simulation: Simulation) -> list[dict[str, Any]]:
    """The pods of the simulation's job, once its ranks run."""
    await world.submit(simulation.job, numNodes=len(simulation.nodes))
    await world.until_phase(simulation.job, "Running")
    return await world.pods(simulation.job)


async def healthy(world: World, job: str) -> dict[str, Any] | None:
    conditions: list[dict[str, Any]] = (await world.job(job))["status"]["conditions"]
    return next((c for c in conditions if c["type"] == "NodesHealthy"), None)


async def test_a_job_tells_of_a_node_that_is_not_ready(world: World) -> None:
    bad = f"{world.namespace}-bad"
    async with Simulation(world, "digits", ("n1", bad)) as simulation:
        await running(world, simulation)
        assert await healthy(world, "digits") is None
        await world.beat(bad, ready="Unknown")

        async def told() -> dict[str, Any] | None:
            return await healthy(world, "digits")

        found = await until(told, "the condition")
        assert found is not None
        assert (found["status"], found["reason"]) == ("False", "NodeNotReady")
        assert found["message"].startswith(f"digits-1 is on {bad}, which is not Ready")

        async def event() -> bool:
            return any(e["reason"] == "NodeNotReady" for e in await world.all(EVENTS))

        await until(event, "the event")


async def test_a_pod_whose_node_was_removed_is_replaced(world: World) -> None:
    """No kubelet will ever confirm its end, and nobody here collects it but the operator."""
    gone = f"{world.namespace}-gone"
    async with Simulation(world, "digits", ("n1", gone)) as simulation:
        before = await running(world, simulation)
        await world.leave(gone)

        async def replaced() -> bool:
            pods = await world.pods("digits")
            assert len(pods) == 2
            assert pods[0]["metadata"]["uid"] == before[0]["metadata"]["uid"], "the other one stays"
            return bool(pods[1]["metadata"]["uid"] != before[1]["metadata"]["uid"])

        await until(replaced, "another pod")


async def test_a_node_removed_while_the_operator_was_away_is_noticed(
    control_plane: ControlPlane, still_world: World
) -> None:
    world, gone = still_world, f"{still_world.namespace}-gone"
    async with Simulation(world, "digits", ("n1", gone)) as simulation:
        async with operator(control_plane.kubeconfig, world):
            before = await running(world, simulation)
        await world.leave(gone)
        async with operator(control_plane.kubeconfig, world):

            async def replaced() -> bool:
                pods = await world.pods("digits")
                return before[1]["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in pods}

            await until(replaced, "the lost pod is forced out")
            simulation.finish.set()
            status = await world.until_phase("digits", "Succeeded")
    assert status["epoch"] == 1, "it was not the leader's"


async def test_a_pod_whose_agent_and_kubelet_are_silent_is_replaced_elsewhere(
    control_plane: ControlPlane, still_world: World
) -> None:
    """The Node object is there, and Ready for half a minute more; no controller and no kubelet ends the pod."""
    world, dead, other = still_world, f"{still_world.namespace}-dead", f"{still_world.namespace}-other"
    async with (
        operator(control_plane.kubeconfig, world, node_silence=15.0) as (_, client),
        Simulation(world, "digits", (f"{still_world.namespace}-head", dead, other)) as simulation,
    ):
        before = await running(world, simulation)
        for node in simulation.nodes:
            lease = {"metadata": {"name": node}, "spec": {"holderIdentity": node}}
            await world.client.create(LEASES, NODE_LEASES_NAMESPACE, {**LEASE, **lease})
        (leader,) = simulation.leaders.values()
        simulation.mute.add(before[1]["metadata"]["uid"])
        await leader.say(phase="forming", missing=[1], joined=2)

        async def replaced() -> dict[str, Any] | None:
            pods = {pod["metadata"]["name"]: pod for pod in await world.pods("digits")}
            kept = {pod["metadata"]["uid"] for pod in pods.values()}
            assert {before[0]["metadata"]["uid"], before[2]["metadata"]["uid"]} <= kept, "the others stay"
            lost = pods.get("digits-1")
            return lost if lost is not None and lost["metadata"]["uid"] != before[1]["metadata"]["uid"] else None

        made = await until(replaced, "another pod", seconds=60)
        assert made is not None
        terms = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        excluded = [each["values"] for term in terms["nodeSelectorTerms"] for each in term["matchFields"]]
        assert excluded == [[dead]], "the scheduler does not know yet that it is dead"
        found = await healthy(world, "digits")
        assert found is not None
        assert ("get", "coordination.k8s.io", "leases") in client.used


async def test_a_node_on_which_pods_die_is_on_record_and_avoided(
    control_plane: ControlPlane, still_world: World
) -> None:
    world, bad = still_world, f"{still_world.namespace}-bad"
    async with (
        operator(control_plane.user_kubeconfig(USER), world) as (_, client),
        Simulation(world, "digits", (bad,)) as simulation,
    ):
        await running(world, simulation)
        for _ in range(2):
            (pod,) = await world.pods("digits")
            assert bad not in parse_pod(pod).avoids
            await world.end(pod, 137)

            async def replaced(before: str = pod["metadata"]["uid"]) -> bool:
                pods = await world.pods("digits")
                return bool(pods and pods[0]["metadata"]["uid"] != before)

            await until(replaced, "another pod", 60)
            await world.until_phase("digits", "Running", seconds=60)
        (pod,) = await world.pods("digits")
        assert list_excluded_nodes(pod["spec"]) == {bad}, "the third placement"
        charges = (await world.job("digits"))["status"]["restarts"]["charges"]
        assert [(charge["node"], charge["reason"]) for charge in charges] == [(bad, "ContainerKilled")] * 2
        assert ("update", "", "configmaps") in client.used, "with the rights of the chart"
    record = await world.client.get(CONFIG_MAPS, OperatorSettings.load({}).pod_namespace, RECORD_NAME)
    assert len(json.loads(record["data"][bad])) == 2


async def test_a_dead_leader_under_strict_fencing_is_replaced_once_its_ranks_have_ended(
    control_plane: ControlPlane, still_world: World
) -> None:
    """Meanwhile nobody asks it, and what was known of its silence is not forgotten."""
    world, dead = still_world, f"{still_world.namespace}-dead"
    async with (
        operator(control_plane.kubeconfig, world, node_silence=15.0, fence_timeout=5.0),
        Simulation(world, "digits", (dead, f"{still_world.namespace}-other")) as simulation,
    ):
        await world.submit("digits", numNodes=2, restart={"fencing": "strict"})
        await world.until_phase("digits", "Running")
        before = await world.pods("digits")
        await world.client.create(
            LEASES, NODE_LEASES_NAMESPACE, {**LEASE, "metadata": {"name": dead}, "spec": {"holderIdentity": dead}}
        )
        (leader,) = simulation.leaders.values()
        await leader.stop()

        async def replaced() -> bool:
            pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await world.pods("digits")}
            assert pods["digits-1"] == before[1]["metadata"]["uid"], "the other one stays"
            return pods.get("digits-0") not in (None, before[0]["metadata"]["uid"])

        await until(replaced, "another pod 0", seconds=90)
        status = await world.until_phase("digits", "Running")
        assert (status["epoch"], status["restarts"]["infrastructure"]) == (2, 1)


async def test_heartbeats_of_nodes_reconcile_nothing(control_plane: ControlPlane, still_world: World) -> None:
    world, name = still_world, f"{still_world.namespace}-a"
    async with (
        operator(control_plane.kubeconfig, world, resync_seconds=3600) as (made, _),
        Simulation(world, "digits", (name,)) as simulation,
    ):
        await running(world, simulation)

        async def heard_of_all() -> bool:
            job, pods = await world.job("digits"), await world.pods("digits")
            held = made.cache.jobs.get(object_key(job))
            known = [made.cache.pods.get(object_key(pod)) for pod in pods]
            versions = [entry.version if entry is not None else 0 for entry in (held, *known)]
            return all(version >= resource_version(item) for version, item in zip(versions, (job, *pods), strict=True))

        await until(heard_of_all, "the last events of the start")
        await made.queue.idle()
        looks: list[object] = []
        made.cache.touched = made.cache.pods_touched = looks.append
        for _ in range(20):
            await world.beat(name)
        newest = int((await world.client.get(NODES, None, name))["metadata"]["resourceVersion"])

        async def heard() -> bool:
            entry = made.cache.nodes.get(("", name))
            return entry is not None and entry.version >= newest

        await until(heard, "the last heartbeat")
        assert looks == []
        await world.beat(name, ready="False")

        async def looked() -> bool:
            return looks == [(world.namespace, "digits")]

        await until(looked, "a change that matters")


async def partly_placed(world: World, made: Operator) -> dict[str, Any]:
    """A set of which one pod has a node; returns the other one. Its patience is over, as the operator sees it."""
    await world.submit("digits", numNodes=2)
    first, second = await world.until_pods("digits", 2)
    await world.bind(first)
    await world.find_no_node(second)
    await world.until_phase("digits", "Scheduling")
    made.reconciler.clock = lambda: time.time() + LATER
    return second


async def promise(world: World, pod: dict[str, Any], *, ago: float) -> None:
    """Create the event by which Cluster Autoscaler announces a node for a pod; `ago` by the operator's clock."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + LATER - ago))
    about = {"kind": "Pod", "namespace": world.namespace, **{k: pod["metadata"][k] for k in ("name", "uid")}}
    body = {
        "metadata": {"name": f"scale-up-{ago:.0f}"},
        "involvedObject": about,
        "reason": "TriggeredScaleUp",
        "type": "Normal",
        "lastTimestamp": stamp,
        "source": {"component": "cluster-autoscaler"},
    }
    await world.client.create(EVENTS, world.namespace, body)


async def test_a_set_that_no_node_is_made_for_is_given_back(control_plane: ControlPlane, still_world: World) -> None:
    async with operator(control_plane.user_kubeconfig(USER), still_world) as (made, _):
        pod = await partly_placed(still_world, made)
        await promise(still_world, pod, ago=3600)
        made.queue.add((still_world.namespace, "digits"))
        status = await still_world.until_phase("digits", "Pending")
        assert status["transitions"][-1]["reason"] == "GangReleased"


async def test_a_set_is_kept_while_an_autoscaler_makes_a_node_for_it(
    control_plane: ControlPlane, still_world: World
) -> None:
    async with operator(control_plane.user_kubeconfig(USER), still_world) as (made, client):
        pod = await partly_placed(still_world, made)
        assert ("list", "", "events") not in client.used, "nobody watches events"
        await promise(still_world, pod, ago=100)
        key = (still_world.namespace, "digits")
        made.queue.add(key)

        async def asked() -> bool:
            memory = made.reconciler._memories.get(key)
            return memory is not None and memory.scale_up_at is not None

        await until(asked, "the autoscaler's word is known")
        for _ in range(3):
            made.queue.add(key)
            await until_idle(made)
        assert (await still_world.job("digits"))["status"]["phase"] == "Scheduling"
        assert len(await still_world.until_pods("digits", 2)) == 2


async def until_idle(made: Operator) -> None:
    async def idle() -> bool:
        return made.queue.depth == 0 and made.queue.in_work == 0

    await until(idle, "the operator has looked")


class SmallCluster:
    """Nodes of one pool with room for one pod each, a scheduler that takes jobs in the given order, and kubelets."""

    def __init__(self, world: World, jobs: list[str], nodes: int) -> None:
        self.world, self.jobs, self.pool = world, jobs, f"{world.namespace}-small"
        self.nodes = [f"{self.pool}-{number}" for number in range(nodes)]

    async def create(self) -> None:
        for name in self.nodes:
            room = {"pods": "1", "cpu": "64", "memory": "256Gi"}
            status = {"allocatable": room, "capacity": room, "conditions": [{"type": "Ready", "status": "True"}]}
            meta = {"name": name, "labels": {"pool": self.pool}}
            await self.world.client.create(NODES, None, {"metadata": meta, "status": status})
        pool = {"apiVersion": POOLS.api_version, "kind": POOLS.kind, "metadata": {"name": self.pool}}
        await self.world.client.create(POOLS, None, {**pool, "spec": {"nodeSelector": {"pool": self.pool}}})

    async def submit(self, job: str, num_nodes: int) -> None:
        await self.world.submit(job, numNodes=num_nodes, pools=[{"name": self.pool}])

    async def placed(self) -> dict[str, int]:
        """Do what is to be done now; returns how many pods of each job have a node."""
        pods = {job: await self.world.pods(job) for job in self.jobs}
        for pod in [pod for found in pods.values() for pod in found if "deletionTimestamp" in pod["metadata"]]:
            with contextlib.suppress(errors.NotFound):
                await self.world.remove(pod)
        live = {job: [p for p in found if "deletionTimestamp" not in p["metadata"]] for job, found in pods.items()}
        bound = {job: [p for p in found if p["spec"].get("nodeName")] for job, found in live.items()}
        free = sorted(set(self.nodes) - {p["spec"]["nodeName"] for found in bound.values() for p in found})
        for pod in [pod for found in live.values() for pod in found if not pod["spec"].get("nodeName")]:
            with contextlib.suppress(errors.NotFound, errors.Conflict):
                if free:
                    await self.world.bind(pod, free.pop())
                elif not pod["status"].get("conditions"):
                    await self.world.find_no_node(pod)
        return {job: len(found) for job, found in bound.items()}


async def test_three_jobs_behind_one_that_no_nodes_can_hold_get_theirs(
    control_plane: ControlPlane, still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang, "STALL_SECONDS", 2.0)
    names = ["impossible", "one", "two", "three"]
    small = SmallCluster(still_world, names, nodes=6)
    await small.create()

    async def hold(**wanted: int) -> bool:
        found = await small.placed()
        assert found == {**dict.fromkeys(names, 0), **wanted}
        return True

    async with operator(control_plane.user_kubeconfig(USER), still_world) as (made, _):
        await small.submit("impossible", 32)
        await until(lambda: hold(impossible=6), "it came first", 120)
        assert [view.possible for view in made.gangs.list_views()] == [False]
    # It counts again after a restart of the operator, from what the API server has.
    async with operator(control_plane.user_kubeconfig(USER), still_world):
        for name in names[1:]:
            await small.submit(name, 2)
        await until(lambda: hold(one=2, two=2, three=2), "each has its nodes", 180)
        for name in names[1:]:
            await still_world.until_phase(name, "Starting")
        await still_world.until_phase("impossible", "Pending")


async def test_a_job_that_fits_nowhere_for_what_admission_adds_gives_way_too(
    control_plane: ControlPlane, still_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says nothing of its memory, and a LimitRange gives its pods more than all nodes but one have."""
    monkeypatch.setattr(gang, "STALL_SECONDS", 2.0)
    small = SmallCluster(still_world, ["younger", "impossible"], nodes=4)
    await small.create()
    large, *rest = small.nodes
    for name in rest:
        await still_world._patch(NODES.path(None, name) + "/status", {"status": {"allocatable": {"memory": "1Gi"}}})
    default = {"type": "Container", "default": {"memory": "2Gi"}, "defaultRequest": {"memory": "2Gi"}}
    limits = {"metadata": {"name": "defaults"}, "spec": {"limits": [default]}}
    await still_world.client.create(LIMIT_RANGES, still_world.namespace, limits)
    async with operator(control_plane.user_kubeconfig(USER), still_world) as (_, _):
        await small.submit("impossible", 2)
        await still_world.until_pods("impossible", 2)
        small.nodes = [large]  # the others are too small for it, as the scheduler finds

        async def has_one() -> bool:
            return await small.placed() == {"younger": 0, "impossible": 1}

        await until(has_one, "its first pod has a node", 60)
        little = {"memory": "1Mi"}
        pools, resources = [{"name": small.pool}], {"requests": little, "limits": little}
        await still_world.submit("younger", numNodes=2, pools=pools, resources=resources)
        await still_world.until_pods("younger", 2)
        small.nodes = [large, rest[0]]

        async def has_both() -> bool:
            return (await small.placed())["younger"] == 2

        await until(has_both, "the younger has its nodes", 120)

"""Events around a job: objects of others, predecessors, restarts of either side, and nothing at all."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_NOFILE, prlimit
from typing import Any

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.rbac import USED_PERMISSIONS
from everstep_operator.cluster.resources import CONFIG_MAPS, JOBS, PODS, SECRETS, SERVICES, ApiResource
from everstep_operator.plan.agent_volume import make_template_name
from tests.integration.conftest import USER
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import OperatorProcess, World, until

ADMISSION = ("admissionregistration.k8s.io", "v1")
POLICIES = ApiResource(*ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", namespaced=False)
POLICY_BINDINGS = ApiResource(
    *ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", namespaced=False
)


async def running(world: World, name: str, simulation: Simulation) -> dict[str, Any]:
    await world.until_phase(name, "Running", seconds=60)
    return await world.job(name)


async def until_still(world: World, name: str) -> None:
    """The last events of its start are over: nothing is written for two seconds."""

    async def versions() -> list[str]:
        return [item["metadata"]["resourceVersion"] for item in (await world.job(name), *await world.pods(name))]

    async def still() -> bool:
        before = await versions()
        await asyncio.sleep(2)
        return await versions() == before

    await until(still, f"nothing is written for {name}", 60)


async def test_a_restarted_api_server_costs_nothing(
    control_plane: ControlPlane, operator: OperatorProcess, world: World
) -> None:
    await world.submit("digits", numNodes=2)
    async with Simulation(world, "digits") as simulation:
        await running(world, "digits", simulation)
        control_plane.restart_apiserver()  # not in a thread: its processes die with the thread that started them
        await world.job("digits")  # a read is repeated: then it is known which connections the old one has closed
        await world.submit("late", numNodes=1)  # the watch has to be back for this one
        await world.until_pods("late", 1, seconds=60)
        simulation.finish.set()
        status = await world.until_phase("digits", "Succeeded", seconds=60)
    assert status["epoch"] == 1
    assert len(simulation.pods_seen) == 2
    assert operator.running()


async def test_a_killed_operator_goes_on_at_once(operator: OperatorProcess, world: World) -> None:
    await world.submit("digits", numNodes=2)
    async with Simulation(world, "digits") as simulation:
        await running(world, "digits", simulation)
        operator.kill()
        simulation.finish.set()
        await asyncio.sleep(0.2)
        operator.start()
        status = await world.until_phase("digits", "Succeeded", seconds=60)
    assert status["epoch"] == 1
    assert (status.get("restarts") or {}).get("total", 0) == 0


async def test_sigterm_is_a_clean_end(operator: OperatorProcess, world: World) -> None:
    await asyncio.to_thread(operator.wait_ready)
    assert operator.stop() == 0
    operator.start()


async def test_applying_the_same_again_changes_nothing(world: World) -> None:
    await world.submit("digits", numNodes=2)
    async with Simulation(world, "digits") as simulation:
        await running(world, "digits", simulation)
        await until_still(world, "digits")
        pods = [pod["metadata"]["resourceVersion"] for pod in await world.pods("digits")]
        path = JOBS.path(world.namespace, "digits")
        await world._patch(path, {"metadata": {"annotations": {"team": "red"}}, "spec": {"numNodes": 2}})
        before = (await world.job("digits"))["metadata"]["resourceVersion"]
        await asyncio.sleep(2)
        assert (await world.job("digits"))["metadata"]["resourceVersion"] == before
        assert [pod["metadata"]["resourceVersion"] for pod in await world.pods("digits")] == pods


@pytest.mark.parametrize("resource", [SERVICES, PODS, CONFIG_MAPS])
async def test_what_belongs_to_somebody_else_is_never_adopted(world: World, resource: Any) -> None:
    job = await world.submit("digits", numNodes=2, suspend=True)
    of_template = make_template_name("digits", job["metadata"]["uid"], 1)
    name = {"services": "digits", "pods": "digits-1", "configmaps": of_template}[resource.plural]
    specs: dict[str, dict[str, Any]] = {
        "services": {"spec": {"ports": [{"port": 80}]}},
        "pods": {"spec": {"containers": [{"name": "a", "image": "b"}]}},
        "configmaps": {"data": {"mine": "yes"}},
    }
    body = {"metadata": {"name": name}, **specs[resource.plural]}
    theirs = await world.client.create(resource, world.namespace, body)
    await world.change("digits", suspend=False)

    async def told() -> bool:
        status = (await world.job("digits")).get("status") or {}
        return any(c["reason"] == "NameConflict" for c in status.get("conditions", ()))

    await until(told, "the user is told")
    now = await world.client.get(resource, world.namespace, name)
    assert now["metadata"]["uid"] == theirs["metadata"]["uid"]
    assert now["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]


async def test_a_job_made_again_under_its_name_waits_for_its_predecessors_objects(world: World) -> None:
    """`kubectl replace --force`: the garbage collector is slower. Here it is played by the test."""
    old = await world.submit("digits", numNodes=2)
    old_pods = await world.until_pods("digits", 2)
    leftovers = [(r, item) for r in (SERVICES, SECRETS, CONFIG_MAPS) for item in await world.all(r)]
    await world.client.delete(JOBS, world.namespace, "digits", uid=old["metadata"]["uid"])
    new = await world.submit("digits", numNodes=2)
    await asyncio.sleep(1)
    assert {pod["metadata"]["uid"] for pod in await world.pods("digits")} == {p["metadata"]["uid"] for p in old_pods}
    for resource, item in leftovers:
        if not item["metadata"]["name"].startswith("everstep-agent"):
            await world.client.delete(resource, world.namespace, item["metadata"]["name"], uid=item["metadata"]["uid"])
    for pod in old_pods:
        await world.remove(pod)

    async def replaced() -> bool:
        pods = await world.pods("digits")
        owners = {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods}
        return len(pods) == 2 and owners == {new["metadata"]["uid"]}

    await until(replaced, "the new job has its own pods", 60)
    for pod in await world.pods("digits"):
        assert pod["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]


async def test_a_template_the_server_refuses_fails_with_its_message(world: World) -> None:
    broken = {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "relative/../x", "type": "NoSuchType"}}]}}
    tolerations = {"spec": {"tolerations": [{"key": "k", "operator": "NoSuchOperator"}]}}
    misspelt: dict[str, Any] = {"spec": {"tolerationz": []}}
    for template in (tolerations, broken, misspelt):
        name = f"bad-{len(json.dumps(template))}"
        await world.submit(name, podTemplate=template)
        status = await world.until_phase(name, "Failed")
        assert await world.pods(name) == []
        failed = next(c for c in status["conditions"] if c["type"] == "Failed")
        assert failed["message"]


async def test_a_ghost_is_found_by_listing(control_plane: ControlPlane, still_world: World) -> None:
    """A watch that was down sends no DELETED."""
    await still_world.submit("digits", numNodes=2)
    serving = operator(control_plane.kubeconfig, still_world, resync_seconds=3600)
    async with Simulation(still_world, "digits") as simulation, serving as (made, _):
        made.resync.request_soon = lambda: None  # type: ignore[method-assign]
        await running(still_world, "digits", simulation)
        (pods,) = (stream for stream in made.streams.streams if stream.resource == PODS)
        hearing = pods.receive
        pods.receive = lambda *_: None
        lost = (await still_world.pods("digits"))[1]
        await still_world.remove(lost)
        await asyncio.sleep(0.5)
        assert len(made.cache.pods_of((still_world.namespace, "digits"))) == 2, "the ghost"
        pods.receive = hearing
        await made.resync.run_once()

        async def replaced() -> bool:
            pods = await still_world.pods("digits")
            return len(pods) == 2 and pods[1]["metadata"]["uid"] != lost["metadata"]["uid"]

        await until(replaced, "the lost pod is replaced")


async def test_what_vanishes_before_the_watch_has_begun_is_missed_soon(
    control_plane: ControlPlane, still_world: World
) -> None:
    """The operator has listed, and the watch begins a moment later: it has to tell of what happened in between."""
    await still_world.submit("digits", numNodes=2)
    async with Simulation(still_world, "digits") as simulation:
        async with operator(control_plane.kubeconfig, still_world):
            await running(still_world, "digits", simulation)
        lost = (await still_world.pods("digits"))[1]
        async with operator(control_plane.kubeconfig, still_world, resync_seconds=3600) as (made, _):
            made.resync.request_soon = lambda: None  # type: ignore[method-assign]
            follow = made.streams.run

            async def removed(listed: Mapping[tuple[ApiResource, str | None], int]) -> None:
                await still_world.remove(lost)
                await follow(listed)

            async def replaced() -> bool:
                pods = await still_world.pods("digits")
                return len(pods) == 2 and pods[1]["metadata"]["uid"] != lost["metadata"]["uid"]

            made.streams.run = removed  # type: ignore[method-assign]
            await until(replaced, "the lost pod is replaced")


async def test_health_and_metrics(operator: OperatorProcess, world: World) -> None:
    await asyncio.to_thread(operator.wait_ready)
    assert operator.fetch("/healthz") == "ok"
    await world.submit("digits")
    await world.until_pods("digits", 1)
    text = operator.fetch("/metrics", operator.metrics_port)
    for name in ("everstep_reconcile_duration_seconds_count", "everstep_queue_depth", 'everstep_jobs{phase="Pending"}'):
        assert name in text
    assert world.namespace not in text
    assert "digits" not in text


async def test_a_policy_that_rejects_replacements_ends_no_job(control_plane: ControlPlane, world: World) -> None:
    """A real ValidatingAdmissionPolicy, with 422 (its default) and no word of whose job it is."""
    await world.submit("digits", numNodes=2)
    pods = await world.until_pods("digits", 2)
    admin = await Client.connect(str(control_plane.kubeconfig))
    name = f"no-pods-in-{world.namespace}"
    pods_of = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}
    match = {"resourceRules": [pods_of], "namespaceSelector": here}
    rule = {"expression": "false", "message": "no pods on Sundays"}
    policy = {"metadata": {"name": name}, "spec": {"matchConstraints": match, "validations": [rule]}}
    bound = {"metadata": {"name": name}, "spec": {"policyName": name, "validationActions": ["Deny"]}}
    for resource, body in ((POLICIES, policy), (POLICY_BINDINGS, bound)):
        await admin.create(resource, None, {"apiVersion": resource.api_version, "kind": resource.kind, **body})

    async def rejects() -> bool:
        try:
            body = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
            await admin.create(PODS, world.namespace, body, dry_run=True)
        except errors.Invalid:
            return True
        return False

    await until(rejects, "the policy is in force", 120)
    await world.remove(pods[1])

    async def told() -> dict[str, Any]:
        status: dict[str, Any] = (await world.job("digits"))["status"]
        stalled = next(c for c in status["conditions"] if c["type"] == "Stalled")
        assert (stalled["status"], stalled["reason"]) == ("True", "AdmissionRejected"), status
        assert "no pods on Sundays" in stalled["message"]
        return status

    assert (await until(told, "the job says what rejects its pod", 120))["phase"] not in ("Failed", "Succeeded")
    for resource in (POLICY_BINDINGS, POLICIES):
        await admin.delete(resource, None, name, uid=None)
    await world.until_pods("digits", 2, seconds=180)
    await admin.close()


async def test_a_forged_or_unsigned_template_gives_no_pod_and_ends_no_job(
    operator: OperatorProcess, world: World
) -> None:
    """A user with rights on ConfigMaps alone, and an operator that starts: it has no template in its memory."""
    templates = {}
    for name in ("forged", "unsigned"):
        uid = (await world.submit(name, numNodes=2))["metadata"]["uid"]
        templates[name] = make_template_name(name, uid, 1)
        await world.until_pods(name, 2)
    assert operator.stop() == 0
    for name in ("forged", "unsigned"):
        found = await world.client.get(CONFIG_MAPS, world.namespace, templates[name])
        await world.client.delete(CONFIG_MAPS, world.namespace, templates[name], uid=None)
        pod = json.loads(found["data"]["template.json"])
        if name == "forged":
            pod["spec"]["hostPID"] = True
            pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
            found["data"]["template.json"] = json.dumps(pod)
        else:
            found["data"].pop("signature", None)
        meta = {key: found["metadata"][key] for key in ("name", "namespace", "labels", "ownerReferences")}
        await world.client.create(CONFIG_MAPS, world.namespace, {**found, "metadata": meta})
        await world.remove((await world.pods(name))[1])
    operator.start()
    for name in ("forged", "unsigned"):
        old, new = await world.until_pods(name, 2, seconds=180)
        assert new["spec"].get("hostPID") is None
        assert "privileged" not in (new["spec"]["containers"][0].get("securityContext") or {})
        assert new["metadata"]["labels"]["everstep.dev/template"] == "1", "the other pod stays in the same set"
        assert old["metadata"]["labels"]["everstep.dev/template"] == "1"
        made = await world.client.get(CONFIG_MAPS, world.namespace, templates[name])
        assert "hostPID" not in made["data"]["template.json"]
        assert len(made["data"]["signature"]) == 64
        assert (await world.job(name))["status"]["phase"] not in ("Failed", "Succeeded")


async def test_an_operator_whose_clock_is_a_day_ahead_takes_over_and_fails_no_job(
    operator: OperatorProcess, world: World, tmp_path: Path
) -> None:
    """A real process, with another time of day in Python; `timeouts.runtime` is an hour."""
    wrong = "import time\nreal = time.time\ntime.time = lambda: real() + 86400\n"
    (tmp_path / "sitecustomize.py").write_text(wrong)
    await world.submit("digits", numNodes=2, timeouts={"runtime": "1h", "startup": "1h"})
    async with Simulation(world, "digits") as simulation:
        await running(world, "digits", simulation)
        operator.kill()
        operator.start(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        try:
            await world.change("digits", restart={"application": 5})  # something to look at

            async def looked() -> bool:
                status = (await world.job("digits"))["status"]
                return bool(status["observedGeneration"] == 2 or status["phase"] != "Running")

            await until(looked, "the new operator has looked at the job", 180)
            assert (await world.job("digits"))["status"]["phase"] == "Running"
            simulation.finish.set()
            status = await world.until_phase("digits", "Succeeded", "Failed", seconds=180)
        finally:
            operator.kill()
            operator.start()
    assert status["phase"] == "Succeeded"
    assert status["timings"]["running"] < 3600


async def test_the_operator_may_open_as_many_files_as_its_machine_allows(operator: OperatorProcess) -> None:
    operator.wait_ready(180)
    assert operator.process is not None
    soft, hard = prlimit(operator.process.pid, RLIMIT_NOFILE)
    assert soft == min(hard, 1 << 20) or hard == RLIM_INFINITY


async def test_a_hundred_jobs_in_one_go(world: World) -> None:
    await asyncio.gather(*(world.submit(f"j{n}") for n in range(100)))
    started = time.monotonic()

    async def all_made() -> bool:
        return len(await world.all(PODS)) == 100

    await until(all_made, "a hundred pods", 60)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("dies", [False, True], ids=["the same operator", "the next operator"])
async def test_the_service_of_a_large_job_names_all_pods_once_all_have_addresses(
    operator: OperatorProcess, world: World, dies: bool
) -> None:
    """In few large writes of EndpointSlices. Pod 0 is looked for by others, and has its name from the beginning."""

    async def selector() -> Any:
        return (await world.client.get(SERVICES, world.namespace, "large"))["spec"]["selector"]

    await world.submit("large", numNodes=101)
    pods = await world.until_pods("large", 101, 120)
    assert await selector() == {"everstep.dev/job": "large", "everstep.dev/index": "0"}
    for pod in pods[:-1]:
        await world.run(pod)
    assert "everstep.dev/index" in await selector()
    if dies:
        operator.kill()
    await world.run(pods[-1])
    if dies:
        operator.start()
        operator.wait_ready()

    async def named() -> bool:
        return bool(await selector() == {"everstep.dev/job": "large"})

    await until(named, "the Service to select all pods", 60)


async def test_the_rights_used_are_those_of_the_table(control_plane: ControlPlane, world: World) -> None:
    """Everything the operator has asked of the API server so far, from the server's own audit log."""
    await world.submit("digits", numNodes=2)
    await world.until_pods("digits", 2)
    allowed = {(right.verb, right.group, right.resource) for right in USED_PERMISSIONS}
    # In this folder nothing outlives its TTL and no agent's version is an hour old; not every test comes before this.
    rare = {("delete", "everstep.dev", "trainingjobs"), ("delete", "", "secrets"), ("delete", "", "configmaps")}
    rare |= {("delete", "", "pods"), ("get", "everstep.dev", "trainingjobs"), ("get", "", "pods")}
    rare |= {("get", "", "services"), ("patch", "", "services"), ("get", "", "configmaps")}
    rare |= {
        ("get", "", "nodes"),
        ("list", "", "events"),
        ("update", "", "configmaps"),
    }  # used in test_nodes.py, by a user with these rights only
    rare |= {("get", "", "persistentvolumeclaims")}  # of jobs that mount one
    # By operators with these settings: test_drains.py, test_out_of_service.py.
    optional = [right for right in USED_PERMISSIONS if right.scope in ("budgets", "taints")]
    rare |= {(right.verb, right.group, right.resource) for right in optional}

    async def all_used() -> bool:
        seen = _requests(control_plane.audit_log.read_text())
        assert seen <= allowed
        assert allowed - seen <= rare
        return True

    await until(all_used, "each right of the table is used", 10)


def _requests(audit_log: str) -> set[tuple[str, str, str]]:
    seen = set()
    for line in audit_log.splitlines():
        entry = json.loads(line)
        reference = entry.get("objectRef") or {}
        if entry["user"]["username"] == USER and "resource" in reference:
            sub = f"/{reference['subresource']}" if reference.get("subresource") else ""
            seen.add((entry["verb"], reference.get("apiGroup", ""), reference["resource"] + sub))
    return seen

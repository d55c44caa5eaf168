"""A job's life: its objects, its phases, its end."""

from __future__ import annotations

import base64
import time
from typing import Any

from e2e.cluster.controlplane import ControlPlane
from everstep.agent.wire.auth import job_token
from everstep_operator.cluster.resources import CONFIG_MAPS, PODS, SECRETS, SERVICES
from everstep_operator.plan.agent_volume import find_token_secret, make_template_name
from tests.integration.conftest import KEY
from tests.integration.inprocess import operator
from tests.integration.world import FakeLeader, World, until


async def lead(world: World, job: dict[str, Any], pod: dict[str, Any], epoch: int = 1, template: int = 1) -> FakeLeader:
    token = job_token(KEY, job["metadata"]["uid"], template)
    leader = FakeLeader(token, world.address(pod), world.agent_port, epoch)
    leader.state["missing"] = list(range(1, job["spec"].get("numNodes", 1)))
    return await leader.start()


async def test_a_pod_whose_labels_are_changed_stays_the_job_s(control_plane: ControlPlane, still_world: World) -> None:
    """A tool that sets labels of everything in a namespace takes no pod from its job."""
    world = still_world
    async with operator(control_plane.kubeconfig, world, resync_seconds=1) as (made, _):
        await world.submit("digits", numNodes=1)
        (pod,) = await world.until_pods("digits", 1)
        labels = {"app.kubernetes.io/managed-by": "Helm", "everstep.dev/job": "other"}
        await world._patch(PODS.path(world.namespace, "digits-0"), {"metadata": {"labels": labels}})
        changed = time.monotonic()

        async def listed_again() -> bool:
            return made.resync.done_at is not None and made.resync.done_at > changed + 2

        await until(listed_again, "the operator has listed everything since", 60)
        await made.queue.idle()
        (seen,) = made.cache.pods_of((world.namespace, "digits"))
        assert seen.uid == pod["metadata"]["uid"]
        assert (await world.job("digits"))["status"]["epoch"] == 1, "no second pod 0 was wanted"


async def test_everything_a_job_needs_is_made_before_its_pods(world: World) -> None:
    job = await world.submit("digits", numNodes=2)
    pods = await world.until_pods("digits", 2)
    uid = job["metadata"]["uid"]

    service = await world.client.get(SERVICES, world.namespace, "digits")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (secret,) = await world.all(SECRETS)
    assert secret["metadata"]["name"] == find_token_secret(pods[0]["spec"])
    assert base64.b64decode(secret["data"]["token"]) == job_token(KEY, uid, 1)
    assert secret["immutable"] is True
    template = await world.client.get(CONFIG_MAPS, world.namespace, make_template_name("digits", uid, 1))
    assert set(template["data"]) >= {"job.json", "template.json"}
    agents = [m for m in await world.all(CONFIG_MAPS) if m["metadata"]["name"].startswith("everstep-agent-")]
    assert len(agents) == 1
    assert "agent.pyz" in agents[0]["binaryData"]

    for index, pod in enumerate(pods):
        meta = pod["metadata"]
        assert meta["name"] == f"digits-{index}"
        assert meta["labels"]["everstep.dev/epoch"] == "1"
        assert meta["labels"]["everstep.dev/template"] == "1"
        assert pod["spec"]["hostname"] == f"algo-{index + 1}"
        (reference,) = meta["ownerReferences"]
        assert (reference["uid"], reference["controller"]) == (uid, True)
        for other in (service, secret, template, agents[0]):
            assert int(other["metadata"]["resourceVersion"]) < int(meta["resourceVersion"])
    for other in (service, secret, template):
        assert other["metadata"]["ownerReferences"][0]["uid"] == uid


async def test_devices_by_resource_claims_are_what_the_api_server_takes(world: World) -> None:
    gpus = {"name": "gpus", "resourceClaimTemplateName": "four-gpus"}
    await world.submit(
        "digits",
        numNodes=1,
        numProcPerNode=4,
        resources={"claims": [{"name": "gpus"}]},
        podTemplate={"spec": {"resourceClaims": [gpus]}},
    )
    (pod,) = await world.until_pods("digits", 1)
    assert pod["spec"]["resourceClaims"] == [gpus]
    assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    await world.submit("none", numNodes=1, resources={"claims": [{"name": "gpus"}]})
    await world.until_phase("none", "Failed")
    (last, *_) = reversed((await world.job("none"))["status"]["transitions"])
    assert last["reason"] == "InvalidTemplate"


async def test_from_first_pod_to_success(world: World) -> None:
    job = await world.submit("digits", numNodes=2)
    pods = await world.until_pods("digits", 2)
    for pod in pods:
        await world.run(pod)
    leader = await lead(world, job, pods[0])
    try:

        async def peers() -> Any:
            return leader.asked("peers")

        (request,) = (await until(peers, "the leader has the addresses"))[:1]
        assert request[3] == {
            "epoch": 1,
            "addresses": {str(i): f"{world.address(pod)}:{world.agent_port}" for i, pod in enumerate(pods)},
        }
        await leader.say(phase="running", missing=[], nodes=2, joined=2, ranksStartedAt=1.0)
        status = await world.until_phase("digits", "Running")
        assert (status["epoch"], status["generation"]) == (1, 1)
        await leader.say(phase="ended", outcome={"result": "succeeded", "exitCode": 0, "message": ""})
        status = await world.until_phase("digits", "Succeeded")
    finally:
        await leader.stop()
    complete = next(c for c in status["conditions"] if c["type"] == "Complete")
    assert complete["status"] == "True"


async def test_the_last_word_is_enough_when_nobody_could_be_reached(world: World) -> None:
    await world.submit("digits")
    (pod,) = await world.until_pods("digits", 1)
    await world.run(pod)
    word = {"result": "succeeded", "epoch": 1, "generation": 1, "index": 0, "exitCode": 0}
    await world.end(pod, 0, word)
    await world.until_phase("digits", "Succeeded")


async def test_the_spec_is_never_written(world: World) -> None:
    await world.submit("digits")
    (pod,) = await world.until_pods("digits", 1)
    await world.run(pod)
    await world.end(pod, 0, {"result": "succeeded", "epoch": 1, "generation": 1, "index": 0, "exitCode": 0})
    await world.until_phase("digits", "Succeeded")
    ours = [f for f in (await world.job("digits"))["metadata"]["managedFields"] if f["manager"] == "everstep-operator"]
    assert ours
    for entry in ours:
        assert set(entry["fieldsV1"]) == {"f:status"}
        assert entry["subresource"] == "status"

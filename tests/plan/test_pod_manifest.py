"""One pod's body: from the frozen template alone, and cheap."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from everstep.agent import config
from everstep.agent.main import parse_options
from everstep.agent.ranks.container_contract import ContractFacts, build_sm_environment
from everstep_operator.plan.actions import CreatePods
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.observation import parse_pod
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import build_config_map, resolve_template
from tests.builders import JobBuilder, job
from tests.plan.world import World


def frozen(builder: JobBuilder, *, plain: bool = False) -> FrozenTemplate:
    made = resolve_template(builder.build(), epoch=2, pool=None, plain=plain, settings=PlanSettings())
    assert isinstance(made, FrozenTemplate)
    return made


def environment(body: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in body["spec"]["containers"][0]["env"]}


def told_agent(body: dict[str, Any]) -> dict[str, str]:
    """Return what the pod's agent reads of its command."""
    command = body["spec"]["containers"][0]["command"]
    return parse_options(command[command.index("run") :]).variables


def test_a_pod_knows_its_job_index_and_epoch() -> None:
    body = build_pod(frozen(job().nodes(3)), 2, 5)
    assert told_agent(body) == {"EVERSTEP_INDEX": "2", "EVERSTEP_EPOCH": "5"}
    assert not told_agent(body).keys() & environment(body).keys(), "told once"
    assert body["metadata"]["name"] == "digits-2"
    assert body["spec"]["hostname"] == "algo-3"
    assert body["spec"]["subdomain"] == "digits"
    assert body["spec"]["dnsConfig"] == {"searches": ["digits.default.svc.cluster.local"]}
    view = parse_pod(body)
    assert (view.index, view.epoch, view.template, view.owner) == (2, 5, 2, "uid-default-digits")


def test_the_users_labels_cannot_take_the_place_of_ours() -> None:
    made = frozen(job())
    tampered = FrozenTemplate(2, {**made.pod, "metadata": {"labels": {"everstep.dev/index": "7"}}}, made.job)
    assert parse_pod(build_pod(tampered, 0, 2)).index == 0


def test_the_agent_accepts_its_configuration() -> None:
    made = frozen(job().nodes(3).procs(2).distribution("mpi", "--bind-to", "none"))
    parsed = config.parse_config(json.loads(json.dumps(made.job)), {"EVERSTEP_INDEX": "2", "EVERSTEP_EPOCH": "5"})
    assert (parsed.world_size, parsed.epoch, parsed.distribution) == (6, 5, "mpi")
    assert parsed.distribution_options == ("--bind-to", "none")
    assert parsed.stop_grace == 110
    assert parsed.service == "digits.default.svc"


def test_plain_pods_get_the_contract_and_their_rank() -> None:
    made = frozen(job().nodes(12).plain().spec(hyperparameters={"lr": "0.1", "cost": "$(HOME)"}), plain=True)
    body = build_pod(made, 10, 5)
    env = environment(body)
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("10", "12", "algo-1")
    assert env["SM_CURRENT_HOST"] == "algo-11"
    assert env["SM_HP_COST"] == "$$(HOME)", "Kubernetes would expand it"
    container = body["spec"]["containers"][0]
    assert container["args"] == ["train"]
    assert "command" not in container
    told = json.loads(body["metadata"]["annotations"]["everstep.dev/resourceconfig"])
    assert told["current_host"] == "algo-11"


EXPANSION = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


def expand(body: dict[str, Any], config_map: dict[str, Any]) -> dict[str, str]:
    """The environment as a kubelet makes it."""
    found: dict[str, str] = {}
    for item in body["spec"]["containers"][0]["env"]:
        if (reference := item.get("valueFrom")) is not None:
            assert reference["configMapKeyRef"]["name"] == config_map["metadata"]["name"]
            found[item["name"]] = config_map["data"][reference["configMapKeyRef"]["key"]]
        else:
            found[item["name"]] = EXPANSION.sub(lambda m: found.get(m[1], m[0]) if m[1] else "$", item["value"])
    return found


@pytest.mark.parametrize("nodes", [1, 2, 11, 500])
def test_what_a_plain_rank_finds_is_the_contract_word_for_word(nodes: int) -> None:
    odd = {"hosts": '["algo-1"]', "cost": "$(HOME) $(EVERSTEP_HOSTS) $$(X)", "list": '["algo-1","algo-2"]'}
    built = job().nodes(nodes).plain().spec(hyperparameters=odd)
    made = frozen(built, plain=True)
    found = expand(build_pod(made, nodes - 1, 5), build_config_map(built.build(), made, b"key"))
    contract = build_sm_environment(
        ContractFacts("digits", odd, nodes, nodes - 1, made.job["instanceType"], num_cpus=made.job["cpus"])
    )
    assert {name: value for name, value in found.items() if name in contract} == contract


def test_a_plain_pod_of_five_hundred_names_the_hosts_twice_in_its_annotation_and_nowhere_else() -> None:
    body = build_pod(frozen(job().nodes(500).plain(), plain=True), 7, 5)
    annotation = body["metadata"]["annotations"].pop("everstep.dev/resourceconfig")
    assert annotation.count("algo-333") == 2
    assert "algo-333" not in json.dumps(body)
    assert len(json.dumps(body)) < 8000


def test_a_users_variable_wins_over_the_contracts() -> None:
    made = frozen(job().plain().spec(env=[{"name": "MASTER_PORT", "value": "1"}]), plain=True)
    assert environment(build_pod(made, 0, 1))["MASTER_PORT"] == "1"


def test_a_command_in_plain_mode_runs_without_the_agent() -> None:
    container = build_pod(frozen(job(), plain=True), 0, 1)["spec"]["containers"][0]
    assert container["command"] == ["python", "train.py"]
    assert container["args"] == []
    assert not any(m["mountPath"].startswith("/opt/everstep") for m in container["volumeMounts"])


def test_a_replacement_is_told_where_the_leader_is_and_differs_in_nothing_else() -> None:
    made = frozen(job().nodes(3))
    first, replacement = build_pod(made, 2, 5), build_pod(made, 2, 5, "10.1.0.4:8470")
    assert told_agent(replacement)["EVERSTEP_LEADER"] == "10.1.0.4:8470"
    assert "EVERSTEP_LEADER" not in told_agent(first)
    replacement["spec"]["containers"][0]["command"].pop()
    assert replacement == first
    assert "EVERSTEP_LEADER" not in told_agent(build_pod(made, 1, 5)), "the frozen template is not touched"


def test_a_plain_pod_has_no_agent_that_could_announce_itself() -> None:
    made = frozen(job().nodes(2).plain(), plain=True)
    assert build_pod(made, 1, 5, "10.1.0.4:8470") == build_pod(made, 1, 5)


def told(world: World) -> list[tuple[tuple[int, ...], str]]:
    """Return the indices of the pods that are made, and the leader that they are told."""
    return [(a.indices, a.leader) for a in world.reconcile().actions if isinstance(a, CreatePods)]


def test_pods_hear_of_a_leader_that_is_there_before_them() -> None:
    world = World(job().nodes(3).build())
    assert told(world) == [((0, 1, 2), "")], "nobody leads yet"
    world.run("Running")
    world.vanish(2)
    assert told(world) == [((2,), "10.0.0.0:8470")]


def test_pods_that_are_made_with_their_leader_hear_of_none() -> None:
    """The old leader's address may be anybody's by now."""
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(0)
    world.vanish(1)
    assert told(world) == [((0, 1), "")]


def test_pods_do_not_hear_of_a_leader_that_leaves() -> None:
    world = World(job().nodes(3).build()).run("Running")
    world.vanish(1)
    world.pods["digits-0"] = dataclasses.replace(world.pods["digits-0"], deleting_since=world.now)
    assert all(leader == "" for _, leader in told(world))


MAX_BODY_BYTES = 2800


def test_a_pod_says_only_what_no_default_gives_and_says_it_once() -> None:
    """All of it is stored, encoded and sent at each change of each of thousands of pods."""
    body = build_pod(frozen(job()), 0, 1)
    (trainer,) = body["spec"]["containers"]
    mounted = [mount["name"] for mount in trainer["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in body["spec"]["volumes"]), "each volume for one mount"
    assert not any(mount.keys() - {"name", "mountPath"} for mount in trainer["volumeMounts"])
    assert [each["name"] for each in trainer["env"]] == ["EVERSTEP_POD_IP", "EVERSTEP_NODE_NAME"]
    assert not trainer.keys() & {"imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy", "resources"}
    assert not body["spec"].keys() & {"dnsPolicy", "schedulerName", "serviceAccountName", "nodeSelector", "affinity"}
    assert len(json.dumps(body, separators=(",", ":"))) <= MAX_BODY_BYTES


def test_the_trainer_gets_the_devices_of_its_pods_resource_claims() -> None:
    over = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "four-gpus"}]}
    claims = [{"name": "gpus", "request": "h200"}]
    made = frozen(job().spec(numProcPerNode=4, resources={"claims": claims}, podTemplate={"spec": over}))
    spec = build_pod(made, 0, 2)["spec"]
    assert spec["containers"][0]["resources"] == {"claims": claims}
    assert spec["resourceClaims"] == over["resourceClaims"]
    assert made.job["numProcPerNode"] == 4

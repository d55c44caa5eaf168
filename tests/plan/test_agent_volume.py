"""A pod's agent finds its code, its job and its token in one volume, and pods of older operators in three."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.config import AgentPaths, load_config
from everstep_operator.plan.actions import CreatePods, EnsureAgent, EnsureSecret
from everstep_operator.plan.agent_volume import find_agent_config_map, find_token_secret
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.observation import parse_pod
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import build_config_map, resolve_template
from tests.builders import job
from tests.plan.world import World

AGENT = "everstep-agent-012345678901"  # a digest may well look like a number


def make_spec(name: str) -> dict[str, Any]:
    made = resolve_template(
        job(name).build(),
        epoch=2,
        pool=None,
        plain=False,
        settings=PlanSettings(agent_digest=AGENT.rpartition("-")[2] + "f" * 52),
    )
    assert isinstance(made, FrozenTemplate)
    spec: dict[str, Any] = build_pod(made, 0, 2)["spec"]
    return spec


def make_older(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a template's spec, or a pod's, as operators made it that gave an agent three volumes and variables, and
    named a template without the job's UID."""
    older = find_token_secret(spec).rpartition("-")[0]
    items = [{"key": "job.json", "path": "job.json"}]
    old = [
        {"name": "everstep-agent", "configMap": {"name": find_agent_config_map(spec)}},
        {"name": "everstep-job", "configMap": {"name": older, "items": items}},
        {"name": "everstep-token", "secret": {"secretName": find_token_secret(spec), "defaultMode": 0o440}},
    ]
    (trainer,) = spec["containers"]
    labels = {
        f"EVERSTEP_{each.upper()}": {"fieldRef": {"fieldPath": f"metadata.labels['everstep.dev/{each}']"}}
        for each in ("index", "epoch")
    }
    env = [*trainer["env"], *({"name": each, "valueFrom": label} for each, label in labels.items())]
    return {
        **spec,
        "containers": [{**trainer, "env": env}],
        "volumes": [*(v for v in spec["volumes"] if v["name"] != "everstep-agent"), *old],
    }


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", ["digits", "everstep-agent"])
def test_what_a_pod_mounts_is_read_of_one_volume_and_of_three(older: bool, name: str) -> None:
    spec = make_older(make_spec(name)) if older else make_spec(name)
    assert find_agent_config_map(spec) == AGENT
    assert find_token_secret(spec).startswith(f"{name}-2-")
    metadata = {"name": f"{name}-0", "ownerReferences": [{"name": name, "uid": "u", "controller": True}]}
    pod = parse_pod({"metadata": metadata, "spec": spec})
    assert (pod.template, pod.token_secret) == (2, find_token_secret(spec)), "whatever its labels say"


def test_the_agent_reads_beside_its_code_what_the_volume_holds() -> None:
    spec = make_spec("digits")
    (trainer,) = spec["containers"]
    (mount,) = (m for m in trainer["volumeMounts"] if m["name"] == "everstep-agent")
    code = next(word for word in trainer["command"] if word.endswith(".pyz"))
    paths = AgentPaths.for_pod(Path(code))
    (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
    files = {
        item["path"]: item.get("mode")
        for source in volume["projected"]["sources"]
        for item in next(iter(source.values()))["items"]  # else a ConfigMap with more keys could hide the others' files
    }
    read = (paths.agent, paths.job, paths.token, paths.pod_uid)
    assert {str(path) for path in read} == {f"{mount['mountPath']}/{name}" for name in files}
    assert files["token"] == 0o440, "other users of the container do not read it"


def test_pods_without_an_agent_name_none() -> None:
    made = resolve_template(job().plain().build(), epoch=2, pool=None, plain=True, settings=PlanSettings())
    assert isinstance(made, FrozenTemplate)
    assert (find_agent_config_map(made.pod["spec"]), find_token_secret(made.pod["spec"])) == ("", "")


def test_an_agent_knows_its_pod_by_the_volume_or_by_the_variable_of_an_older_template(tmp_path: Path) -> None:
    made = resolve_template(job().build(), epoch=2, pool=None, plain=False, settings=PlanSettings())
    assert isinstance(made, FrozenTemplate)
    (tmp_path / "job.json").write_text(json.dumps(made.job))
    paths, environ = AgentPaths.for_pod(tmp_path / "agent.pyz"), {"EVERSTEP_INDEX": "0", "EVERSTEP_EPOCH": "2"}
    assert load_config(paths, {**environ, "EVERSTEP_POD_UID": "older"}).pod_uid == "older"
    (tmp_path / "pod-uid").write_text("0a1b-2c3d")
    assert load_config(paths, environ).pod_uid == "0a1b-2c3d"


@pytest.mark.parametrize("plain", [False, True])
def test_a_job_that_is_applied_anew_mounts_nothing_by_a_name_of_its_predecessors(plain: bool) -> None:
    """A kubelet with pods of both, for the former ones stop slowly, gives the new ones what it has read of a name."""

    def list_references(uid: str) -> set[str]:
        made = resolve_template(
            job().meta(uid=uid).build(), epoch=1, pool=None, plain=plain, settings=PlanSettings(agent_digest=AGENT)
        )
        assert isinstance(made, FrozenTemplate)
        spec = build_pod(made, 0, 1)["spec"]
        (trainer,) = spec["containers"]
        sources = [
            source.get(kind) or {}
            for volume in spec["volumes"]
            for source in (volume.get("projected") or {}).get("sources") or ()
            for kind in ("configMap", "secret")
        ]
        values = [(each.get("valueFrom") or {}).get("configMapKeyRef") or {} for each in trainer["env"]]
        names = {str(each["name"]) for each in (*sources, *values) if each.get("name")}
        assert not plain or len(names) == 1, "its volume and its variables are of one ConfigMap"
        return names - {find_agent_config_map(spec)}

    former, anew = list_references("1b4e28ba-2fa1"), list_references("6fa459ea-ee8a")
    assert former
    assert not former & anew


def test_a_job_of_an_older_operator_goes_on_as_it_began() -> None:
    world = World(job().nodes(2).build()).run("Running")
    frozen = world.observe().frozen
    assert frozen is not None
    agent, token = find_agent_config_map(frozen.pod["spec"]), find_token_secret(frozen.pod["spec"])
    older = replace(frozen, pod={**frozen.pod, "spec": make_older(frozen.pod["spec"])})
    body = build_config_map(world.job, older, world.settings.operator_key)
    assert body["metadata"]["name"] == "digits-1"
    world.config_maps = {"digits-1": body}
    world.vanish(1)
    actions = world.reconcile().actions
    assert [a.name for a in actions if isinstance(a, EnsureAgent)] == [agent]
    assert [a.name for a in actions if isinstance(a, EnsureSecret)] == [token]
    (made,) = (a for a in actions if isinstance(a, CreatePods))
    body = build_pod(made.frozen, 1, made.epoch, made.leader)
    (trainer,) = body["spec"]["containers"]
    assert trainer["command"][-1] == "run", "its agent knows no options"
    told = {each["name"]: each.get("value") for each in trainer["env"]}
    assert (told["EVERSTEP_INDEX"], told["EVERSTEP_EPOCH"], told["EVERSTEP_LEADER"]) == ("1", "1", "10.0.0.0:8470")
    assert (parse_pod(body).epoch, parse_pod(body).is_epoch_fixed) == (1, True)
    assert {"everstep-job", "everstep-token"} <= {volume["name"] for volume in body["spec"]["volumes"]}
    world.run("Running")

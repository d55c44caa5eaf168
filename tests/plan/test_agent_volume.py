"""A pod's agent finds its code, its job and its token in one volume, and pods of older operators in three."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.config import AgentPaths, load_config
from everstep_operator.plan.agent_volume import find_agent_config_map, find_token_secret
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.observation import parse_pod
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import resolve_template
from tests.builders import job

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


def make_old_spec(name: str) -> dict[str, Any]:
    """A pod's spec as operators made it that gave an agent three volumes."""
    old = [
        {"name": "everstep-agent", "configMap": {"name": AGENT}},
        {
            "name": "everstep-job",
            "configMap": {"name": f"{name}-2", "items": [{"key": "job.json", "path": "job.json"}]},
        },
        {"name": "everstep-token", "secret": {"secretName": find_token_secret(make_spec(name)), "defaultMode": 0o440}},
    ]
    spec = make_spec(name)
    return {**spec, "volumes": [*(v for v in spec["volumes"] if v["name"] != "everstep-agent"), *old]}


@pytest.mark.parametrize("make", [make_spec, make_old_spec])
@pytest.mark.parametrize("name", ["digits", "everstep-agent"])
def test_what_a_pod_mounts_is_read_of_one_volume_and_of_three(make: Any, name: str) -> None:
    spec = make(name)
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
        for item in next(iter(source.values())).get("items", [{"path": "agent.pyz"}])
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

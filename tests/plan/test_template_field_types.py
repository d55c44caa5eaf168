"""A pod template of the wrong shape ends its job with a message, whatever is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.template import RejectedTemplate, resolve_template
from tests.builders import job
from tests.plan.world import World


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"containers": [{"name": "trainer", "securityContext": "x"}]}, "containers[trainer].securityContext"),
        ({"containers": [{"name": "x", "image": "y", "ports": [1]}]}, "containers[x].ports must be a list of objects"),
        ({"containers": [{"name": "x", "image": "y", "volumeMounts": "z"}]}, "containers[x].volumeMounts"),
        ({"volumes": [{"name": "v", "projected": []}]}, "volumes[v].projected must be an object"),
        ({"volumes": [{"name": "v", "projected": {"sources": [1]}}]}, "volumes[v].projected.sources"),
        ({"initContainers": "x"}, "initContainers must be a list"),
        ({"initContainers": [1]}, "initContainers must be a list of objects, not [1]"),
        ({"priorityClassName": ["x"]}, "priorityClassName must be a string"),
        ({"serviceAccount": {}}, "serviceAccount must be a string"),
        ({"ephemeralContainers": ["x"]}, "ephemeralContainers must be a list of objects"),
        (
            {"containers": [{"name": "x", "image": "y", "volumeMounts": [{"name": "v", "mountPath": 5}]}]},
            "containers[x].volumeMounts.mountPath must be a string, not 5",
        ),
        (
            {"containers": [{"name": "x", "image": "y", "securityContext": {"capabilities": {"add": [["z"]]}}}]},
            "containers[x].securityContext.capabilities.add[0] must be a string",
        ),
        (
            {"securityContext": {"seccompProfile": {"type": ["RuntimeDefault"]}}},
            "securityContext.seccompProfile.type must be a string",
        ),
        ({"affinity": [{"nodeAffinity": {}}]}, "affinity must be an object"),
        (
            {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [1]}}},
            "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution must be an object",
        ),
        (
            {
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": "x"}]}
                    }
                }
            },
            "nodeSelectorTerms[0].matchFields must be a list of objects",
        ),
        ({"securityContext": {"sysctls": [{"name": ["x"]}]}}, "securityContext.sysctls[0].name must be a string"),
    ],
)
def test_a_template_of_the_wrong_shape_fails_its_job_and_says_where(over: dict[str, Any], said: str) -> None:
    world = World(job().pod(**over).build()).run("Failed")
    assert world.status.transitions[-1].reason == "InvalidTemplate"
    assert said in world.status.conditions[0].message


def test_a_null_is_as_good_as_no_field() -> None:
    read_only = {"securityContext": {"readOnlyRootFilesystem": True}, "volumeMounts": None}
    made = resolve_template(
        job().pod(containers=[{"name": "trainer", **read_only}]).build(),
        epoch=1,
        pool=None,
        plain=False,
        settings=PlanSettings(),
    )
    assert not isinstance(made, RejectedTemplate)
    assert "/tmp" in {mount["mountPath"] for mount in made.pod["spec"]["containers"][0]["volumeMounts"]}


FIELDS = st.sampled_from(
    [
        "name",
        "ports",
        "containerPort",
        "hostPort",
        "volumeMounts",
        "mountPath",
        "ephemeralContainers",
        "sysctls",
        "type",
        "seccompProfile",
        "add",
        "capabilities",
        "securityContext",
        "privileged",
        "readOnlyRootFilesystem",
        "nodeAffinity",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "preferredDuringSchedulingIgnoredDuringExecution",
        "nodeSelectorTerms",
        "matchFields",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 1) | st.text(max_size=2),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(FIELDS, below, max_size=3),
    max_leaves=8,
)
PASSED = st.sampled_from(
    ["initContainers", "serviceAccount", "priorityClassName", "securityContext", "tolerations", "dnsConfig", "affinity"]
)
CONTAINER = st.dictionaries(FIELDS, JSON, max_size=4)


@given(spec=st.dictionaries(PASSED, JSON, max_size=3), trainer=CONTAINER, sidecar=CONTAINER, volume=JSON)
def test_no_template_breaks_a_plan(
    spec: dict[str, Any], trainer: dict[str, Any], sidecar: dict[str, Any], volume: Any
) -> None:
    over = {
        **spec,
        "containers": [{**trainer, "name": "trainer"}, {**sidecar, "name": "x"}],
        "volumes": [{"name": "v", "projected": volume}],
    }
    for plain in (False, True):
        wanted = job().nodes(2).pod(**over).build()
        made = resolve_template(wanted, epoch=1, pool=None, plain=plain, settings=PlanSettings())
        if isinstance(made, RejectedTemplate):
            assert made.message
            continue
        for index in (0, 1):
            assert build_pod(made, index, 1, avoid=["bad"], shun=["worse"])


def test_an_init_container_without_a_name_is_left_to_the_api_server() -> None:
    """As a misspelt `name`; a plan that stumbles over it would be tried for ever."""
    world = World(job().nodes(2).pod(initContainers=[{"nmae": "fetch", "image": "x"}]).build()).run("Running")
    assert len(world.pods) == 2

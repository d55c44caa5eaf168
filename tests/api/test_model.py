"""The model alone: verdict and words of every case in the tables."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError

from everstep_operator.api.job import TrainingJob, TrainingJobSpec
from everstep_operator.api.load import explain_errors
from everstep_operator.api.resources import RESOURCES
from tests.api.tables import Case, cases, manifest
from tests.builders import job, pool

BY_KIND = {resource.kind: resource for resource in RESOURCES}


@pytest.mark.parametrize("case", cases("valid"))
def test_accepts(case: Case) -> None:
    data = manifest(case)
    made = BY_KIND[data["kind"]].model.parse(data)
    assert BY_KIND[data["kind"]].model.parse(made.manifest()) == made, "what it writes, it reads"


@pytest.mark.parametrize("case", cases("invalid"))
def test_refuses_and_says_why(case: Case) -> None:
    data = manifest(case)
    resource = BY_KIND[data["kind"]]
    with pytest.raises(ValidationError) as caught:
        resource.model.parse(data)
    said = "\n".join(str(problem) for problem in explain_errors(caught.value, resource))
    expected = case["model_says"] if "model_says" in case else case["says"]
    assert expected in said


@pytest.mark.parametrize("case", cases("update"))
def test_judges_updates(case: Case) -> None:
    old, new = (TrainingJob.parse(manifest(case, side)).spec for side in ("old", "new"))
    said = [rule.message for rule in TrainingJobSpec.update_rules if not rule.check(new, old)]
    assert (case["says"] in "; ".join(said)) if "says" in case else said == []


def test_every_broken_rule_is_reported_with_its_field() -> None:
    data = job().pod(hostname="a", subdomain="b").manifest()
    with pytest.raises(ValidationError) as caught:
        TrainingJob.parse(data)
    fields = [problem.field for problem in explain_errors(caught.value, BY_KIND["TrainingJob"])]
    assert fields == ["spec.podTemplate.spec.hostname", "spec.podTemplate.spec.subdomain"]


def test_attributes_are_snake_case_and_frozen() -> None:
    made = job().nodes(3).procs(2).timeouts(runtime="1h30m").build()
    assert (made.spec.num_nodes, made.spec.num_proc_per_node) == (3, 2)
    assert made.spec.timeouts.runtime == timedelta(minutes=90)
    with pytest.raises(ValidationError):
        made.spec.num_nodes = 4


def test_a_copy_of_a_spec_with_another_field_has_another_hash() -> None:
    spec = job().build().spec
    before = spec.pods_hash()
    changed = spec.model_copy(update={"image": "other"})
    assert changed.pods_hash() != before
    assert spec.model_copy().pods_hash() == before
    assert spec == job().build().spec, "whether it was asked for its hash makes no difference"


def test_unknown_pod_fields_survive() -> None:
    made = job().pod(nodeSelector={"a": "b"}, containers=[{"name": "log", "image": "y", "tty": True}]).build()
    assert made.manifest()["spec"]["podTemplate"]["spec"] == {
        "nodeSelector": {"a": "b"},
        "containers": [{"name": "log", "image": "y", "tty": True}],
    }


@pytest.mark.parametrize(
    ("managed_by", "ours"), [(None, True), ("everstep.dev/operator", True), ("kueue.x-k8s.io/multikueue", False)]
)
def test_a_job_of_another_controller_is_not_ours(managed_by: str | None, ours: bool) -> None:
    assert job().spec(managedBy=managed_by).build().managed_here is ours


def test_pool_allows_its_namespaces_only() -> None:
    assert pool().build().allows("anyone")
    assert not pool().namespaces("a").build().allows("b")


def test_instance_type_falls_back_to_the_pools_name() -> None:
    assert pool("a100").build().instance_type == "a100"
    assert pool("a100").spec(instanceType="ml.p4d.24xlarge").build().instance_type == "ml.p4d.24xlarge"

"""The operator's rights: what it uses, where it uses it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from everstep_operator.cluster.rbac import CHECKED_BY_ADMISSION, USED_PERMISSIONS, Scope

Render = Callable[..., list[dict[str, Any]]]
Right = tuple[str, str, str]

OWN = "everstep-system"
LEASES = "kube-node-lease"


def rights(rules: Iterable[dict[str, Any]]) -> Iterator[Right]:
    """(group, resource, verb) of every rule."""
    for rule in rules:
        assert set(rule) == {"apiGroups", "resources", "verbs"}, rule
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb


def granted(objects: list[dict[str, Any]]) -> dict[str, set[Right]]:
    """Return the rights of the operator's account by namespace; the key of cluster-wide ones is "*"."""
    account = next(each for each in objects if each["kind"] == "ServiceAccount")["metadata"]["name"]
    roles = {
        (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]): each["rules"]
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    found: dict[str, set[Right]] = {}
    for binding in objects:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": OWN}]
        namespace = binding["metadata"].get("namespace")
        reference = binding["roleRef"]
        rules = roles[(reference["kind"], namespace if reference["kind"] == "Role" else None, reference["name"])]
        found.setdefault(namespace or "*", set()).update(rights(rules))
    return found


def used(*scopes: Scope) -> set[Right]:
    return {
        (right.group, right.resource, right.verb)
        for right in USED_PERMISSIONS | CHECKED_BY_ADMISSION
        if right.scope in scopes
    }


def test_cluster_wide_the_operator_may_do_what_it_does_and_nothing_else(render: Render) -> None:
    assert granted(render()) == {"*": used("jobs", "cluster"), LEASES: used("node-leases"), OWN: used("own")}


def test_in_namespaces_the_operator_may_do_what_it_does_and_nothing_else(render: Render) -> None:
    held = granted(render(watchNamespaces=["team-a", "team-b"]))
    assert held == {
        "*": used("cluster"),
        "team-a": used("jobs"),
        "team-b": used("jobs"),
        LEASES: used("node-leases"),
        OWN: used("own"),
    }


def test_without_a_use_for_leases_of_nodes_there_is_no_right_to_read_them(render: Render) -> None:
    assert LEASES not in granted(render(nodeSilenceSeconds=0))


def test_where_jobs_get_budgets_the_operator_may_make_them_and_nowhere_else(render: Render) -> None:
    assert not [right for right in granted(render())["*"] if right[1] == "poddisruptionbudgets"]
    on = {"disruptionBudget": True}
    assert granted(render(jobPods=on))["*"] == used("jobs", "budgets", "cluster")
    held = granted(render(jobPods=on, watchNamespaces=["team-a"]))
    assert (held["*"], held["team-a"]) == (used("cluster"), used("jobs", "budgets"))


def test_nodes_can_be_changed_only_where_they_may_be_marked_out_of_service(render: Render) -> None:
    assert granted(render(outOfServiceTaint=True))["*"] == used("jobs", "cluster", "taints")
    held = granted(render(outOfServiceTaint=True, watchNamespaces=["team-a"]))
    assert (held["*"], held["team-a"]) == (used("cluster", "taints"), used("jobs"))


def test_the_operator_s_own_namespace_may_be_one_of_the_watched(render: Render) -> None:
    assert granted(render(watchNamespaces=[OWN]))[OWN] == used("jobs", "own")


@pytest.mark.parametrize("namespaces", [[], ["team-a"]])
def test_no_secret_can_ever_be_read(render: Render, namespaces: list[str]) -> None:
    verbs = {
        verb
        for held in granted(render(watchNamespaces=namespaces)).values()
        for _, resource, verb in held
        if resource == "secrets"
    }
    assert verbs == {"create", "delete"}


@pytest.mark.parametrize("namespaces", [[], ["team-a"]])
def test_there_is_no_wildcard(render: Render, namespaces: list[str]) -> None:
    for held in granted(render(watchNamespaces=namespaces)).values():
        assert [right for right in held if "*" in right] == []


def test_no_right_to_change_a_job_s_spec(render: Render) -> None:
    """Argo CD and Helm own it; a field manager beside them would keep them out of sync for ever."""
    verbs = {verb for _, resource, verb in granted(render())["*"] if resource == "trainingjobs"}
    assert verbs.isdisjoint({"update", "patch", "create"})


def test_whoever_may_edit_a_namespace_may_edit_its_jobs(render: Render) -> None:
    roles = {each["metadata"]["name"]: each for each in render() if each["kind"] == "ClusterRole"}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    targets = {
        target: {
            right
            for role in roles.values()
            if role["metadata"]["labels"].get(prefix + target)
            for right in rights(role["rules"])
        }
        for target in ("view", "edit", "admin")
    }
    assert {verb for _, _, verb in targets["view"]} == {"get", "list", "watch"}
    assert ("everstep.dev", "trainingjobs", "create") in targets["edit"]
    assert ("everstep.dev", "trainingjobs", "delete") in targets["admin"]
    # Pools say where everybody's jobs may run: they are the platform team's.
    assert {verb for _, resource, verb in targets["edit"] if resource == "trainingpools"} <= {"get", "list", "watch"}


def test_aggregation_can_be_switched_off(render: Render) -> None:
    objects = render(rbac={"aggregate": False})
    assert len([each for each in objects if each["kind"] == "ClusterRole"]) == 1

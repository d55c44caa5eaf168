"""The operator reads every setting that the chart passes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep_operator.settings import PREFIX, NodeSignalSetting, OperatorSettings

Render = Callable[..., list[dict[str, Any]]]
DEFAULTS = OperatorSettings.load({})


def container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def environment(objects: list[dict[str, Any]]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container(objects)["env"] if "value" in each}


def test_the_chart_s_defaults_are_the_operator_s(render: Render) -> None:
    assert OperatorSettings.load(environment(render())) == DEFAULTS


def test_every_variable_is_a_setting(render: Render) -> None:
    given = environment(render(watchNamespaces=["a"], jobPods={"allowedServiceAccounts": ["x"]}))
    assert {name.removeprefix(PREFIX).lower() for name in given} <= set(OperatorSettings.model_fields)


def test_values_reach_the_operator(render: Render) -> None:
    objects = render(
        watchNamespaces=["team-a", "team-b"],
        clusterDomain="corp.example",
        fenceTimeoutSeconds=60,
        nodeFailureWindowSeconds=3600,
        nodeSilenceSeconds=30,
        outOfServiceTaint=True,
        nodeSignals=[{"taint": "corp.example/reclaim", "reason": "SpotInterruption", "seconds": 60}],
        jobPods={
            "allowedServiceAccounts": ["s3-reader"],
            "allowedHostFields": ["hostNetwork"],
            "allowedPriorityClasses": ["high"],
            "copiedLabels": ["a/b", "c/d"],
            "annotations": {"karpenter.sh/do-not-disrupt": None, "corp.example/team": "ml"},
            "disruptionBudget": True,
        },
        operatorKey={"secretName": "key-2"},
        logging={"level": "debug", "format": "text"},
        env=[{"name": "EVERSTEP_WORKERS", "value": "4"}],
    )
    expected = {
        "watch_namespaces": ("team-a", "team-b"),
        "cluster_domain": "corp.example",
        "fence_timeout": 60,
        "node_failure_window": 3600,
        "node_silence": 30,
        "out_of_service_taint": True,
        "node_signals": (NodeSignalSetting(taint="corp.example/reclaim", reason="SpotInterruption", seconds=60),),
        "allowed_service_accounts": ("s3-reader",),
        "allowed_host_fields": ("hostNetwork",),
        "allowed_priority_classes": ("high",),
        "copied_labels": ("a/b", "c/d"),
        "job_pod_annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "corp.example/team": "ml"},
        "disruption_budget": True,
        "key_secret": "key-2",
        "log_level": "debug",
        "log_format": "text",
        "workers": 4,
    }
    assert OperatorSettings.load(environment(objects)) == DEFAULTS.model_copy(update=expected)


def test_the_pod_tells_who_it_is_and_where(render: Render) -> None:
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container(render())["env"]
        if "valueFrom" in each
    }
    assert fields == {"POD_UID": "metadata.uid", "POD_NAMESPACE": "metadata.namespace"}


def test_ports_and_paths_are_the_operator_s_defaults(render: Render) -> None:
    found = container(render())
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports == {"health": DEFAULTS.health_port, "metrics": DEFAULTS.metrics_port}
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    assert mounts["key"] == str(DEFAULTS.key_folder)


def test_an_empty_list_reaches_the_operator_as_none_and_not_as_its_default(render: Render) -> None:
    """Whoever empties a list wants none of it."""
    empty: dict[str, list[str]] = {
        name: [] for name in ("allowedServiceAccounts", "allowedHostFields", "allowedPriorityClasses")
    }
    settings = OperatorSettings.load(environment(render(jobPods={**empty, "copiedLabels": []}, nodeSignals=[])))
    assert settings.copied_labels == ()
    assert settings == DEFAULTS.model_copy(update={"copied_labels": ()})


def test_what_is_null_reaches_the_operator_as_none_of_it(render: Render) -> None:
    settings = OperatorSettings.load(environment(render(jobPods={"annotations": None}, nodeSignals=None)))
    assert settings == DEFAULTS.model_copy(update={"job_pod_annotations": {}})


def test_namespaces_that_are_null_are_every_namespace(render: Render) -> None:
    assert render(watchNamespaces=None) == render()

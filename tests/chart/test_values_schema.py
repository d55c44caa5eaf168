"""A wrong value is refused before anything is installed, by name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "charts" / "everstep"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"operatorKey": {"secretNam": "x"}}, "secretNam"),
        ({"operatorKey": {"previousSecretNames": "x"}}, "previousSecretNames"),
        ({"image": {"repositry": "x"}}, "repositry"),
        ({"image": {"repository": "x", "pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"repository": "x", "digest": "sha256:short"}}, "digest"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
        ({"nodeLostSeconds": "15s"}, "nodeLostSeconds"),
        ({"outOfServiceTaint": True, "nodeSilenceSeconds": 0}, "nodeSilenceSeconds is 0"),
        ({"nodeSignals": [{"taint": "a/b", "reason": "Weather"}]}, "reason"),
        ({"nodeSignals": [{"reason": "ScaleDown"}]}, "nodeSignals"),
        ({"jobPods": {"allowedHostFields": ["hostEverything"]}}, "allowedHostFields"),
        ({"pools": [{"name": "a"}]}, "spec"),
        ({"logging": {"level": "loud"}}, "level"),
        ({"resources": {"request": {}}}, "request"),
        ({"networkPolicy": {"enabled": "yes"}}, "enabled"),
        ({"podLabels": {"a": 1}}, "podLabels"),
        ({"podSecurityContext": {"runAsUser": "me"}}, "runAsUser"),
        ({"podSecurityContext": {"runAsUsr": 7}}, "runAsUsr"),
    ],
)
def test_bad_values_are_refused_by_name(template: Run, values: dict[str, Any], word: str) -> None:
    result = template(**values)
    assert result.returncode != 0
    assert word in result.stderr


def test_a_secret_may_be_named_after_its_registry(template: Run) -> None:
    result = template(imagePullSecrets=[{"name": "registry.example.com"}])
    assert result.returncode == 0, result.stderr


def test_every_default_is_described_and_every_description_has_a_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(described: dict[str, Any], values: dict[str, Any], path: str) -> None:
        properties = described["properties"]
        optional = {"global", "claims"}
        assert set(values) | optional >= set(properties), path
        assert set(values) <= set(properties), path
        for name, value in values.items():
            if isinstance(value, dict) and "properties" in properties[name]:
                compare(properties[name], value, f"{path}.{name}")

    compare(schema, defaults, "values")

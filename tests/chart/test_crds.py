"""The CRDs: one source, installed and upgraded with the release, never deleted by it."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "crds"
COPY = ROOT / "charts" / "everstep" / "files" / "crds"
Render = Callable[..., list[dict[str, Any]]]


def crds(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == "CustomResourceDefinition"}


def test_the_chart_carries_exactly_the_generated_crds() -> None:
    names = sorted(path.name for path in SOURCE.glob("*.yaml"))
    assert names, "crds/ is empty"
    assert names == sorted(path.name for path in COPY.glob("*.yaml")), "run: cp crds/*.yaml charts/everstep/files/crds/"
    _, different, missing = filecmp.cmpfiles(SOURCE, COPY, names, shallow=False)
    assert different + missing == [], "run: cp crds/*.yaml charts/everstep/files/crds/"


def test_rendering_changes_nothing_but_the_keep_annotation(render: Render) -> None:
    """Templating passes every number through a float: a bound such as 2147483647 must come out as it went in."""
    rendered = crds(render())
    for path in SOURCE.glob("*.yaml"):
        source = yaml.safe_load(path.read_text())
        found = rendered[source["metadata"]["name"]]
        assert found["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
        if not found["metadata"]["annotations"]:
            del found["metadata"]["annotations"]
        assert found == source


def test_uninstalling_keeps_the_crds_and_with_them_every_job(render: Render) -> None:
    policies = {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in crds(render()).values()}
    assert policies == {"keep"}


def test_crds_can_be_left_to_somebody_else(render: Render) -> None:
    assert crds(render(crds={"install": False})) == {}

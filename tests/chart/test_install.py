"""The chart on a real API server, through the life of a release."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from e2e.cluster.controlplane import ControlPlane

CHART = Path(__file__).parents[2] / "charts" / "everstep"
POOLS = {"pools": [{"name": "a100", "spec": {"capacityType": "spot", "nodeSelector": {"gpu": "a100"}}}]}
Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class Release:
    """`helm` and the API, on one control plane."""

    def __init__(self, helm: Run, kubeconfig: Path) -> None:
        self._helm, self._kubeconfig = helm, kubeconfig
        self._api = config.new_client_from_config(str(kubeconfig))

    def helm(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        common = ("--kubeconfig", str(self._kubeconfig), "--namespace", "everstep-system")
        return self._helm(verb, "everstep", *arguments, *common)

    def names(self, path: str) -> set[str]:
        return {item["metadata"]["name"] for item in self.items(path)}

    def items(self, path: str) -> list[dict[str, Any]]:
        try:
            answer: Any = self._api.call_api(
                path,
                "GET",
                response_types_map={200: "object"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
            )
        except client.ApiException as error:
            if error.status == 404:  # nothing of that kind is served (yet)
                return []
            raise
        items: list[dict[str, Any]] = answer["items"]
        return items

    def keys(self) -> tuple[str, list[str]]:
        """The Secrets that the operator's pod mounts as its current and its previous keys."""
        (deployment,) = self.items("/apis/apps/v1/namespaces/everstep-system/deployments")
        volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        previous = volumes.get("previous-keys", {"projected": {"sources": []}})["projected"]["sources"]
        return volumes["key"]["secret"]["secretName"], [source["secret"]["name"] for source in previous]


@pytest.fixture(scope="module")
def release(helm: Run) -> Iterator[Release]:
    with ControlPlane() as control_plane:
        yield Release(helm, control_plane.kubeconfig)


def test_a_release_is_installed_upgraded_and_uninstalled_and_leaves_the_jobs_behind(
    release: Release, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({**POOLS, "networkPolicy": {"enabled": True}}))
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

    installed = release.helm("install", str(CHART), "--create-namespace")
    assert installed.returncode == 0, installed.stderr
    assert "unknown field" not in installed.stderr
    assert release.names(crds) == {"trainingjobs.everstep.dev", "trainingpools.everstep.dev"}
    assert release.names("/apis/apps/v1/namespaces/everstep-system/deployments") == {"everstep"}

    upgraded = release.helm("upgrade", str(CHART), "--values", str(values))
    assert upgraded.returncode == 0, upgraded.stderr
    assert release.names("/apis/everstep.dev/v1alpha1/trainingpools") == {"a100"}

    # As docs/how-to/rotate-the-operator-key.md has it.
    first, second = "everstep-operator-key", "everstep-operator-key-2"
    current, previous = f'operatorKey.secretName="{second}"', "operatorKey.previousSecretNames"
    for settings, expected in (((current, f'{previous}=["{first}"]'), [first]), ((f"{previous}=[]",), [])):
        given = [f"--set-json={setting}" for setting in settings]
        rotated = release.helm("upgrade", str(CHART), "--reuse-values", *given)
        assert rotated.returncode == 0, rotated.stderr
        assert release.keys() == (second, expected)
    assert release.names("/apis/everstep.dev/v1alpha1/trainingpools") == {"a100"}, "the other values stay"

    removed = release.helm("uninstall")
    assert removed.returncode == 0, removed.stderr
    assert release.names("/apis/apps/v1/namespaces/everstep-system/deployments") == set()
    assert release.names(crds) == {"trainingjobs.everstep.dev", "trainingpools.everstep.dev"}

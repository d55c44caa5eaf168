"""`everstep status` and `everstep logs` against a real API server. Its pods never start: of theirs tells test_tail."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.waiting import until
from everstep.cli.cluster import GROUP, INDEX_LABEL, JOB_LABEL, VERSION
from everstep_operator.plan.node_failures import NodeFailure
from tests.cli.command import Done

ROOT = Path(__file__).parents[2]
Everstep = Callable[..., Done]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

FAILURE = {
    "cause": "Application",
    "reason": "ApplicationError",
    "rank": 1,
    "exitCode": 3,
    "message": "ValueError: boom",
    "logTail": ["Traceback (most recent call last):", "ValueError: boom"],
}
STATUS = {"phase": "Failed", "nodes": 1, "lastFailure": FAILURE}


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    """A cluster with the CRDs, a failed job with one pod that no node has, and a user without rights."""
    with ControlPlane() as control_plane:
        api = config.new_client_from_config(str(control_plane.kubeconfig))
        for path in (ROOT / "crds").glob("*.yaml"):
            client.ApiextensionsV1Api(api).create_custom_resource_definition(yaml.safe_load(path.read_text()))
        jobs: Any = client.CustomObjectsApi(api)
        place = {"group": GROUP, "version": VERSION, "namespace": "default", "plural": "trainingjobs"}
        job = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "TrainingJob",
            "metadata": {"name": "broken"},
            "spec": {"image": "none", "command": ["false"]},
        }

        def created() -> bool:
            try:
                jobs.create_namespaced_custom_object(body=job, **place)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return False
            return True

        until(created, "the CRDs are served", 30)
        jobs.patch_namespaced_custom_object_status(name="broken", body={"status": STATUS}, **place)
        core: Any = client.CoreV1Api(api)
        core.create_namespaced_service_account("default", {"metadata": {"name": "default"}})
        pod = {
            "metadata": {"name": "broken-0", "labels": {JOB_LABEL: "broken", INDEX_LABEL: "0"}},
            "spec": {"containers": [{"name": "trainer", "image": "none"}]},
        }
        core.create_namespaced_pod("default", pod)
        control_plane.user_kubeconfig("nobody")
        yield control_plane.kubeconfig


@pytest.fixture
def on_cluster(everstep_process: Everstep, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> Everstep:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    return everstep_process


def test_nodes_on_which_jobs_have_failed_are_listed_and_cleared(on_cluster: Everstep, kubeconfig: Path) -> None:
    assert "No job has failed" in on_cluster("nodes", "-n", "default").stderr
    told = [asdict(NodeFailure(f"1.{n}", "team-a", "digits", "PodLost", time.time() - 90)) for n in range(2)]
    core: Any = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
    data = {"worker-1": json.dumps(told), "worker-2": json.dumps(told[:1])}
    core.create_namespaced_config_map("default", {"metadata": {"name": "everstep-node-failures"}, "data": data})
    done = on_cluster("nodes", "-n", "default")
    (first, *_) = [line.split() for line in done.stdout.splitlines() if line.startswith("worker-1")]
    assert first[1:5] == ["2", "team-a", "PodLost", "team-a/digits"]
    done = on_cluster("nodes", "-n", "default", "--clear", "worker-1")
    assert (done.returncode, "worker-1 is removed" in done.stdout) == (0, True)
    assert "worker-1" not in on_cluster("nodes", "-n", "default").stdout
    done = on_cluster("nodes", "-n", "default", "--clear", "worker-9")
    assert (done.returncode, "nothing is on record of worker-9" in done.stderr) == (1, True)


def test_status_tells_phase_and_failure(on_cluster: Everstep) -> None:
    done = on_cluster("status", "broken")
    assert done.returncode == 0, done.stderr
    assert "broken in default  Failed" in done.stdout
    assert "rank 1, exit code 3" in done.stdout
    assert "| ValueError: boom" in done.stdout


def test_watching_ends_with_a_finished_job(on_cluster: Everstep) -> None:
    done = on_cluster("status", "broken", "--watch")
    assert done.returncode == 0, done.stderr
    assert "Failed" in done.stdout


def test_previous_shows_the_last_failure_s_log(on_cluster: Everstep) -> None:
    done = on_cluster("logs", "broken", "--previous")
    assert done.stdout == "[rank 1] Traceback (most recent call last):\n[rank 1] ValueError: boom\n"


@pytest.mark.parametrize("flags", [(), ("--follow",)])
def test_pods_that_never_started_have_no_log(on_cluster: Everstep, flags: tuple[str, ...]) -> None:
    done = on_cluster("logs", "broken", *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["status", "logs"])
def test_an_unknown_job_is_said_in_one_line(on_cluster: Everstep, command: str) -> None:
    done = on_cluster(command, "nowhere", "-n", "default")
    assert done.returncode == 1
    assert done.stderr.startswith("everstep: there is no TrainingJob nowhere in namespace default")


def test_a_user_without_rights_hears_what_the_api_server_said(
    on_cluster: Everstep, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig.with_name("nobody.kubeconfig")))
    done = on_cluster("status", "broken")
    assert done.returncode == 1
    assert 'User "nobody" cannot get resource "trainingjobs"' in done.stderr
    assert "Traceback" not in done.stderr

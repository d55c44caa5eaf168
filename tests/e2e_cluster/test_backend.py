"""The right kind of cluster is chosen; where none is possible the command says so in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster import backend
from e2e.cluster.errors import NoBackendError
from e2e.cluster.external import ExternalCluster
from e2e.cluster.kind import KindCluster
from e2e.cluster.local import LocalCluster
from e2e.cluster.state import ClusterSpec

EXIT_NO_BACKEND = 3


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No cluster is up; nothing of this machine shows."""
    monkeypatch.setenv("EVERSTEP_CLUSTER_DIR", str(tmp_path))
    monkeypatch.delenv("EVERSTEP_USE_KUBECONFIG", raising=False)
    return tmp_path


def _possible(monkeypatch: pytest.MonkeyPatch, *, kind: bool, local: bool) -> None:
    monkeypatch.setattr(KindCluster, "possible", staticmethod(lambda: kind))
    monkeypatch.setattr(LocalCluster, "possible", staticmethod(lambda: local))


def test_your_cluster_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_USE_KUBECONFIG", "1")
    assert isinstance(backend.choose(), ExternalCluster)


def test_kind_where_docker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    _possible(monkeypatch, kind=True, local=True)
    assert isinstance(backend.choose(), KindCluster)


def test_local_without_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    _possible(monkeypatch, kind=False, local=True)
    assert isinstance(backend.choose(), LocalCluster)


def test_what_is_up_is_used_whatever_became_possible(monkeypatch: pytest.MonkeyPatch, empty_machine: Path) -> None:
    ClusterSpec("local").save(empty_machine)
    _possible(monkeypatch, kind=True, local=True)
    assert isinstance(backend.choose(), LocalCluster)


def test_nothing_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    _possible(monkeypatch, kind=False, local=False)
    with pytest.raises(NoBackendError):
        backend.choose()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to stop being root")
def test_the_command_ends_with_code_3_and_one_sentence(tmp_path: Path) -> None:
    program = "import os, runpy, sys; os.geteuid = lambda: 1000; sys.argv = ['e2e.cluster', 'up']; "
    program += "runpy.run_module('e2e.cluster', run_name='__main__')"
    environment = {**os.environ, "PATH": "/nonexistent"}
    here = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=here, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == EXIT_NO_BACKEND
    assert len(result.stderr.strip().splitlines()) == 1


def test_shape_survives_the_disk(empty_machine: Path) -> None:
    shape = ClusterSpec("local", nodes=5, gpus=8)
    shape.save(empty_machine)
    assert ClusterSpec.load(empty_machine) == shape

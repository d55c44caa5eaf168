"""All nodes have one folder alike, as they would a network volume."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e.cluster import gpu, kind
from e2e.cluster.state import make_shared_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "shared-volume.yaml"


@pytest.fixture(autouse=True)
def cluster_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERSTEP_CLUSTER_DIR", str(tmp_path / "cluster"))
    return tmp_path / "cluster"


def test_any_user_may_write_into_it(cluster_folder: Path) -> None:
    make_shared_folder()
    assert make_shared_folder() == cluster_folder / "shared"
    assert (cluster_folder / "shared").stat().st_mode & 0o7777 == 0o1777


def test_the_workers_of_kind_mount_it_where_the_example_looks_for_it(
    cluster_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def run(*command: str) -> str:
        if "create" in command:
            read.append(yaml.safe_load(Path(command[command.index("--config") + 1]).read_text()))
        return ""

    monkeypatch.setattr(kind, "_run", run)
    monkeypatch.setattr(kind, "binary", lambda name: Path(name))
    monkeypatch.setattr(kind, "PUBLISHED_KUBECONFIG", tmp_path / "kubeconfig")
    monkeypatch.setattr(kind.KindCluster, "_workers", lambda self: [])
    monkeypatch.setattr(gpu, "pretend", lambda *_: None)
    kind.KindCluster().up(nodes=2)
    volume = next(each for each in yaml.safe_load_all(EXAMPLE.read_text()) if each["kind"] == "PersistentVolume")
    mount = {"hostPath": str(cluster_folder / "shared"), "containerPath": volume["spec"]["hostPath"]["path"]}
    workers = [node for node in read[0]["nodes"] if node["role"] == "worker"]
    assert [node["extraMounts"] for node in workers] == [[mount], [mount]]

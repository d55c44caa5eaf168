"""A program is built once per content of its module, and never found half built."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from e2e.cluster import binaries
from e2e.cluster.errors import ClusterError

ETCD = binaries.PROGRAMS["etcd"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``go`` that writes half of each program and then does what the file ``behaviour`` says."""
    folder = tmp_path / "path"
    folder.mkdir()
    program = folder / "go"
    program.write_text(
        '#!/bin/bash\necho "$@" >> ' + str(tmp_path / "calls") + "\n"
        'while [ "$1" != -o ]; do shift; done\ntarget=$2; shift 2\n'
        'for package; do name=${package%/v[0-9]}; echo half > "$target${name##*/}"; done\n'
        ". " + str(tmp_path / "behaviour") + "\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path


def test_key_follows_the_pinned_modules(tmp_path: Path) -> None:
    before = binaries.cache_key(ETCD)
    modules = tmp_path / "go"
    shutil.copytree(binaries.GO_MODULES, modules)
    assert binaries.cache_key(ETCD, modules) == before
    with (modules / "etcd" / "go.sum").open("a") as sums:
        sums.write("one more line\n")
    assert binaries.cache_key(ETCD, modules) != before


def test_key_follows_the_link_flags() -> None:
    stamped = dataclasses.replace(ETCD, stamps=("main.version=1",))
    assert binaries.cache_key(ETCD) != binaries.cache_key(stamped)


def test_kubernetes_knows_its_version() -> None:
    (flags,) = [flag for flag in binaries.PROGRAMS["kubelet"].flags if flag.startswith("-ldflags")]
    assert f"-X k8s.io/component-base/version.gitVersion={binaries.KUBERNETES_VERSION}" in flags


def test_built_once(cache: Path, fake_go: Path) -> None:
    (fake_go / "behaviour").write_text("exit 0")
    first = binaries.binary("etcd")
    assert first.read_text() == "half\n"
    assert first.is_relative_to(cache)
    assert binaries.binary("etcd") == first
    assert len((fake_go / "calls").read_text().splitlines()) == 1


def test_the_programs_of_one_module_are_built_by_one_call(cache: Path, fake_go: Path) -> None:
    (fake_go / "behaviour").write_text("exit 0")
    binaries.ensure(["kubelet"])
    binaries.ensure(["etcd", "kubectl", "kubelet", "kube-proxy"])
    of_kubelet, of_etcd, of_both = (fake_go / "calls").read_text().splitlines()
    assert of_kubelet.endswith("/ k8s.io/kubernetes/cmd/kubelet")
    assert of_etcd.endswith("/ go.etcd.io/etcd/server/v3")
    assert of_both.endswith("/ k8s.io/kubernetes/cmd/kubectl k8s.io/kubernetes/cmd/kube-proxy")
    assert binaries.missing(["etcd", "kubectl", "kubelet", "kube-proxy", "helm"]) == ["helm"]


@pytest.mark.parametrize("end", ["echo 'no such module' >&2; exit 1", "kill -9 $$"])
def test_a_failed_build_leaves_no_program(cache: Path, fake_go: Path, end: str) -> None:
    (fake_go / "behaviour").write_text(end)
    with pytest.raises(ClusterError, match="building etcd failed"):
        binaries.binary("etcd")
    assert not binaries.path_of("etcd").exists()
    assert not [path for path in cache.rglob("*") if path.is_file() and path.name != ".etcd.lock"]


def test_without_go_the_error_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ClusterError, match="install Go"):
        binaries.binary("etcd")


def test_modules_name_no_private_source() -> None:
    for path in binaries.GO_MODULES.glob("*/go.mod"):
        replaced = [line for line in path.read_text().splitlines() if "=>" in line]
        # Kubernetes has to name its own parts again; nothing else may be taken from elsewhere.
        assert all(line.split()[0] == line.split("=>")[1].split()[0] for line in replaced), path

"""The programs of a cluster, built from their Go modules into a content-addressed cache.

A program is built once per content of its module folder and its link flags. The programs of one module are built by one
`go build`, which compiles what they share once and links them side by side. A build happens in another folder and its
programs are renamed when complete, under a file lock: neither a crash nor two test workers can leave half a program.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cache import cache_dir
from e2e.cluster.errors import ClusterError

GO_MODULES = Path(__file__).parent / "go"


@dataclass(frozen=True)
class Program:
    """One executable: the folder below ``go/`` that pins its module, and its main package."""

    name: str
    folder: str
    package: str
    stamps: tuple[str, ...] = field(default=())

    @property
    def executable(self) -> str:
        """Return the name under which `go build` leaves it: the package's last element that is no major version."""
        elements = self.package.split("/")
        if elements == ["."]:
            return self.folder
        return elements[-2] if re.fullmatch(r"v\d+", elements[-1]) else elements[-1]

    @property
    def flags(self) -> tuple[str, ...]:
        stamps = " ".join(f"-X {stamp}" for stamp in self.stamps)
        return ("-trimpath", "-buildvcs=false", f"-ldflags=-s -w {stamps}".rstrip())


def module_version(folder: str, module: str) -> str:
    """Return the version of ``module`` that the go.mod in ``folder`` pins, such as ``v1.34.2``."""
    text = (GO_MODULES / folder / "go.mod").read_text()
    found = re.search(rf"^\s*(?:require )?{re.escape(module)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise ClusterError(f"{folder}/go.mod does not require {module}")
    return found.group(1)


KUBERNETES_VERSION = module_version("kubernetes", "k8s.io/kubernetes")
ETCD_VERSION = module_version("etcd", "go.etcd.io/etcd/server/v3")
COREDNS_VERSION = module_version("coredns", "github.com/coredns/coredns")
KWOK_VERSION = module_version("kwok", "sigs.k8s.io/kwok")
HELM_VERSION = module_version("helm", "helm.sh/helm/v3")


def _kubernetes_stamps() -> tuple[str, ...]:
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".", 2)
    values = {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return tuple(f"{package}.{name}={value}" for package in packages for name, value in values.items())


def _helm_stamps() -> tuple[str, ...]:
    # Unstamped, `helm template` and `helm lint` take the cluster for Kubernetes 1.20 and refuse any modern chart.
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".", 2)
    packages = ("helm.sh/helm/v3/pkg/lint/rules", "helm.sh/helm/v3/pkg/chartutil")
    stamps = [f"helm.sh/helm/v3/internal/version.version={HELM_VERSION}"]
    for package in packages:
        stamps += [f"{package}.k8sVersionMajor={major}", f"{package}.k8sVersionMinor={minor}"]
    return tuple(stamps)


def _kubernetes(name: str) -> Program:
    return Program(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _kubernetes_stamps())


# In the order in which a cold cache is filled: what the integration tests need comes first.
PROGRAMS = {
    program.name: program
    for program in (
        Program("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
        _kubernetes("kube-apiserver"),
        _kubernetes("kubectl"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kube-proxy"),
        Program("pause", "pause", "."),
        Program("coredns", "coredns", "github.com/coredns/coredns"),
        Program("helm", "helm", "helm.sh/helm/v3/cmd/helm", _helm_stamps()),
        Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok", (f"sigs.k8s.io/kwok/pkg/consts.Version={KWOK_VERSION}",)),
        Program("kube-router", "kube-router", "github.com/cloudnativelabs/kube-router/cmd/kube-router"),
        Program("kind", "kind", "sigs.k8s.io/kind"),
        Program("versitygw", "versitygw", "github.com/versity/versitygw/cmd/versitygw"),
        # The controllers that `make bench-peers` measures beside everstep; nothing else needs them.
        Program("jobset", "jobset", "sigs.k8s.io/jobset"),
        Program(
            "trainer-controller-manager", "trainer", "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"
        ),
        Program("mpi-operator", "mpi-operator", "github.com/kubeflow/mpi-operator/cmd/mpi-operator"),
    )
}

CONTROL_PLANE = ("etcd", "kube-apiserver")
LOCAL_CLUSTER = (
    *CONTROL_PLANE,
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "pause",
    "coredns",
)


def cache_key(program: Program, modules: Path = GO_MODULES) -> str:
    digest = hashlib.sha256()
    for path in sorted((modules / program.folder).iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join((program.package, *program.flags)).encode())
    return digest.hexdigest()[:16]


def path_of(name: str) -> Path:
    """Return where the program lies once it is built; it may not exist yet."""
    program = PROGRAMS[name]
    return cache_dir() / "bin" / cache_key(program) / name


def binary(name: str) -> Path:
    """Return the path of a program, built now if the cache lacks it."""
    ensure([name])
    return path_of(name)


def missing(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that the cache lacks."""
    return [name for name in names if not path_of(name).exists()]


def ensure(names: Iterable[str], done: Callable[[str], None] = lambda folder: None) -> None:
    """Build those of ``names`` that the cache lacks, with one `go build` for each module.

    Args:
        names: Programs, by their keys in ``PROGRAMS``.
        done: Called with the folder of each module whose programs are there now.
    """
    for folder, wanted in by_module(missing(names)).items():
        with _locked(folder):
            programs = [PROGRAMS[name] for name in missing(wanted)]
            if programs:
                _build(folder, programs)
        done(folder)


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Group programs by the folder of their module, in the order in which these are first named."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(PROGRAMS[name].folder, []).append(name)
    return found


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Build a module in one process at a time."""
    locks = cache_dir() / "bin"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f".{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: str, programs: Sequence[Program]) -> None:
    names = ", ".join(program.name for program in programs)
    go = shutil.which("go")
    if go is None:
        raise ClusterError(f"{names} must be built and there is no `go` in PATH: install Go 1.24 or newer")
    (flags,) = {program.flags for program in programs}
    print(f"building {names} ({folder}/go.mod) ...", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=cache_dir() / "bin", prefix=f".{folder}-") as unfinished:
        result = subprocess.run(
            [go, "build", "-mod=readonly", *flags, "-o", f"{unfinished}/", *[program.package for program in programs]],
            cwd=GO_MODULES / folder,
            env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise ClusterError(f"building {names} failed:\n{result.stderr[-4000:]}")
        for program in programs:
            target = path_of(program.name)
            target.parent.mkdir(exist_ok=True)
            (Path(unfinished) / program.executable).rename(target)
    print(f"built {names} in {time.monotonic() - started:.0f} s", flush=True)

"""Renders what a peer's Go module ships to install it, and changes only what the benchmark must.

The image becomes the one that is built here, the controller goes to the node of everstep's operator, and in the rows
with raised limits its client may send as many requests as everyone else's.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import binaries
from e2e.cluster.controlplane_flags import ClientLimits

Object = dict[str, Any]
LIMITS = "everstep.dev/bench-limits"  # an annotation of the controller's pods: other limits are other pods


@dataclass(frozen=True)
class Peer:
    """A controller that is installed beside everstep.

    Attributes:
        name: Of its program and of the folder that pins its module, with the exceptions that follow.
        module: Its Go module.
        folder: The folder below `e2e/cluster/go`.
        overlays: The kustomizations of its module that install it, in order.
        entrypoint: The path of its program in its image.
        user: The user of its image.
        raise_limits: Changes the rendered objects so that its client has these limits.
        left_out: A resource of its kustomizations that comes from elsewhere and is installed already.
    """

    name: str
    module: str
    folder: str
    overlays: tuple[str, ...]
    entrypoint: str
    user: str
    raise_limits: Callable[[list[Object], ClientLimits], None]
    left_out: str = ""

    @property
    def version(self) -> str:
        return binaries.module_version(self.folder, self.module)

    @property
    def image(self) -> str:
        """Return the name of the image that holds its program and nothing else."""
        return f"docker.io/everstep/peer-{self.folder}:{self.version}"

    def read_module(self) -> Path:
        """Return the folder of its module's sources, fetched now if need be."""
        told = subprocess.run(
            ["go", "mod", "download", "-json", self.module],
            cwd=binaries.GO_MODULES / self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return Path(json.loads(told.stdout)["Dir"])

    def render(self) -> list[Object]:
        """Return the objects that install it, as its module has them."""
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
            root = Path(folder) / "module"
            for name in {overlay.partition("/")[0] for overlay in self.overlays}:
                shutil.copytree(self.read_module() / name, root / name)
            if self.left_out:
                leave_out(root, self.left_out)
            kubectl = binaries.binary("kubectl")
            found: list[Object] = []
            for overlay in self.overlays:
                command = [str(kubectl), "kustomize", str(root / overlay)]
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                found += [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]
        return found

    def adapt(self, rendered: Iterable[Object], node: str, limits: ClientLimits | None = None) -> list[Object]:
        """Return the objects with the image that is built here, on a node, and with limits other than their own."""
        objects = deepcopy(list(rendered))
        if limits is not None:
            self.raise_limits(objects, limits)
        for pod in find_pod_templates(objects):
            spec = pod["spec"]
            spec["nodeSelector"] = {"kubernetes.io/hostname": node}
            told = "default" if limits is None else f"{limits.qps}/{limits.burst}"
            pod["metadata"].setdefault("annotations", {})[LIMITS] = told
            for container in spec["containers"]:
                container |= {"image": self.image, "imagePullPolicy": "IfNotPresent"}
        return objects


def leave_out(root: Path, resource: str) -> None:
    """Remove a resource from all kustomizations below a folder."""
    for file in root.rglob("kustomization.yaml"):
        text = file.read_text()
        kept = [line for line in text.splitlines() if not re.match(rf"\s*- \S*{re.escape(resource)}(\s|$)", line)]
        file.chmod(file.stat().st_mode | stat.S_IWUSR)  # module files are read-only
        file.write_text("\n".join(kept) + "\n")


def find_pod_templates(objects: Iterable[Object]) -> list[Object]:
    """Return the pod templates of all Deployments."""
    return [each["spec"]["template"] for each in objects if each["kind"] == "Deployment"]


def add_flags(objects: Iterable[Object], *flags: str) -> None:
    """Give the controller's first container more command-line flags."""
    for pod in find_pod_templates(objects):
        container = pod["spec"]["containers"][0]
        container["args"] = [*container.get("args", []), *flags]


def _raise_of_job_set(objects: list[Object], limits: ClientLimits) -> None:
    add_flags(objects, *limits.flags())


def _raise_of_mpi_operator(objects: list[Object], limits: ClientLimits) -> None:
    # Its queue has a limit of its own, which would take the place of the client's.
    queue = [f"--controller-queue-rate-limit={limits.qps}", f"--controller-queue-burst={limits.burst}"]
    add_flags(objects, *limits.flags(), *queue)


def _raise_of_trainer(objects: list[Object], limits: ClientLimits) -> None:
    """Change the configuration file, which is the only place that has them."""
    file = "controller_manager_config.yaml"
    for each in objects:
        if each["kind"] == "ConfigMap" and file in each.get("data", {}):
            configuration = yaml.safe_load(each["data"][file])
            configuration["clientConnection"] = {"qps": limits.qps, "burst": limits.burst}
            each["data"][file] = yaml.safe_dump(configuration)


NONROOT = "65532:65532"  # as in the images of distroless that the peers' own Dockerfiles build on
JOB_SET = Peer("jobset", "sigs.k8s.io/jobset", "jobset", ("config/default",), "manager", NONROOT, _raise_of_job_set)
TRAINER = Peer(
    "trainer-controller-manager",
    "github.com/kubeflow/trainer/v2",
    "trainer",
    ("manifests/overlays/manager", "manifests/overlays/runtimes"),
    "manager",
    NONROOT,
    _raise_of_trainer,
    left_out="third-party/jobset",
)
MPI_OPERATOR = Peer(
    "mpi-operator",
    "github.com/kubeflow/mpi-operator",
    "mpi-operator",
    ("manifests/overlays/standalone",),
    "opt/mpi-operator",
    "0:0",
    _raise_of_mpi_operator,
)
PEERS = (JOB_SET, TRAINER, MPI_OPERATOR)  # a TrainJob becomes a JobSet, so JobSet comes first

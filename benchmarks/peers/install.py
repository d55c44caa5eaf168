"""Installs the peers on the cluster that everstep runs on, each from its own manifests, and removes them again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kubernetes.client import ApiException

from benchmarks.peers.contenders import CONTENDERS, PATHS, Contender, RankRequest
from benchmarks.peers.manifests import PEERS, Object, Peer
from benchmarks.peers.worker import IMAGE
from e2e import deploy
from e2e.cluster import backend, binaries, oci
from e2e.cluster.controlplane_flags import ClientLimits
from e2e.harness import Cluster, wait
from e2e.images.catalogue import Image

WORKERS = Image(IMAGE, "benchmarks/peers/image/Dockerfile")


def load_images(running: backend.Cluster) -> None:
    """Build the peers and the workers' image, and give all images to the nodes."""
    binaries.ensure([peer.name for peer in PEERS])
    deploy.load_images(running, [WORKERS])
    for peer in PEERS:
        program = binaries.path_of(peer.name)
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as folder:
            archive = Path(folder) / "image.tar"
            files = {peer.entrypoint: program.read_bytes()}
            oci.write_archive(archive, peer.image, files, [f"/{peer.entrypoint}"], user=peer.user)
            running.load_images({peer.image: archive}, {peer.image: program.parent.name})


@dataclass(frozen=True)
class Installation:
    """The peers on a cluster.

    Attributes:
        cluster: The cluster.
        node: The node on which all controllers run, everstep's operator too.
        rendered: The objects of each peer, as its module has them.
    """

    cluster: Cluster
    node: str
    rendered: dict[str, list[Object]]

    def apply(self, limits: ClientLimits | None = None) -> None:
        """Install the peers with their own client limits or others, and wait until each accepts jobs."""
        for peer in PEERS:
            first, then = split_by_definition(peer.adapt(self.rendered[peer.name], self.node, limits))
            self._apply(first)
            for each in first:
                if each["kind"] == "Deployment":
                    wait(partial(self._is_rolled_out, each), 240, f"{peer.name} is ready", every=0.5)
            self._apply(then)
        for contender in CONTENDERS:
            wait(partial(self._accepts, contender), 60, f"{contender.title} accepts jobs")

    def remove(self) -> None:
        """Remove all that was installed."""
        for peer in reversed(PEERS):
            command = ["delete", "--ignore-not-found", "--wait=false", "-f", "-"]
            self.cluster.kubectl(*command, stdin=_list(self.rendered[peer.name]), check=False)

    def _apply(self, objects: Sequence[Object]) -> None:
        if objects:
            self.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=_list(objects))

    def _is_rolled_out(self, deployment: Object) -> bool:
        meta = deployment["metadata"]
        found = self.cluster.get(f"/apis/apps/v1/namespaces/{meta['namespace']}/deployments/{meta['name']}")
        return found is not None and is_rolled_out(found)

    def _accepts(self, contender: Contender) -> bool:
        """Return whether its objects pass definitions, webhooks and rights, without leaving any."""
        for body in contender.objects(RankRequest("accepted", 2)):
            with suppress(ApiException):
                self.cluster.request("POST", PATHS[body["kind"]].format(namespace="default"), body, dryRun="All")
                continue
            return False
        return True


@contextmanager
def installed(cluster: Cluster, keep: bool) -> Iterator[Installation]:
    """Provide the peers beside everstep's operator, on its node.

    Args:
        cluster: The cluster.
        keep: Leave them there at the end: the cluster goes too.
    """
    operator = wait(lambda: deploy.operator_pod(cluster), 60, "a running operator")
    found = Installation(cluster, operator["spec"]["nodeName"], {peer.name: peer.render() for peer in PEERS})
    try:
        found.apply()
        yield found
    finally:
        if not keep:
            found.remove()


def split_by_definition(objects: Iterable[Object]) -> tuple[list[Object], list[Object]]:
    """Return the objects of kinds that Kubernetes has, and those of kinds that the first ones define."""
    objects = list(objects)
    groups = {each["spec"]["group"] for each in objects if each["kind"] == "CustomResourceDefinition"}
    defined = [each for each in objects if each["apiVersion"].partition("/")[0] in groups]
    return [each for each in objects if each not in defined], defined


def is_rolled_out(deployment: Object) -> bool:
    """Return whether its pods are those of its present template, ready, and no others are left."""
    status, wanted = deployment.get("status", {}), deployment["spec"].get("replicas", 1)
    is_seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    counts = (status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas"))
    return is_seen and all(count == wanted for count in counts)


def read_versions(peers: Iterable[Peer] = PEERS) -> dict[str, str]:
    """Return the versions of what is compared."""
    return {"kubernetes": binaries.KUBERNETES_VERSION} | {peer.folder: peer.version for peer in peers}


def _list(objects: Iterable[Object]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})

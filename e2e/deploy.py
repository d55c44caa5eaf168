"""everstep on a cluster: images loaded, chart installed by a real helm, pools; and the faults that tests put in.

The demo, the scenarios and the benchmarks all come through here, so that there is one way to install.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from e2e.cluster import backend, binaries, golden, network_policy, packages
from e2e.cluster.kind import KindCluster
from e2e.cluster.layers import UnpackedImage
from e2e.cluster.local import LocalCluster
from e2e.harness import Cluster, Object, wait
from e2e.images.catalogue import Image, image, images
from e2e.images.engine import missing_tools
from everstep_operator.plan.agent_volume import find_agent_config_map

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "everstep"
SYSTEM = "everstep-system"
RELEASE = "everstep"
OPERATOR_IMAGE = "docker.io/everstep/operator:0.1.0"
DEMO_IMAGES = ("operator", "trainer")


def pool(name: str) -> Object:
    """Return the pool of the nodes that carry this capacity type."""
    return {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingPool",
        "metadata": {"name": name},
        "spec": {"capacityType": name, "nodeSelector": {"everstep.dev/capacity-type": name}},
    }


POOLS = [pool("on-demand"), pool("spot")]


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Provide a cluster with everything on it; taken down afterwards only if it was not up before."""
    running = backend.choose()
    was_up = running.is_up()
    try:
        yield up()
    finally:
        if not was_up:
            running.down()


def up(only: Iterable[str] | None = None) -> Cluster:
    """Bring the cluster up with its images (all, or ``only`` these short names), the chart and the pools."""
    running = backend.choose()
    load(running, only)
    running.up()
    found = connect(running)
    install(found)
    return found


def connect(running: backend.Cluster) -> Cluster:
    binaries.ensure(["kubectl", "helm"])
    return Cluster(running.kubeconfig, binaries.binary("kubectl"))


def programs(running: backend.Cluster) -> tuple[str, ...]:
    """Return the programs that a cluster of this kind is made of, and those with which everstep is installed there."""
    if isinstance(running, LocalCluster):
        return (*binaries.LOCAL_CLUSTER, "helm")
    return ("kubectl", "helm", "kind") if isinstance(running, KindCluster) else ("kubectl", "helm")


def missing_packages(running: backend.Cluster) -> list[str]:
    """Return the Debian packages that this machine lacks for such a cluster and for its images."""
    found = packages.missing(packages.NODES) if isinstance(running, LocalCluster) else []
    return [*found, *missing_tools()]


def missing_images(running: backend.Cluster, only: Iterable[str] | None = None) -> list[Image]:
    """Return the images, all or those of these short names, that nodes cannot take from what is loaded already."""
    chosen = images() if only is None else [image(name) for name in only]
    if isinstance(running, LocalCluster):
        return [each for each in chosen if not golden.holds(each.name, each.key)]
    return chosen


def load(
    running: backend.Cluster, only: Iterable[str] | None = None, done: Callable[[str], None] = lambda part: None
) -> None:
    """Build what changed, and give each node what it has not got.

    Args:
        running: The cluster, which need not be up.
        only: Short names of the images; all images by default.
        done: Called with the folder of each Go module and the name of each image that is built.
    """
    # From nothing, compiling the cluster's programs and installing the images' packages take turns well.
    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(binaries.ensure, programs(running), done)
        _load(running, only, done)
        compiled.result()


def _load(running: backend.Cluster, only: Iterable[str] | None, done: Callable[[str], None]) -> None:
    load_images(running, missing_images(running, only), done)


def load_images(
    running: backend.Cluster, chosen: Iterable[Image], done: Callable[[str], None] = lambda part: None
) -> None:
    """Give these images to each node, built now if need be; ``done`` is called with the name of each."""
    chosen = list(chosen)
    keys = {each.name: each.key for each in chosen}
    if isinstance(running, LocalCluster):
        chosen = [each for each in chosen if not _link(running, each, keys[each.name], done)]
    archives: dict[str, Path] = {}
    try:
        for each in chosen:
            archives[each.name] = each.archive()
            done(each.name)
        # With none as well: nodes may lack what was there already.
        running.load_images(archives, keys)
    finally:
        for archive in archives.values():
            archive.unlink(missing_ok=True)


def _link(running: LocalCluster, built: Image, key: str, done: Callable[[str], None]) -> bool:
    """Give an image to the nodes without a copy; False where only an archive can."""
    with built.layers() as found:
        if found is None:
            return False
        running.link_images({built.name: UnpackedImage(*found)}, {built.name: key})
    done(built.name)
    return True


def install(found: Cluster, **values: object) -> None:
    """`helm upgrade --install` with these values, wait for the operator, then the pools. Idempotent."""
    settings = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    # The tag of a development image does not change with its content: its key makes the operator's pod a new one.
    key = image(OPERATOR_IMAGE).key
    helm(
        found,
        "upgrade",
        "--install",
        RELEASE,
        str(CHART),
        f"--namespace={SYSTEM}",
        "--create-namespace",
        "--wait",
        "--timeout=300s",
        f"--set-string=podAnnotations.everstep\\.dev/image-key={key}",
        *settings,
    )
    # helm waits for the new operator, which stands by until the former one has gone.
    wait(lambda: len(_operator_pods(found)) == values.get("replicas", 1), 120, "the former operator has gone")
    found.apply(*POOLS, namespace="default")


def helm(found: Cluster, *args: str) -> str:
    command = [str(binaries.binary("helm")), f"--kubeconfig={found.kubeconfig}", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    if done.returncode != 0:
        pods = found.kubectl("describe", "pods", "-n", SYSTEM, check=False)
        logs = found.kubectl("logs", "-n", SYSTEM, f"deploy/{RELEASE}", "--tail=30", check=False)
        raise AssertionError(f"helm {' '.join(args[:3])}: {done.stderr}\n{pods[-3000:]}\n{logs}")
    return done.stdout


# -- faults ------------------------------------------------------------------------------------------------------------


def kill_container(found: Cluster, namespace: str, job: str, index: int) -> None:
    """SIGKILL every process of the first container of a job's pod, from the host, as a crash would."""
    pod = found.reported(namespace, job)[index]
    name = pod["metadata"]["name"]
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    pids = _processes_of(container)
    assert pids, f"no process of {name} runs on this machine"
    for pid in pids:
        with suppress(ProcessLookupError):  # with PID 1 of the container the kernel ends all others
            os.kill(pid, signal.SIGKILL)


def _processes_of(container: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if container in (entry / "cgroup").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
    return found


def _operator_pods(found: Cluster) -> list[Object]:
    path = f"/api/v1/namespaces/{SYSTEM}/pods"
    return list(found.items(path, labelSelector=f"app.kubernetes.io/instance={RELEASE}"))


def operator_pod(found: Cluster) -> Object | None:
    """Return the operator's pod whose container runs now."""
    for pod in _operator_pods(found):
        statuses = pod["status"].get("containerStatuses", [])
        if statuses and "running" in statuses[0]["state"]:
            return pod
    return None


def kill_operator(found: Cluster) -> None:
    """SIGKILL the operator's process, once it runs; its pod, and so its Lease, stays.

    The pod is deleted too: the kubelet's restart back-off would only make a hundred kills take hours.
    """
    pod = wait(lambda: operator_pod(found), 60, "a running operator")
    name = pod["metadata"]["name"]
    for pid in _processes_of(pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]):
        os.kill(pid, signal.SIGKILL)
    found.kubectl("delete", "pod", "-n", SYSTEM, name, "--grace-period=0", "--force", "--wait=false", check=False)


def restart_apiserver(found: Cluster) -> None:
    backend.faulty().restart_apiserver()
    wait(lambda: _ready(found), 60, "the API server")


def _ready(found: Cluster) -> bool:
    return found.kubectl("get", "--raw", "/readyz", check=False).strip() == "ok"


@contextmanager
def another_agent(found: Cluster) -> Iterator[None]:
    """Provide an operator of another build, with another agent, for the time of the block."""
    install(found, **{"image.tag": "next"})
    try:
        yield
    finally:
        install(found)


@contextmanager
def network_policies(found: Cluster) -> Iterator[None]:
    """NetworkPolicies hold for the time of the block, the operator's own among them."""
    running = backend.choose()
    # Elsewhere the cluster's own network enforces them, or does not: a test that needs it looks for itself.
    enforced = network_policy.enforced(running) if isinstance(running, LocalCluster) else nullcontext()
    with enforced:
        install(found, **{"networkPolicy.enabled": True})
        try:
            yield
        finally:
            install(found)


def agent_of(pod: Object) -> str:
    """Return the name of the ConfigMap whose agent a pod runs."""
    return find_agent_config_map(pod["spec"])

"""``down`` takes everything away, whenever ``up`` was killed. Runs only on a machine whose cluster is down."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import cgroups, golden, host
from e2e.cluster.backend import choose
from e2e.cluster.local import LocalCluster
from e2e.cluster.processes import marked
from e2e.cluster.state import PUBLISHED_KUBECONFIG, ClusterSpec, cluster_dir

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[2]
SEED = int(os.environ.get("EVERSTEP_CHAOS_SEED", "1"))


@pytest.fixture
def down() -> Iterator[LocalCluster]:
    cluster = choose()
    if not isinstance(cluster, LocalCluster) or ClusterSpec.load(cluster_dir()) is not None:
        pytest.skip("a cluster is up, or this machine has another kind")
    yield cluster
    cluster.down()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _traces() -> dict[str, object]:
    """All that a cluster could leave on a machine."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    ours = (str(cluster_dir()), str(golden.root().parent), "kube")
    return {
        "links": sorted(path.name for path in Path("/sys/class/net").glob("everstep*")),
        "routes": [line for line in _output("ip", "route").splitlines() if line.startswith(("10.200.", "10.201."))],
        "rules": _output("iptables-save"),
        "namespaces": sorted(path.name for path in Path("/run/netns").glob("everstep-node-*")),
        "mounts": sorted(mount for mount in mounts if any(part in mount for part in ours)),
        "cgroups": [str(root) for root in cgroups.hierarchies() if (root / cgroups.PARENT).exists()],
        "sysctls": {name: (Path("/proc/sys") / name).read_text() for name in host.SYSCTLS},
        "folders": [path for path in host.MOUNT_POINTS if Path(path).exists()],
        "processes": [process.pid for process in marked(str(cluster_dir() / "processes"))],
        "state": cluster_dir().exists(),
        "kubeconfig": PUBLISHED_KUBECONFIG.exists(),
    }


def test_a_whole_cluster_leaves_nothing(down: LocalCluster) -> None:
    before = _traces()
    down.up()
    assert down.is_up()
    down.down()
    assert _traces() == before


def test_a_killed_start_leaves_nothing(down: LocalCluster) -> None:
    before = _traces()
    moments = random.Random(SEED)  # the same moments each time, unless asked otherwise
    for _ in range(8):
        start = subprocess.Popen([sys.executable, "-m", "e2e.cluster", "up"], cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        time.sleep(moments.uniform(0.3, 9))
        start.send_signal(signal.SIGKILL)
        start.wait()
        down.down()
        assert _traces() == before


def test_down_is_idempotent(down: LocalCluster) -> None:
    down.down()
    down.down()

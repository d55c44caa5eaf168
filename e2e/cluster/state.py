"""The folder in which a cluster keeps what it must find again: after the command's end, its crash, or a reboot."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cache import cache_dir

PUBLISHED_KUBECONFIG = Path(__file__).parents[2] / "build" / "cluster" / "kubeconfig"


def cluster_dir() -> Path:
    """``$EVERSTEP_CLUSTER_DIR``, by default ``/var/lib/everstep-cluster``."""
    return Path(os.environ.get("EVERSTEP_CLUSTER_DIR") or "/var/lib/everstep-cluster")


def make_shared_folder() -> Path:
    """Make the folder that all nodes have alike, as they would a network volume: any user may write into it."""
    folder = cluster_dir() / "shared"
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o1777)
    return folder


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster that the user asked for; written before anything is started, so that ``down`` knows what to look
    for."""

    backend: str
    nodes: int = 3
    gpus: int = 4

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "cluster.json", json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> ClusterSpec | None:
        try:
            return ClusterSpec(**json.loads((folder / "cluster.json").read_text()))
        except FileNotFoundError:
            return None


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old text or the new, also when the writer is killed half-way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Let one process in at a time: two commands that change the cluster, or the golden images, wait for each other."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

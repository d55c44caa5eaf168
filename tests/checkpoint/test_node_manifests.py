"""A rank reads of a checkpoint's manifests what its node needs, and all of a tensor or a word that it is not there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from everstep.checkpoint.catalog.manifests import read_index, read_manifest  # noqa: E402
from everstep.checkpoint.errors import Damaged  # noqa: E402
from everstep.checkpoint.restore.loading import Loading  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank  # noqa: E402
from everstep.checkpoint.state.rng import Rng  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

KEY = ranks.key(10)
ROWS = 8


class Counting(PosixStore):
    """A folder that tells which small objects of the checkpoint were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.names: list[str] = []
        self._lock = threading.Lock()

    def read(self, name: str) -> bytes:
        if name.endswith(".json") and not name.startswith("leases/"):
            with self._lock:
                self.names.append(name)
        return super().read(name)


def sharded(fill: float) -> dict[str, Any]:
    model: Any = nn.Sequential(nn.Linear(4, ROWS, bias=False), nn.Linear(ROWS, ROWS, bias=False))
    for param in model.parameters():
        nn.init.constant_(param, fill)
    fully_shard(model)
    return {"model": model, "rng": PerRank(Rng())}


def save_and_restore(rank: int, folder: Path, memory: Path, nodes: int) -> list[str]:
    # Each rank is a node of its own when it saves.
    ranks.save(PosixStore(folder), KEY, sharded(3.0))
    store, objects = Counting(folder), sharded(-1.0)
    ranks.restore(store, memory, objects, nodes=nodes)
    for param in objects["model"].parameters():
        assert torch.equal(param.full_tensor(), torch.full(param.shape, 3.0))
    return store.names


@pytest.mark.parametrize("nodes", [4, 2])
def test_the_ranks_of_a_node_read_the_manifests_of_what_they_hold_each_once(nodes: int, tmp_path: Path) -> None:
    results = ranks.run(4, save_and_restore, tmp_path / "store", tmp_path / "memory", nodes)
    shares = [share.name for share in read_index(PosixStore(tmp_path / "store"), KEY).nodes]
    together = 4 // nodes
    for node in range(nodes):
        read = [name for names in results[node * together : (node + 1) * together] for name in names]
        expected = [KEY.manifest_name, *shares[node * together : (node + 1) * together]]
        assert sorted(read) == sorted(expected)


def save_alone(rank: int, folder: Path) -> None:
    ranks.save(PosixStore(folder), KEY, sharded(3.0))


def test_an_element_that_a_partial_manifest_lacks_is_never_left_as_it_was(tmp_path: Path) -> None:
    ranks.run(2, save_alone, tmp_path)
    store = PosixStore(tmp_path)
    plain = nn.Sequential(nn.Linear(4, ROWS, bias=False), nn.Linear(ROWS, ROWS, bias=False))
    whole = Loading(read_manifest(store, KEY), {"model": plain}, rank=0, world=1)
    assert not whole.problems
    with pytest.raises(Damaged, match=r"of 32 elements here the checkpoint has 16"):
        Loading(read_manifest(store, KEY, nodes=[0]), {"model": plain}, rank=0, world=1)

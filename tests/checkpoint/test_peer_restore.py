"""The loss of a node costs no read of the store: what it saved is in another node's memory."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import StoreError  # noqa: E402
from everstep.checkpoint.format.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.format.manifest import HEADER  # noqa: E402
from everstep.checkpoint.peers import replica_slots  # noqa: E402
from everstep.checkpoint.ranks.topology import Topology  # noqa: E402
from everstep.checkpoint.restore.proposals import MEMORY, STORE, Proposal, Proposals  # noqa: E402
from everstep.checkpoint.session.checkpointer import Checkpointer  # noqa: E402
from everstep.checkpoint.store.base import Store, StoredObject  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from everstep.checkpoint.writer import control  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.writers import until  # noqa: E402

pytestmark = pytest.mark.torch

OLD, NEW = ranks.key(10), ranks.key(20)  # the former was committed, the latter is in memory only
SIZE = 200


def model(fill: float) -> Any:
    made = torch.nn.Linear(SIZE, SIZE)
    for param in made.parameters():
        torch.nn.init.constant_(param, fill)
    return made


def session(rank: int, folder: Path, generation: int) -> Checkpointer:
    """Each rank is a node of its own, with a memory of its own."""
    os.environ["NODE_RANK"] = str(rank)
    return everstep.checkpointer(
        folder / "store",
        attempt=(0, generation),
        memory=everstep.MemoryOptions(directory=folder / f"memory-{rank}", peers=1),
        times=everstep.TimeOptions(timeout=60.0, commit_timeout=20.0, linger=60.0),
    )


def unreachable(store: Path) -> None:
    """Every call into this folder fails from now on."""
    store.rename(store.with_name("elsewhere"))
    store.symlink_to(store.name)


def reachable(store: Path) -> None:
    store.unlink()
    store.with_name("elsewhere").rename(store)


def keeps(memory: Path, key: Key) -> bool:
    """Tell whether the node with this memory keeps a copy of the other's share."""
    return key in [manifest.key for _, manifest in replica_slots.open_peer_copies(memory).whole()]


def save_and_die(rank: int, folder: Path) -> None:
    made = model(0)
    ckpt = session(rank, folder, generation=1)
    ckpt.track(model=made)
    for key in (OLD, NEW):
        with torch.no_grad():
            for param in made.parameters():
                param.fill_(key.step)
        ckpt.save(key.step)
        if key == OLD:
            ckpt.wait()
        until(partial(keeps, folder / f"memory-{rank}", key), f"{key} is kept here", 60.0)
        dist.barrier()
        if rank == 0 and key == OLD:
            unreachable(folder / "store")
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, folder: Path) -> tuple[str, str, float, list[str]]:
    made = model(-1)
    with session(rank, folder, generation=2) as ckpt:
        restored = ckpt.restore(model=made)
        [fill] = {value.item() for param in made.parameters() for value in param.unique()}
    return str(restored.key), restored.tier, fill, list(restored.fell_back)


def kill_writers(folder: Path) -> None:
    for memory in folder.glob("memory-*"):
        try:
            link = control.WriterLink.connect(memory)
        except OSError:
            continue
        os.kill(link.pid, signal.SIGKILL)
        link.close()


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two nodes that were killed, with their writers; its store cannot be reached."""
    folder = tmp_path_factory.mktemp("died")
    try:
        ranks.run(2, save_and_die, folder, dies=[0, 1], timeout=120.0)
    finally:
        kill_writers(folder)
    return folder


@pytest.fixture
def left(died: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, for one test."""
    folder = tmp_path / "left"
    shutil.copytree(died, folder, symlinks=True, ignore=shutil.ignore_patterns(control.SOCKET))
    yield folder
    kill_writers(folder)


def lose(folder: Path, node: int) -> None:
    """The machine is replaced by one whose memory is empty."""
    shutil.rmtree(folder / f"memory-{node}")


def lose_copies(folder: Path, node: int) -> None:
    replica_slots.open_peer_copies(folder / f"memory-{node}").remove()


def lose_nothing(folder: Path) -> None:
    pass


def lose_one(folder: Path) -> None:
    lose(folder, 1)


def lose_first(folder: Path) -> None:
    lose(folder, 0)


def lose_copies_of_all(folder: Path) -> None:
    for node in (0, 1):
        lose_copies(folder, node)


@pytest.mark.parametrize(
    ("event", "tiers"),
    [
        (lose_nothing, ["memory"]),
        (lose_one, ["peer"]),
        (lose_first, ["peer"]),
        # The writers copy to each other anew what they find, and may be done before the restore asks.
        (lose_copies_of_all, ["peer", "memory"]),
    ],
    ids=["all-processes-died", "a-node-was-lost", "node-0-was-lost", "own-slots-only"],
)
def test_without_the_store_all_ranks_load_what_the_memory_of_the_nodes_has(
    left: Path, event: Callable[[Path], None], tiers: list[str]
) -> None:
    event(left)
    results = ranks.run(2, go_on, left, timeout=120.0)
    assert results in [[(str(NEW), tier, 20.0, [])] * 2 for tier in tiers]


def lose_all(folder: Path) -> None:
    for node in (0, 1):
        lose(folder, node)


def lose_one_and_its_copy(folder: Path) -> None:
    lose(folder, 1)
    lose_copies(folder, 0)


def spoil(folder: Path) -> None:
    """One share of the newest one is bad, and its copy is lost."""
    lose_one(folder)
    [copy] = [
        slot for slot, manifest in replica_slots.open_peer_copies(folder / "memory-0").whole() if manifest.key == NEW
    ]
    with copy.part(0).open("r+b") as file:
        file.seek(HEADER + 7)
        file.write(b"spoilt")


@pytest.mark.parametrize(
    ("event", "tier", "fell_back"),
    [(lose_all, "store", []), (lose_one_and_its_copy, "store", []), (spoil, "peer", [str(NEW)])],
    ids=["all-nodes-lost", "node-and-copy-lost", "copy-is-bad"],
)
def test_what_no_memory_has_comes_from_the_store_or_is_passed_over_for_what_is_older(
    left: Path, event: Callable[[Path], None], tier: str, fell_back: list[str]
) -> None:
    reachable(left / "store")
    event(left)
    results = ranks.run(2, go_on, left, timeout=120.0)
    assert results == [(str(OLD), tier, 10.0, fell_back)] * 2


# ---- which one


class Folder(PosixStore):
    """A store in which these were committed, or which cannot be listed."""

    def __init__(self, folder: Path, keys: list[Key] | None) -> None:
        super().__init__(folder)
        self._keys = keys

    def list(self, prefix: str) -> Iterator[StoredObject]:
        if self._keys is None:
            raise StoreError("timed out", self.url, may_pass=True)
        return iter(
            [StoredObject(key.manifest_name, 1, 0.0) for key in self._keys if key.manifest_name.startswith(prefix)]
        )


def proposals(store: Store, nodes: int, *, reach: bool = True, attempt: tuple[int, int] = (0, 2)) -> Proposals:
    topology = Topology(0, nodes, 0, nodes, (0,))
    return Proposals(store, topology, reach=reach, attempt=Attempt(*attempt))


def offers(*nodes: list[tuple[Key, int]]) -> list[dict[str, Any]]:
    """By node, the shares that it holds: (checkpoint, number of the node that saved it)."""
    count = len(nodes)
    return [
        {
            "node": node,
            "newest": max((str(key) for key, share in held if share == node), default=None),
            "shares": [[str(key), share, count, [share]] for key, share in held],
        }
        for node, held in enumerate(nodes)
    ]


def chosen(made: Proposals, held: list[dict[str, Any]]) -> tuple[str | None, str, bool]:
    proposal = Proposal.of(made.next(held))
    return proposal.key, proposal.tier, proposal.complete


def key(step: int, generation: int = 1) -> Key:
    return ranks.key(step, generation)


def test_the_greatest_that_all_nodes_together_hold_is_tried_first(tmp_path: Path) -> None:
    made = proposals(Folder(tmp_path, [key(10)]), 3)
    # Node 2 is new; node 0 keeps its copies, of which the newest did not arrive.
    held = offers(
        [(key(20), 0), (key(30), 0), (key(10), 2), (key(20), 2)],
        [(key(20), 1), (key(30), 1), (key(20), 0), (key(30), 0)],
        [],
    )
    assert chosen(made, held) == (str(key(20)), MEMORY, True)
    made.reject("a chunk is bad")
    assert chosen(made, held) == (str(key(10)), MEMORY, False)  # what the memory has not is in the store
    made.reject("another chunk is bad")
    assert chosen(made, held) == (str(key(10)), STORE, False)


def test_a_committed_one_wins_over_what_is_older_in_memory(tmp_path: Path) -> None:
    made = proposals(Folder(tmp_path, [key(30), key(20)]), 2)
    assert chosen(made, offers([(key(20), 0)], [(key(20), 1)])) == (str(key(30)), STORE, False)


def test_what_an_older_attempt_left_in_memory_is_never_chosen_over_a_newer_attempt(tmp_path: Path) -> None:
    held = offers(
        [(key(1000), 0), (key(1000), 1), (key(5, generation=2), 0)],
        [(key(1000), 1), (key(5, generation=2), 1)],
    )
    for committed in ([], [key(1000)]):
        made = proposals(Folder(tmp_path, committed), 2)
        assert chosen(made, held) == (str(key(5, generation=2)), MEMORY, True)
    made = proposals(Folder(tmp_path, [key(6, generation=2)]), 2)
    assert chosen(made, held)[0] == str(key(6, generation=2))


def test_nodes_that_cannot_reach_each_other_use_what_each_holds_itself(tmp_path: Path) -> None:
    held = offers([(key(20), 0)], [(key(20), 1)])
    assert chosen(proposals(Folder(tmp_path, [key(10)]), 2, reach=False), held) == (str(key(10)), STORE, False)
    made = proposals(Folder(tmp_path, [key(20)]), 2, reach=False)
    assert chosen(made, held) == (str(key(20)), MEMORY, False)


def test_without_the_store_only_what_must_be_the_newest_is_loaded(tmp_path: Path) -> None:
    held = offers([(key(20), 0)], [(key(20), 1)])
    made = proposals(Folder(tmp_path, None), 2)
    assert chosen(made, held) == (str(key(20)), MEMORY, True)
    made.reject("a chunk is bad")
    torn = [(key(20), 0), (key(20), 1)]  # kept for both by a third, while their own slots were filled anew
    for other in (
        held,
        offers([], []),
        offers([(key(20), 0)], []),
        offers([(key(20), 0), (key(10), 0)], [(key(10), 1)]),  # node 1 may have stored its share of the newer one
        [{"node": 0, "newest": None, "shares": [[str(key), share, 2, [share]] for key, share in torn]}, None],
    ):
        with pytest.raises(StoreError, match="timed out"):
            (made if other is held else proposals(Folder(tmp_path, None), 2)).next(other)
    # Another attempt may have saved in between, on other nodes.
    for attempt in ((0, 3), (1, 1)):
        with pytest.raises(StoreError, match="timed out"):
            proposals(Folder(tmp_path, None), 2, attempt=attempt).next(held)

"""Each process of a save may be killed or frozen at each of its calls: its writers and its ranks, not its store alone.

What is killed here runs the code of a session from the ranks' word on: agreement with the writer, slots, sums, store,
commit, retention. The memory of a node is watched as its store is.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.format.keys import HINT, Key
from everstep.checkpoint.slots.slots import Slots, SlotState
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.writer.control import WriterLink, WriterLost
from tests.checkpoint.builders import key
from tests.checkpoint.crash import Point, everything, in_memory, points
from tests.checkpoint.processes import PATIENCE, Node, Process, fill_as_rank, newest, until

OLDER, OLD, NEW, NEXT = key(5), key(10), key(20), key(30, generation=2)
SEEN = (SlotState.FILLED, SlotState.WHOLE, SlotState.STORED)


class Site:
    """A store with two checkpoints, and the nodes of a run that saves a third; `keep_last` of the writers is 2."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.store = PosixStore(folder / "store")
        self.nodes = [Node(folder / f"memory-{node}", folder / "store", NEW, node, nodes) for node in range(nodes)]
        self.processes: list[Process] = []

    def start(self, victim: int = 0, point: Point | None = None, by: int = signal.SIGKILL) -> None:
        self.processes = [
            node.start(self.folder, point if number == victim else None, by) for number, node in enumerate(self.nodes)
        ]

    def begin(self, base: Path) -> None:
        """Saves the two that are there before; `base` is what the store is then."""
        for each in (OLDER, OLD):
            self.start()
            save(self.nodes, self.processes, each)
            assert [process.ended_with for process in self.processes] == [0] * len(self.nodes)
        shutil.copytree(self.folder / "store", base)

    def restart(self, base: Path) -> None:
        self.end()
        for path in self.folder.iterdir():
            shutil.rmtree(path)
        shutil.copytree(base, self.folder / "store")

    def end(self) -> None:
        for node in self.nodes:
            node.drop()
        for process in self.processes:
            process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as found:
        (found / "site").mkdir()
        yield found


@pytest.fixture(params=[(1, 0), (2, 0), (2, 1)], ids=["the only writer", "node 0's writer", "node 1's writer"])
def site_and_victim(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Site, int]]:
    nodes, victim = request.param
    made = Site(folder / "site", nodes)
    made.begin(folder / "base")
    yield made, victim
    made.end()


def save(
    nodes: Sequence[Node], processes: Sequence[Process], key: Key, then: Callable[[], object] = lambda: None
) -> None:
    """Everything that ranks do in a run with one save, `then` this, and goodbye; WriterLost when a writer is lost."""
    for node, process in zip(nodes, processes, strict=True):
        node.join(process)
    for node in nodes:
        node.take(key)
    said = nodes[0].hear(key, lambda: all(process.runs for process in processes))
    if not said:
        raise WriterLost("one of them has died")
    assert said["event"] == "saved", said
    then()
    for node in nodes:
        node.leave()


def calls_of_a_save(site: Site, victim: int, base: Path) -> list[tuple[str, str]]:
    site.restart(base)
    site.start()
    save(site.nodes, site.processes, NEW)
    found = [process.calls() for process in site.processes]
    assert newest(site.store) == NEW
    assert list_candidates(site.store) == [NEW, OLD]
    assert not list(site.folder.glob("memory*")), "memory is given back"
    return found[victim]


def killed_at(site: Site, victim: int, base: Path, point: Point) -> None:
    """The save of NEW with one writer killed; then the next attempt, on the same nodes."""
    site.restart(base)
    site.start(victim, point)
    try:
        save(site.nodes, site.processes, NEW)
    except WriterLost:
        others = []
    else:  # their ranks have said goodbye
        others = [process for process in site.processes if process is not site.processes[victim]]
    assert site.processes[victim].ended_with == -signal.SIGKILL
    assert [process.ended_with for process in others] == [0] * len(others)
    found = newest(site.store)
    assert found in (OLD, NEW)
    slots = list(Slots(site.nodes[victim].memory))
    filled = any((claim := slot.claimed()) and claim.key == NEW and slot.state in SEEN for slot in slots)
    for node in site.nodes:
        node.drop()
    again = [node.again(NEXT) for node in site.nodes]

    def stored_again() -> None:
        until(lambda: NEW in list_candidates(site.store), "what the ranks had filled is stored by the next writer")

    site.processes[victim] = again[victim].start(site.folder)
    for number, process in enumerate(site.processes):
        if not process.runs:
            site.processes[number] = again[number].start(site.folder)
    try:
        save(again, site.processes, NEXT, stored_again if filled or found == NEW else lambda: None)
        assert newest(site.store) == NEXT
        assert [process.ended_with for process in site.processes] == [0] * len(again)
        assert not list(site.folder.glob("memory*")), "memory is given back"
    finally:
        for node in again:
            node.drop()


def kill_at(site: Site, victim: int, base: Path, stride: int) -> int:
    """The number of points at which the writer was killed: each `stride`-th of all."""
    trace = calls_of_a_save(site, victim, base)
    chosen = points(len(trace))[::stride]
    for point in chosen:
        try:
            killed_at(site, victim, base, point)
        except BaseException as error:
            error.add_note(f"{point} of {len(trace)}: {trace[point.number]}")
            raise
    print(f"killed at {len(chosen)} of {2 * len(trace)} points")
    return len(chosen)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_was_stored_and_not_committed_when_the_writer_died_is_committed_by_the_next(
    folder: Path, moment: str
) -> None:
    site = Site(folder / "site", 1)
    site.begin(folder / "base")
    try:
        trace = calls_of_a_save(site, 0, folder / "base")
        stored = next(n for n, (call, path) in enumerate(trace) if call == "replace" and ".stored." in path)
        [point] = [p for p in points(len(trace)) if p.number == stored and str(p).startswith(moment)]
        killed_at(site, 0, folder / "base", point)
    finally:
        site.end()


def test_a_run_that_ends_waits_for_no_share_that_was_lost_in_an_earlier_attempt(folder: Path) -> None:
    site = Site(folder / "site", 2)
    site.begin(folder / "base")
    try:
        site.start()
        first, second = site.nodes
        for node, process in zip(site.nodes, site.processes, strict=True):
            node.join(process)
        first.take(NEW)  # node 0 will wait for node 1's share as long as its run lasts
        until(lambda: any(site.store.list(NEW.node_name(0))), "node 0's share is in the store")
        site.processes[1].kill()
        for node in site.nodes:
            node.drop()
        shutil.rmtree(second.memory)
        again = [node.again(NEXT) for node in site.nodes]
        site.processes[1] = again[1].start(site.folder)
        began = time.monotonic()
        save(again, site.processes, NEXT)
        assert [process.ended_with for process in site.processes] == [0, 0]
        assert time.monotonic() - began < PATIENCE / 2
        assert list_candidates(site.store) == [NEXT, OLD]
    finally:
        site.end()


def test_a_writer_that_is_killed_anywhere_loses_nothing(site_and_victim: tuple[Site, int], folder: Path) -> None:
    site, victim = site_and_victim
    assert kill_at(site, victim, folder / "base", stride=23) > 2


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_writer_may_be_killed_before_and_after_each_call(site_and_victim: tuple[Site, int], folder: Path) -> None:
    site, victim = site_and_victim
    assert kill_at(site, victim, folder / "base", stride=1) > 60


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    made = Site(folder / "site", 1)
    made.begin(folder / "base")
    yield made
    made.end()


def test_a_rank_may_be_killed_before_and_after_each_call(site: Site) -> None:
    (node,) = site.nodes
    site.start()
    node.join(site.processes[0])
    node.links.pop().close()
    held = connection_of_a_dead_rank(node, 1)

    def take_as_rank_0(step: int) -> None:
        for layout in (node.memory / "layouts").iterdir():  # each save is the first one for the other rank
            layout.unlink()
        node.take(key(step), [0])

    def undisturbed(step: int) -> list[tuple[str, str]]:
        take_as_rank_0(step)
        calls = Process(fill_as_rank, detached(node), site.folder, 1, key(step), None).calls()
        assert node.hear(key(step))["event"] == "saved"
        return calls

    trace = undisturbed(20)
    for number, point in enumerate(points(len(trace))):
        now = key(21 + number)
        take_as_rank_0(now.step)
        rank = Process(fill_as_rank, detached(node), site.folder, 1, now, point)
        assert rank.ended_with == -signal.SIGKILL
        said = node.hear(now)
        assert (said["event"], "rank 1 left" in said["why"]) == ("failed", True), f"{point}: {said}"
        assert newest(site.store) == key(20)
    undisturbed(99)
    assert newest(site.store) == key(99)
    print(f"killed at {2 * len(trace)} points")
    assert len(trace) >= 5
    held.close()


def connection_of_a_dead_rank(node: Node, local: int) -> socket.socket:
    """As a child of a rank holds it that outlives the rank: the writer sees a rank that is there, and dead."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            link = WriterLink.connect(node.memory)
            node.hello(link, local)
            socket.send_fds(theirs, [b"."], [link._peer.fileno()])
            os._exit(0)
        [descriptor] = socket.recv_fds(ours, 1, 1)[1]
    os.waitpid(pid, 0)
    return socket.socket(fileno=descriptor)


def detached(node: Node) -> Node:
    """For another process: without this one's connections."""
    return node.again(NEW)


def frozen_at(site: Site, base: Path, point: Point) -> None:
    site.restart(base)
    site.start(0, point, signal.SIGSTOP)
    (old,) = site.nodes
    old.join(site.processes[0])
    old.take(NEW)
    assert site.processes[0].stops()
    later = key(15, generation=2)
    elsewhere = Node(site.folder / "memory-elsewhere", site.folder / "store", later)
    process = elsewhere.start(site.folder)
    site.processes.append(process)
    save([elsewhere], [process], later)
    assert process.ended_with == 0
    before = finished(site.folder / "store")
    os.kill(site.processes[0].pid, signal.SIGCONT)
    with suppress(WriterLost):
        said = old.hear(NEW)
        assert said["event"] == "saved" or said["why"].endswith(f"attempt {later.attempt} has taken over this store")
    old.leave()
    assert site.processes[0].ended_with == 0
    after = finished(site.folder / "store")
    assert {name: after.get(name) for name in before} == before
    assert newest(site.store) == later


def finished(store: Path) -> dict[str, bytes]:
    """Return the files that the frozen writer may not touch: all but its own, those that it retires, and the hint."""
    own = (NEW.data_prefix, NEW.manifest_name, OLDER.data_prefix, OLDER.manifest_name, HINT)
    return {name: data for name, data in everything(store).items() if not name.startswith(own) and ".new-" not in name}


def freeze_at(site: Site, base: Path, stride: int) -> int:
    """Before each `stride`-th call that the writer makes in the store, until its manifest and its hint are there."""
    trace = calls_of_a_save(site, 0, base)
    places = [number for number, (_, path) in enumerate(trace) if path.startswith("store/")]
    # The hint is the only one that is made outside of all folders; what comes after it is retention.
    last = max(number for number in places if trace[number][1].startswith("store/.new-"))
    chosen = [number for number in places if number <= last][::stride]
    for number in chosen:
        try:
            frozen_at(site, base, Point(number, after=False))
        except BaseException as error:
            error.add_note(f"before call {number}: {trace[number]}")
            raise
    print(f"frozen at {len(chosen)} points")
    return len(chosen)


def test_a_frozen_writer_process_is_never_chosen_and_overwrites_nothing(site: Site, folder: Path) -> None:
    assert freeze_at(site, folder / "base", stride=9) > 2


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_a_writer_process_may_freeze_before_each_call(site: Site, folder: Path) -> None:
    assert freeze_at(site, folder / "base", stride=1) > 20

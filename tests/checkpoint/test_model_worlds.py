"""Random lives of a store of many runs: what is committed covers its world, and retention leaves enough of it.

Attempts of different worlds, whose nodes write, die at any call and are done again, or believe in fewer nodes than
there are; readers; nodes that verify; prunes that die; damage.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint, verify_node
from everstep.checkpoint.catalog.leases import CheckpointLease
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints, mark_node
from everstep.checkpoint.errors import CheckpointError, Damaged, Missing
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.publish import commit
from everstep.checkpoint.retention.retention import prune_verified
from everstep.checkpoint.store.base import Store, open_store
from tests.checkpoint.builders import Training, is_good, load
from tests.checkpoint.test_model import Died, Mortal

CHUNK = 4096


class Torn(Mortal):
    """A part that is being written when its writer dies is there in half."""

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        if self._calls == 0 and not self._after:
            half = b"".join(map(bytes, data))[: size // 2]
            self._store.put(name, [half], len(half))
            raise Died
        super().put(name, data, size)


worlds = st.integers(1, 4)
steps = st.integers(0, 3)
backs = st.integers(0, 2)  # attempts before the present one
deaths = st.none() | st.tuples(st.integers(0, 6), st.booleans())
kinds = st.sampled_from(["flip a chunk", "lose a part", "flip a node manifest", "flip the index", "lose a mark"])


class Worlds(RuleBasedStateMachine):
    """`trainings`: by attempt, from 1 on; without rows of their own, ranks but the first save only values. `good`: what
    was committed, and is neither damaged nor removed. `rotten`: what was damaged with its marks on."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.trainings = [Training(2, 1, CHUNK)]
        self.good: set[Key] = set()
        self.rotten: set[Key] = set()

    @rule(world=worlds, rows=st.integers(0, 1))
    def begin_an_attempt_of_another_world(self, world: int, rows: int) -> None:
        self.trainings.append(Training(world, rows, CHUNK))

    @rule(step=steps, back=backs, which=st.integers(0, 3), other=st.none() | worlds, death=deaths)
    def a_node_writes(self, step: int, back: int, which: int, other: int | None, death: Any) -> None:
        """Its share of a save, maybe for a second time; `other`: one that believes to be of another world."""
        key, training = self._key(step, back)
        training = replace(training, world=other or training.world)
        self._write(self._with(death), key, training, which % training.world)

    @rule(step=steps, back=backs, death=deaths, nodes=st.none() | worlds)
    def a_committer_commits(self, step: int, back: int, death: Any, nodes: int | None) -> None:
        """`nodes`: of how many it believes that the run has them."""
        key, training = self._key(step, back)
        with suppress(Died, CheckpointError):
            commit.commit_checkpoint(self._with(death), key, nodes or training.world, fenced=lambda: None, timeout=0)
        self._see()

    @rule(some=st.sets(steps, min_size=1), back=backs, verified=st.booleans())
    def a_run_saves(self, some: set[int], back: int, verified: bool) -> None:
        for step in sorted(some):
            key, training = self._key(step, back)
            for rank in range(training.world):
                self._write(self.store, key, training, rank)
            with suppress(CheckpointError):
                training.commit(self.store, key)
            for rank in range(training.world) if verified else ():
                self._verify(self.store, key, rank)
        self._see()

    @rule(step=steps, back=backs, which=st.integers(0, 3), death=deaths)
    def a_node_verifies(self, step: int, back: int, which: int, death: Any) -> None:
        key, training = self._key(step, back)
        self._verify(self._with(death), key, which % training.world)

    @rule(keep_last=st.integers(1, 3), keep_every=st.none() | st.integers(1, 2), death=deaths)
    def prune(self, keep_last: int, keep_every: int | None, death: Any) -> None:
        before, marked = self._good_ones(), self._marked()
        with suppress(Died, CheckpointError):
            prune_verified(VerifiedCheckpoints(self._with(death)), keep_last=keep_last, keep_every=keep_every)
        after, there = self._good_ones(), set(list_candidates(self.store))
        assert after <= before
        # Marks of what is found to be damaged go.
        assert len(self._marked()) >= min(keep_last, len(marked - self.rotten))
        # What rotted after it was verified is only known to whoever reads it again.
        assert len(after) + len(self.rotten & there) >= min(keep_last, len(before))
        self.good &= there
        self.rotten &= there

    @rule(leased=st.booleans())
    def somebody_reads(self, leased: bool) -> None:
        """And changes nothing, but for a lease while it lasts."""
        names = {entry.name for entry in self.store.list("")}
        lease = CheckpointLease(self.store, max(self.good)) if leased and self.good else None
        loaded = load(self.store)
        if lease is not None:
            lease.release()
        assert {entry.name for entry in self.store.list("")} == names
        assert loaded.key == max(self.good, default=None)
        if loaded.key is not None:
            training = self.trainings[loaded.key.attempt.generation - 1]
            assert is_good(replace(training, world=self._world(loaded.key)), loaded)

    @precondition(lambda self: self.good)
    @rule(data=st.data(), kind=kinds, which=st.integers(0, 3))
    def damage(self, data: st.DataObject, kind: str, which: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.good)))
        node = self._index(key)["nodes"][which % self._world(key)]
        rows = self.trainings[key.attempt.generation - 1].rows
        part = key.part_name(which % self._world(key) if rows else 0)  # one in which there is something to read
        if kind == "lose a mark":
            self.store.delete([entry.name for entry in list(self.store.list(key.mark_prefix))[:1]])
            return
        if any(self.store.list(key.mark_prefix)):  # a share that has its mark is not read for the sake of another one
            self.rotten.add(key)
        self.good.discard(key)
        match kind:
            case "flip a chunk":
                self._rewrite(part, lambda data: data[:4100] + bytes([data[4100] ^ 4]) + data[4101:])
            case "lose a part":
                self.store.delete([part])
            case "flip a node manifest":
                self._rewrite(node["name"], lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:])
            case _:
                self.rotten.discard(key)  # nobody takes it for a checkpoint any more
                self._rewrite(key.manifest_name, lambda data: bytes([data[0] ^ 1]) + data[1:])

    @invariant()
    def whatever_is_committed_covers_its_world(self) -> None:
        """By the plain words of the format, and whoever wrote it."""
        for key in self.good:
            index = self._index(key)
            assert sorted(rank for node in index["nodes"] for rank in node["ranks"]) == list(range(index["world"]))
            there = {entry.name for entry in self.store.list(key.data_prefix)}
            assert {key.part_name(rank) for rank in range(index["world"])} <= there
            assert {node["name"] for node in index["nodes"]} <= there
            for tensor in index["tensors"].values():
                boxes = [
                    (box[1 : 1 + len(tensor["shape"])], box[1 + len(tensor["shape"]) :]) for box in tensor["boxes"]
                ]
                assert sum(volume(sizes) for _, sizes in boxes) == volume(tensor["shape"])
                assert not any(overlap(one, other) for one, other in combinations(boxes, 2))

    def _key(self, step: int, back: int) -> tuple[Key, Training]:
        attempt = max(1, len(self.trainings) - back)
        return Key(Attempt(0, attempt), step), self.trainings[attempt - 1]

    def _with(self, death: tuple[int, bool] | None) -> Store:
        return self.store if death is None else Torn(self.store, *death)

    def _write(self, store: Store, key: Key, training: Training, rank: int) -> None:
        """As a writer does with what was left behind."""
        _, manifest = training.part(key, rank)
        with suppress(Died, CheckpointError):
            if commit.is_node_announced(store, rank, manifest):
                return
            store.delete([*(entry.name for entry in store.list(key.mark_prefix)), key.part_name(rank)])
            training.write(store, key, rank)

    def _verify(self, store: Store, key: Key, rank: int) -> None:
        with suppress(Died, CheckpointError):
            announced = commit.read_announcement(store, key, rank)
            verify_node(store, announced, 0)
            mark_node(store, announced, 0)

    def _see(self) -> None:
        """Return what has become a checkpoint, in whatever way."""
        for key in set(list_candidates(self.store)) - self.good:
            with suppress(Damaged, Missing):
                verify_checkpoint(self.store, key)
                self.good.add(key)

    def _good_ones(self) -> set[Key]:
        found = set()
        for key in list_candidates(self.store):
            with suppress(Damaged, Missing):
                verify_checkpoint(self.store, key)
                found.add(key)
        return found

    def _marked(self) -> set[Key]:
        return set(VerifiedCheckpoints(self.store).marked(list_candidates(self.store)))

    def _index(self, key: Key) -> dict[str, Any]:
        return dict(json.loads(self.store.read(key.manifest_name).split(b"\n")[0]))

    def _world(self, key: Key) -> int:
        return int(self._index(key)["world"])

    def _rewrite(self, name: str, change: Callable[[bytes], bytes]) -> None:
        self.store.replace(name, change(self.store.read(name)))


def volume(sizes: Iterable[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def overlap(one: Any, other: Any) -> bool:
    return all(
        start < begin + extent and begin < start + size for start, size, begin, extent in zip(*one, *other, strict=True)
    )


def live(store_url: str, examples: int, count: int) -> None:
    path, mark, query = store_url.partition("?")
    if path.startswith("s3:"):
        examples //= 10  # a request takes milliseconds

    class Born(Worlds):
        def __init__(self) -> None:
            super().__init__(open_store(f"{path}/{uuid.uuid4().hex}{mark}{query}"))

    run_state_machine_as_test(
        Born,
        settings=settings(
            max_examples=examples,
            stateful_step_count=count,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_is_committed_covers_its_world_and_enough_of_it_stays(store_url: str) -> None:
    live(store_url, examples=25, count=20)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_for_long_whatever_is_committed_covers_its_world_and_enough_of_it_stays(store_url: str) -> None:
    live(store_url, examples=400, count=50)

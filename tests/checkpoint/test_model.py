"""Random lives of a store against a model: saves, deaths, late writers, damage, retention; what is loaded is right."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.catalog.leases import CheckpointLease
from everstep.checkpoint.errors import Damaged, Missing
from everstep.checkpoint.format.keys import HINT, Attempt, Key
from everstep.checkpoint.retention.retention import prune_store
from everstep.checkpoint.store.base import Store, StoredObject, open_store
from tests.checkpoint.builders import Training, is_good, load

training = Training(rows=2, chunk=4096)


class Died(BaseException):
    """The process is gone; nothing of it can catch this."""


class Mortal:
    """A store whose user dies at its `calls`-th change (from 0), before or after it has happened."""

    def __init__(self, store: Store, calls: int, after: bool) -> None:
        self._store, self._calls, self._after = store, calls, after

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        self._change(lambda: self._store.put(name, data, size))

    def put_whole(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        self._change(lambda: self._store.put_whole(name, data, size))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        first = [False]
        self._change(lambda: first.append(self._store.put_if_absent(name, data)))
        return first[-1]

    def replace(self, name: str, data: bytes) -> None:
        self._change(lambda: self._store.replace(name, data))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:  # one by one: a store may have removed any number of them
            self._change(lambda name=name: self._store.delete([name]))  # type: ignore[misc]

    def sweep(self, prefix: str, before: float) -> int:
        return self._store.sweep(prefix, before)

    def read(self, name: str) -> bytes:
        return self._store.read(name)

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        self._store.read_into(name, offset, into)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return self._store.list(prefix)

    def _change(self, call: Callable[[], object]) -> None:
        self._calls -= 1
        if self._calls == -1 and not self._after:
            raise Died
        call()
        if self._calls == -1:
            raise Died


some_steps = st.integers(0, 6)
deaths = st.tuples(st.integers(0, 8), st.booleans())
hints = some_steps.map(lambda step: Key(Attempt(0, 9), step).manifest_name.encode())
kinds = st.sampled_from(["flip a chunk", "cut a part", "lose a part", "flip the manifest", "lose the manifest"])


class Life(RuleBasedStateMachine):
    """`good`: what was committed and is neither damaged nor removed."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.generation = 1
        self.used: set[Key] = set()
        self.good: set[Key] = set()
        self.leases: list[CheckpointLease] = []

    @rule()
    def begin_another_attempt(self) -> None:
        self.generation += 1

    @rule(step=some_steps)
    def save(self, step: int) -> None:
        self._save(self._key(step), self.store)

    @rule(step=some_steps, back=st.integers(1, 2))
    def save_late_by_an_attempt_that_is_over(self, step: int, back: int) -> None:
        self._save(self._key(step, self.generation - back), self.store)

    @rule(step=some_steps, death=deaths)
    def die_while_saving(self, step: int, death: tuple[int, bool]) -> None:
        self._save(self._key(step), Mortal(self.store, *death))

    @rule(keep_last=st.integers(1, 3), keep_every=st.none() | st.integers(1, 3), old=st.booleans())
    def prune(self, keep_last: int, keep_every: int | None, old: bool) -> None:
        self._prune(self.store, keep_last, keep_every, old)

    @rule(keep_last=st.integers(1, 3), death=deaths)
    def die_while_pruning(self, keep_last: int, death: tuple[int, bool]) -> None:
        self._prune(Mortal(self.store, *death), keep_last, None, True)

    @precondition(lambda self: self.good)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        self.leases.append(CheckpointLease(self.store, data.draw(st.sampled_from(sorted(self.good)))))

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.leases.pop().release()

    @rule(content=st.binary(max_size=3) | hints)
    def scribble_over_the_hint(self, content: bytes) -> None:
        self.store.replace(HINT, content)

    @precondition(lambda self: self.good)
    @rule(data=st.data(), kind=kinds, rank=st.integers(0, 1))
    def damage(self, data: st.DataObject, kind: str, rank: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.good)))
        part, manifest = key.part_name(rank), key.manifest_name
        match kind:
            case "flip a chunk":
                self._rewrite(part, lambda data: data[:4100] + bytes([data[4100] ^ 4]) + data[4101:])
            case "cut a part":
                self._rewrite(part, lambda data: data[:4150])
            case "lose a part":
                self.store.delete([part])
            case "flip the manifest":
                self._rewrite(manifest, lambda data: bytes([data[0] ^ 1]) + data[1:])
            case _:
                self.store.delete([manifest])
        self.good.discard(key)

    @invariant()
    def the_greatest_good_one_is_loaded(self) -> None:
        loaded = load(self.store)
        assert loaded.key == max(self.good, default=None)
        assert loaded.key is None or is_good(training, loaded)

    def _key(self, step: int, generation: int | None = None) -> Key:
        return Key(Attempt(0, max(1, generation or self.generation)), step)

    def _save(self, key: Key, store: Store) -> None:
        if key in self.used:  # an attempt saves a step once
            return
        self.used.add(key)
        try:
            training.save(store, key)
        except Died:
            if key not in list_candidates(self.store):
                return
        self.good.add(key)

    def _prune(self, store: Store, keep_last: int, keep_every: int | None, old: bool) -> None:
        before = set(list_candidates(self.store))
        verified = {key for key in before if self._verifies(key)}
        assert verified == self.good
        now = time.time() + (1000 if old else 0)
        with suppress(Died):
            prune_store(store, verified, keep_last=keep_last, keep_every=keep_every, sweep_after=500, clock=lambda: now)
        left = set(list_candidates(self.store))
        # One that has expired, even once, is removed by whoever sees it.
        self.leases = [lease for lease in self.leases if time.time() + lease.seconds_left >= now]
        for lease in self.leases:
            assert lease.key in left or lease.key not in before
        assert left >= {key for key in before if not verified or key >= max(verified)}
        if verified:
            below = sorted((key for key in before if key <= max(verified)), reverse=True)
            assert left >= set(below[:keep_last])
        self.good &= left

    def _verifies(self, key: Key) -> bool:
        try:
            verify_checkpoint(self.store, key)
        except (Damaged, Missing):
            return False
        return True

    def _rewrite(self, name: str, change: Callable[[bytes], bytes]) -> None:
        self.store.replace(name, change(self.store.read(name)))


def live(store_url: str, examples: int, steps: int) -> None:
    path, mark, query = store_url.partition("?")
    if path.startswith("s3:"):
        examples //= 10  # a request takes milliseconds

    class Born(Life):
        def __init__(self) -> None:
            super().__init__(open_store(f"{path}/{uuid.uuid4().hex}{mark}{query}"))

    run_state_machine_as_test(
        Born,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_happens_to_a_store_the_greatest_good_one_is_loaded(store_url: str) -> None:
    live(store_url, examples=50, steps=20)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_whatever_happens_for_long_the_greatest_good_one_is_loaded(store_url: str) -> None:
    live(store_url, examples=300, steps=40)

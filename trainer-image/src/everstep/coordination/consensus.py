"""All ranks come to one decision, or all learn which rank did not come.

Every rank leaves a message in the store; rank 0 decides from all of them and leaves what it decided. No collective: it
works whatever backend the default group has, and an error names the rank that died instead of a broken connection.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from everstep.coordination.errors import KVStoreLost, RankLost
from everstep.coordination.kv_store import KVStore

PATIENCE = 300.0  # seconds without a sign of life; longer than any single call of a store, with its retries

_BEAT = 1.0  # seconds
_SETTLE = 10.0  # seconds


class Consensus:
    """One rank's side of decisions by all ranks. All of them call agree() equally often.

    Args:
        store: Through which they talk. Its errors are raised.
        rank: The number of this rank among them.
        world: Their number.
        patience_seconds: How long a rank may be without a sign of life.
        ranks: What they are called in messages, where they are not all ranks of the run.
        purpose: What the decisions are for, in messages: "during the restore".
    """

    def __init__(
        self,
        store: KVStore,
        rank: int,
        world: int,
        patience_seconds: float = PATIENCE,
        ranks: Sequence[int] | None = None,
        *,
        purpose: str = "during a decision",
    ) -> None:
        self._store = store
        self._names = range(world) if ranks is None else ranks
        self._rank = rank
        self._world = world
        self._patience = patience_seconds
        self._purpose = purpose
        self._round = 0
        self._beat = 0.0
        self._gone = 0
        self._lock = threading.Lock()

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return, on all ranks, what `decide` makes of all ranks' messages on rank 0.

        Args:
            mine: This rank's message: anything that JSON can write.
            decide: Called on rank 0 with all messages, in the order of ranks; returns anything that JSON can write.

        Raises:
            RankLost: A rank is lost. When `decide` raises, rank 0 raises the same and others one with its text.
        """
        number = self._round
        self._round += 1
        if self._rank == 0:
            return self._decide(number, mine, decide)
        try:
            self._store.leave(f"vote/{number}/{self._rank}", [mine])  # None is a message too
            return self._outcome(number)
        except KVStoreLost as error:
            raise self._lost([0], "cannot be reached") from error

    def alive(self) -> None:
        """A sign of life; call it often between two rounds, from any thread."""
        with self._lock:
            now = time.monotonic()
            if self._world == 1 or now < self._beat + _BEAT:
                return
            self._beat = now
        try:
            self._store.count(f"vote/alive/{self._rank}", 1)
        except KVStoreLost as error:
            raise self._lost([0], "cannot be reached") from error

    def post(self, name: str, message: Any) -> None:
        """Leave something for other ranks to read() after the next round, without giving it to all of them."""
        self._store.leave(f"vote/post/{name}", message)

    def read(self, name: str) -> Any:
        """Return what was posted.

        Raises:
            RankLost: It does not come.
        """
        try:
            found = self._store.read(f"vote/post/{name}", self._patience)
        except KVStoreLost as error:
            raise self._lost([0], "cannot be reached") from error
        if found is None:
            raise self._lost([0], f"has posted nothing for {self._patience:g} s")
        return found

    def remove(self, name: str) -> None:
        """Nobody will read what was posted any more."""
        with contextlib.suppress(KVStoreLost):
            self._store.remove(f"vote/post/{name}")

    def settle(self) -> None:
        """After the last round: rank 0, which holds the store, waits until all have heard, or a few seconds at most.

        Else a rank 0 that ends at once, because of what was decided, would take the reason with it.
        """
        if self._world == 1 or self._round == 0:
            return
        name = f"vote/{self._round - 1}/heard"
        with contextlib.suppress(KVStoreLost):
            if self._rank != 0:
                self._store.count(name, 1)
                return
            until = time.monotonic() + _SETTLE
            while self._store.count(name) < self._world - 1 - self._gone and time.monotonic() < until:
                time.sleep(0.005)

    def _decide(self, number: int, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        try:
            decided = json.loads(json.dumps(decide([mine, *self._collect(number)])))
        except BaseException as error:
            lost = error.ranks if isinstance(error, RankLost) else ()
            self._gone = len(lost)
            self._leave(number, {"lost": lost, "why": f"{type(error).__name__}: {error}"})
            raise
        self._leave(number, {"decided": decided})
        return decided

    def _lost(self, numbers: Sequence[int], why: str) -> RankLost:
        return self._store.errors.lost([self._names[number] for number in numbers], f"{why} {self._purpose}")

    def _leave(self, number: int, outcome: dict[str, Any]) -> None:
        if self._world > 1:
            self._store.leave(f"vote/{number}", outcome)

    def _collect(self, number: int) -> list[Any]:
        found: dict[int, Any] = {}
        signs = _Signs(self._store, self._patience)
        while missing := [rank for rank in range(1, self._world) if rank not in found]:
            # Whoever is late is waited for once; the others of this pass are only looked at.
            for rank in missing:
                message = self._store.read(f"vote/{number}/{rank}", _BEAT if rank == missing[0] else 0.0)
                if message is not None:
                    (found[rank],) = message
            self.alive()
            silent = signs.silent([rank for rank in missing if rank not in found])
            if silent:
                raise self._lost(silent, f"gave no sign of life for {self._patience:g} s")
        return [found[rank] for rank in sorted(found)]

    def _outcome(self, number: int) -> Any:
        signs = _Signs(self._store, self._patience)
        while (outcome := self._store.read(f"vote/{number}", _BEAT)) is None:
            self.alive()
            if signs.silent([0]):
                raise self._lost([0], f"gave no sign of life for {self._patience:g} s")
        if "decided" in outcome:
            return outcome["decided"]
        if outcome["lost"]:
            why = f"gave no sign of life for {self._patience:g} s {self._purpose}"
            raise self._store.errors.lost(outcome["lost"], why)
        raise self._store.errors.failed(f"rank {self._names[0]} could not decide: {outcome['why']}")


class _Signs:
    """The time since which each rank that is waited for has been silent, by our own clock."""

    def __init__(self, store: KVStore, patience: float) -> None:
        self._store = store
        self._patience = patience
        self._seen: dict[int, tuple[int, float]] = {}

    def silent(self, ranks: Sequence[int]) -> list[int]:
        now = time.monotonic()
        for rank in ranks:
            count = self._store.count(f"vote/alive/{rank}")
            if rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = (count, now)
        return [rank for rank in ranks if now - self._seen[rank][1] > self._patience]

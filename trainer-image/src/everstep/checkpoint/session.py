"""`everstep.checkpointer(…)`: what a training script sees of all this."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from everstep.checkpoint import attempts, checksum, fence, slots, topology
from everstep.checkpoint.agreement import Agreement
from everstep.checkpoint.auto import Trigger, learned
from everstep.checkpoint.board import Alone, Board, Shared
from everstep.checkpoint.collectives import tell
from everstep.checkpoint.control import Config
from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.events import Callback, Event, Events, Metrics
from everstep.checkpoint.host_group import close_host_group, open_host_group
from everstep.checkpoint.keys import MANIFESTS, Attempt, Key
from everstep.checkpoint.peers import Peers, meet
from everstep.checkpoint.pilot import Forecast, Pilot, Policy, SaveFailed
from everstep.checkpoint.restore import Restored, Restorer
from everstep.checkpoint.rng import Rng
from everstep.checkpoint.save import How, Node, Saver
from everstep.checkpoint.state.kinds import PerRank
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.together import together
from everstep.checkpoint.vote import Vote

__all__ = ["Checkpointer", "Forecast", "SaveFailed"]

_log = logging.getLogger("everstep.checkpoint")

DEFAULT_EVERY = "10m"
GENERATORS = "rng"


class Checkpointer:
    """Saves and restores one run. All ranks make one, with the same arguments, after `init_process_group`.

    store: a folder or a URL, e.g. s3://bucket/run; `options` go to the store.
    every: seconds, "10m", or "auto" (by Young and Daly, from what saves cost and how often the run fails);
    every_steps: a number of steps; both may be given, with neither it is ten minutes.
    keep_last, keep_every: how many checkpoints stay, and each one whose step is a multiple of the latter.
    policy: what a save does that is due while one is still being stored: "skip" (it is taken when the next one is due),
    "wait" (training waits) or "queue" (it is taken into the other slot, and training waits where that is in use too).
    slots: copies in each node's memory; with one, no whole copy is there while a save is copied.
    peers: 1 keeps a copy of each node's slots in the memory of another node, so that the loss of a node costs no read
    of the store; by default where there are several nodes with room for it. EVERSTEP_FAILURE_DOMAIN: what a node fails
    together with, by default its machine.
    memory: the slots' directory; by default one in /dev/shm, or in EVERSTEP_CHECKPOINT_MEMORY.
    attempt: the fencing token (epoch, generation), by default EVERSTEP_EPOCH and EVERSTEP_GENERATION, or counted.
    time_between_failures: seconds, for "auto"; by default learned from the store.
    timeout: seconds that a rank waits for other ranks or for its writer; commit_timeout: that a save may take;
    linger: that a writer stays whose ranks are gone.
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        every: str | float | Literal["auto"] | None = None,
        every_steps: int | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        policy: Policy = "skip",
        slots: int = 2,
        peers: Literal[0, 1] | None = None,
        memory: str | os.PathLike[str] | None = None,
        attempt: tuple[int, int] | None = None,
        checksum: str = checksum.DEFAULT,
        allow_pickle: bool = False,
        time_between_failures: float | None = None,
        timeout: float = 300.0,
        commit_timeout: float = 1800.0,
        stall_after: float = 60.0,
        linger: float = 600.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if every is None and every_steps is None:
            every = DEFAULT_EVERY
        if slots < 1:
            raise ValueError(f"there is at least one slot, not {slots}")
        if peers not in (None, 0, 1):
            raise ValueError(f"each node's slots are copied to 0 or 1 other nodes, not {peers}")
        self._trigger = Trigger.parse(every, every_steps, time_between_failures)
        self._events = Events()
        self._metrics = Metrics()
        self._how = How(checksum, allow_pickle)
        self._pilot: Pilot | None = None
        self._group = open_host_group(timeout)
        self._topology = topology.find(self._group)
        self._options = dict(options or {})
        self.store: Store = open_store(store, **self._options)

        claimed = together(lambda: self._first(lambda: self._claim(attempt, time_between_failures)), self._group)
        (token, run), secret = tell((claimed, secrets.token_hex(32)), self._group)
        self.attempt = Attempt.parse(token)
        directory = Path(memory) if memory is not None else None
        config = Config(
            url=self.store.url,
            options=self._options,
            attempt=str(self.attempt),
            node=self._topology.node,
            nodes=self._topology.nodes,
            world=self._topology.world,
            ranks=self._topology.ranks,
            slots=slots,
            keep_last=keep_last,
            keep_every=keep_every,
            commit_timeout=commit_timeout,
            stall_after=stall_after,
            fence=str(fence.FENCE) if attempt is None and fence.given() else None,
            secret=secret if self._topology.nodes > 1 and peers != 0 else "",
            run=run,
            insist=peers == 1,
        )
        self._node = together(lambda: self._join(directory, config, linger), self._group)
        self._peers = self._meet() if config.secret else None
        board: Board = Shared.open(self._group, timeout) if self._group is not None else Alone()
        self._agreement = Agreement(board, self._topology.rank, timeout)
        self._board = board
        self._vote = Vote(board, self._topology.rank, self._topology.world, timeout)
        self._policy: Policy = policy
        self._timeout = timeout
        self._commit_timeout = commit_timeout

    # ---- a script's calls

    def restore(self, **objects: object) -> Restored:
        """Loads the newest checkpoint that is good, the same on all ranks, and names what is saved from here on.

        An object is anything with `state_dict` and `load_state_dict`, a tensor, or a plain nested value; the state of
        each rank's random generators goes along. Without any checkpoint `step` is 0. NoGoodCheckpoint when there are
        some and none is good, StateMismatch when it is not of these objects: they are untouched then. CheckpointError
        once this session has saved: what it saves next would be older than checkpoints of the same attempt.
        """
        if self._pilot is not None and self._pilot.saved:
            raise CheckpointError("this session has saved already: close it, and restore in a new one")
        everything = self._with_generators(objects)
        restorer = Restorer(
            everything,
            self.store,
            self._topology,
            self._vote,
            self._node.directory,
            peers=self._peers,
            attempt=self.attempt,
            allow_pickle=self._how.allow_pickle,
        )
        restored = restorer.restore()
        for key, why in restored.fell_back.items():
            self._metrics.fell_back += 1
            self._events.emit(Event("fell_back", Key.parse(key), why))
        if restored.key is not None:
            figures = {"tier": restored.tier, "bytes": restored.bytes, "seconds": round(restored.seconds, 3)}
            self._events.emit(Event("restored", restored.key, "", figures))
        self._begin(everything, restored.step)
        return restored

    def track(self, **objects: object) -> None:
        """Names what is saved from here on, without looking for a checkpoint: see restore()."""
        self._begin(self._with_generators(objects))

    def step(self, step: int) -> None:
        """Says that `step` steps are trained; saves when it is time. Costs next to nothing otherwise.

        AgreementLost when rank 0 is gone. A save that fails is an event, not an error.
        """
        self._flying().step(step)

    def save(self, step: int, deadline: float | None = None) -> Forecast:
        """Saves now; all ranks call it at the same step. Waits until an earlier save is in the store.

        deadline: seconds from now within which the checkpoint must be in the store. If it will not be, nothing is
        saved, and the forecast says how long it would take.
        """
        return self._flying().save(step, deadline)

    def before_change(self) -> None:
        """To be called before anything but its own step() changes what a `torch.optim.Optimizer` holds.

        On a GPU, what is computed next waits until the last save has copied that; it costs nothing otherwise.
        """
        self._flying().saver.before_change()

    def request(self, deadline: float | None = None) -> None:
        """Asks for a save at the next boundary, for all ranks; any one rank may, also in a signal's handler."""
        self._flying().request(deadline)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until what was saved is in the store. SaveFailed when the last save did not get there."""
        self._flying().wait(timeout)

    def on(self, event: str, callback: Callback) -> None:
        """Calls back with each event of this name: saved, restored, fell_back, stalled, failed, uncopied (a save has no
        copy in another node's memory). All are logged."""
        self._events.on(event, callback)

    def metrics(self) -> dict[str, float | int | None]:
        """Figures of this rank so far: see events.Metrics."""
        return self._metrics.snapshot()

    def close(self, *, wait: bool = True) -> None:
        """Ends the session; with `wait` after the last commit, with the slots removed."""
        try:
            if self._pilot is not None:
                self._pilot.close(wait)
            elif wait:
                with contextlib.suppress(CheckpointError):
                    self._node.call("bye")
        finally:
            if self._pilot is not None:
                self._pilot.saver.close()
            self._node.close()
            group, self._group = self._group, None
            close_host_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the writer goes on by itself with what is filled; nobody waits for it. sys.exit(0) is none.
        self.close(wait=error is None or (isinstance(error, SystemExit) and not error.code))

    # ---- beginnings

    def _with_generators(self, objects: Mapping[str, object]) -> dict[str, object]:
        if GENERATORS in objects:
            raise ValueError(f"an object cannot be called {GENERATORS!r}: the random generators are saved as that")
        return {**objects, GENERATORS: PerRank(Rng())}

    def _begin(self, objects: Mapping[str, object], step: int | None = None) -> None:
        saver = Saver(objects, self._topology, self._group, self._node, self._how)
        try:
            together(saver.prepare, self._group)
        except BaseException:
            saver.close()
            raise
        if self._pilot is not None:
            # The same one: its saves may not have ended yet, and all ranks go on with the numbers that they have.
            self._pilot.go_on(saver, step)
            return
        self._pilot = Pilot(
            saver=saver,
            node=self._node,
            agreement=self._agreement,
            board=self._board,
            trigger=self._trigger,
            attempt=self.attempt,
            events=self._events,
            metrics=self._metrics,
            policy=self._policy,
            timeout=self._timeout,
            commit_timeout=self._commit_timeout,
        )

    def _meet(self) -> Peers:
        config = self._node.config
        found = meet(self._node.port or 0, config.secret, self._topology, self._group)
        settled = replace(config, keeper=found.addresses[found.keeper])
        together(lambda: self._node.settle(settled, found.kept), self._group)
        return found

    def _flying(self) -> Pilot:
        if self._pilot is None:
            raise CheckpointError("nothing is tracked yet: call restore(model=…, optimizer=…) first")
        return self._pilot

    def _claim(self, attempt: tuple[int, int] | None, between_failures: float | None) -> tuple[str, str]:
        """The attempt, and what the store is called: empty when it cannot be asked now."""
        token = Attempt(*attempt) if attempt is not None else fence.given()
        if self._trigger.auto and between_failures is None:
            self._trigger.between_failures = learned(*_history(self.store))
        if token is None:
            return str(attempts.claim(self.store)), attempts.run_of(self.store)
        run = ""
        try:
            attempts.check(self.store, token)
            run = attempts.run_of(self.store)
        except StoreError as error:
            # Nodes may hold in memory what is needed; a later attempt's checkpoints are greater than ours anyway.
            _log.warning("whether a later attempt has used the store is not known: %s", error)
        return str(token), run

    def _first(self, make: Any) -> Any:
        return make() if self._topology.rank == 0 else None

    def _join(self, directory: Path | None, config: Config, linger: float) -> Node:
        where = directory or slots.default_directory(config.url, config.node)
        return Node(where, config, self._topology.local, linger)


def _history(store: Store) -> tuple[int, float]:
    """How often this run has failed so far, and in how many seconds: its attempts, since its first checkpoint."""
    entries = list(store.list(MANIFESTS))
    if not entries:
        return 0, 0.0
    tokens = {entry.name.partition("-")[0] for entry in entries}
    return len(tokens), max(0.0, time.time() - min(entry.modified for entry in entries))

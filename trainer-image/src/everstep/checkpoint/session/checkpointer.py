"""`everstep.checkpointer(…)`: what a training script sees of all this."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

from everstep.checkpoint.catalog.selection import Rename
from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.events import Callback, Events, Metrics
from everstep.checkpoint.format.keys import Attempt, Key, check_deadline, check_step
from everstep.checkpoint.format.user_metadata import pack_metadata
from everstep.checkpoint.peers.discovery import serve_reads
from everstep.checkpoint.publish import attempts, fence
from everstep.checkpoint.ranks import topology
from everstep.checkpoint.ranks.host_group import opening_host_group
from everstep.checkpoint.restore.options import RestoreOptions
from everstep.checkpoint.restore.restorer import Restored, Restorer
from everstep.checkpoint.save.forecast import Forecast
from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.checkpoint.save.outside_requests import SaveRequest
from everstep.checkpoint.save.save_coordinator import Policy, SaveCoordinator
from everstep.checkpoint.save.saver import How, Saver, WriterConnection, check_start, check_values
from everstep.checkpoint.save.session_end import tell_unmet_request
from everstep.checkpoint.save.step_agreement import Agreement
from everstep.checkpoint.save.trigger import Trigger, estimate_mean_time_between_failures
from everstep.checkpoint.session import claiming
from everstep.checkpoint.session.one_at_a_time import check_process, one_at_a_time
from everstep.checkpoint.session.options import (
    MemoryOptions,
    RetentionOptions,
    SessionArguments,
    StorageOptions,
    TimeOptions,
)
from everstep.checkpoint.session.places import open_places
from everstep.checkpoint.session.process_sessions import is_only_session, replace_earlier_session
from everstep.checkpoint.session.request_file import RequestFile
from everstep.checkpoint.session.source_ranks import check_source_ranks
from everstep.checkpoint.state.casting import Cast, Casts
from everstep.checkpoint.state.inference_mode import making_normal_tensors
from everstep.checkpoint.state.loader_samplers import warn_of_random_samplers
from everstep.checkpoint.state.received import ReceivedLeaves
from everstep.checkpoint.state.rng import GENERATORS, add_generators
from everstep.coordination.arrivals import Arrivals
from everstep.coordination.consensus import Consensus
from everstep.coordination.kv_store import KVStore, SharedKVStore
from everstep.keywords import explain_keywords

_log = logging.getLogger("everstep.checkpoint")

__all__ = ["Checkpointer", "Forecast", "SaveFailed"]


class Checkpointer:
    """A session that saves and restores one run. All ranks make one, alike, after `init_process_group`.

    Attributes:
        store: The store.
        attempt: The fencing token of this session, (epoch, generation), once it has saved.
        metadata: A dictionary, or a function from the step to one, that is kept with each checkpoint.
    """

    @explain_keywords(retention=RetentionOptions, memory=MemoryOptions, storage=StorageOptions, times=TimeOptions)
    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        every: str | float | Literal["auto"] | None = None,
        every_steps: int | None = None,
        keep_last: int | None = None,
        policy: Policy = "skip",
        retention: RetentionOptions | None = None,
        memory: MemoryOptions | None = None,
        storage: StorageOptions | None = None,
        times: TimeOptions | None = None,
        attempt: tuple[int, int] | None = None,
    ) -> None:
        """Begin a session, which writes nothing before its first save.

        Args:
            store: A folder or a URL, as s3://bucket/run. None for that of the job (`spec.checkpoint`, in
                EVERSTEP_CHECKPOINT), or the folder `checkpoints`.
            every: The time between saves: seconds, "10m", or "auto" (by Young and Daly, from what saves cost and how
                often the run fails). With neither this nor `every_steps` it is as the job says, or ten minutes.
            every_steps: The number of steps between saves; both may be given.
            keep_last: The number of newest checkpoints that stay; None for as many as the job says, or three.
            policy: What a save does that is due while one is still being stored: "skip" (it is taken when the next one
                is due), "wait" (training waits) or "queue" (it is taken into the other slot, and training waits where
                that is in use too).
            retention: Which checkpoints stay beside the newest.
            memory: The copies in the nodes' memory.
            storage: The store's own options, the checksum, and whether pickles are allowed.
            times: How long a session waits, for ranks, for the store and for what is lost.
            attempt: The fencing token (epoch, generation); None for EVERSTEP_EPOCH and EVERSTEP_GENERATION, or counted.

        Raises:
            ValueError: An argument is not allowed.
            CheckpointError: The store or the memory cannot be opened; on all ranks.
        """
        self._asked = asked = SessionArguments.check({name: each for name, each in locals().items() if name != "self"})
        self._trigger = Trigger.parse(asked.every, asked.every_steps, asked.times.time_between_failures)
        self._metrics = Metrics()
        self._how = How(asked.storage.checksum, asked.storage.allow_pickle)
        self._given = Attempt(*asked.attempt) if asked.attempt is not None else fence.get_given_attempt()
        with opening_host_group(asked.times.timeout, "everstep.checkpointer()") as self._group:
            self._topology = topology.find_topology(self._group)
            self.store, self._directory = open_places(asked, self._topology, self._group)
            self._kv_store: KVStore = SharedKVStore.open(self._group, asked.times.timeout)
        self._events = Events(reports=self._topology.rank == 0, trains=False, every=self._trigger.every)

        # Nothing is written anywhere, and nobody else's is touched, before this session saves: see _claim().
        self.attempt: Attempt | None = None
        self._keeps_copies = self._topology.nodes > 1 and asked.memory.peers != 0
        self._coordinator: SaveCoordinator | None = None
        self._node: WriterConnection | None = None
        self._process = os.getpid()
        self.ended = ""  # why nothing may be called any more
        self._objects: dict[str, object] | None = None
        self._seen: claiming.LastSeen | None = None
        self.metadata: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] = {}
        self._noted: dict[str, Any] = {}  # for the save that is being begun
        self._has_restored = False
        self._received = ReceivedLeaves(self._group, self.store.url)
        self._request_file = RequestFile.from_environment()
        self._wish: SaveRequest | None = None  # a save that is asked for before there is a coordinator
        rank, timeout = self._topology.rank, asked.times.timeout
        self._agreement = Agreement(self._kv_store, rank, timeout)
        self._arrivals = Arrivals(self._kv_store, self._group)
        self._consensus = Consensus(self._kv_store, rank, self._topology.world, timeout, purpose="during the restore")

    # ---- a script's calls

    @one_at_a_time
    @making_normal_tensors
    def restore(
        self,
        *,
        step: int | Key | None = None,
        strict: bool = True,
        rename: Rename | None = None,
        cast: Cast = None,
        **objects: object,
    ) -> Restored:
        """Load the newest checkpoint that is good, the same on all ranks, and name what is saved from here on.

        With `step` exactly that one, of the greatest attempt that has it and is good; or a key, as everstep.best()
        returns. Checkpoints of other steps stay: what this run saves is of a later attempt, and therefore newer.
        `strict=False` reports names that do not meet in the result. `rename`: prefixes of the checkpoint's full names
        and what takes their place, or a function. `cast`: True, a type, or a mapping of types. See the page
        docs/how-to/checkpoints.md.

        It only reads: an evaluation may restore from the store of a run that goes on, and a store that may not be
        written to is enough. What a live run has in this node's memory is left alone.

        An object is anything with `state_dict` and `load_state_dict`, a tensor, or a plain nested value; the state of
        each rank's random generators goes along. Without any checkpoint `step` is 0.
        NoGoodCheckpoint when there are some and none is good, NoSuchStep when there is none of `step`, StateMismatch
        when it is not of these objects: they are untouched then. CheckpointError once this session has saved: what it
        saves next would be older than checkpoints of the same attempt.
        """
        if self._coordinator is not None and self._coordinator.newest_step is not None:
            raise CheckpointError("this session has saved already: close it, and restore in a new one")
        everything = add_generators(objects)

        def check() -> RestoreOptions:
            held = check_values(everything, self._topology, self._how)
            self._received.begin(everything, held, allow_pickle=self._how.allow_pickle)
            return RestoreOptions(step, strict, rename, Casts(cast), self._how.allow_pickle, frozenset({GENERATORS}))

        with self._arrivals.naming_absent("restore()"):
            check_source_ranks(everything, self._group)
            options = self._group.run_on_all_ranks(check)
        run = attempts.read_run(self.store) if self._topology.local == 0 else None
        with serve_reads(self._directory, self._topology, self._group, run, wanted=self._keeps_copies) as peers:
            restorer = Restorer(
                everything,
                self.store,
                self._topology,
                self._consensus,
                self._directory,
                peers=peers,
                attempt=self._given,
                claimed=self.attempt,
                run=run,
                options=options,
            )
            restored = restorer.restore()
        self._received.find(restorer.taken)
        self._seen, self._has_restored = claiming.LastSeen(restorer.newest_seen, restored.key), True
        self._metrics.fell_back += len(restored.fell_back)
        figures = {"tier": restored.tier, "bytes": restored.bytes, "seconds": round(restored.seconds, 3)}
        self._events.tell_restored(restored.key, restored.fell_back, figures)
        self._set_objects(everything, restored.step)
        return restored

    @one_at_a_time
    def track(self, **objects: object) -> None:
        """Names what is saved from here on, without loading a checkpoint: see restore().

        Raises:
            CheckpointError: The store holds checkpoints, which later ones would soon have removed (see start_over), or
                these objects cannot be saved here.
        """
        if self._coordinator is None and not self._has_restored:
            keep = self._asked.keep_last
            with self._arrivals.naming_absent("track()"):
                self._group.run_on_first_rank(lambda: claiming.check_is_empty(self.store, keep))
            self._seen = claiming.LastSeen(None, None)
        self._track(objects)

    @one_at_a_time
    def start_over(self, **objects: object) -> None:
        """Names what is saved from here on, and leaves behind what the store holds.

        Checkpoints of earlier attempts are chosen no more once this one has saved, and retention removes them as any
        older ones, whatever their steps are.

        Raises:
            CheckpointError: These objects cannot be saved, or find no room in this node's memory.
        """
        self._seen = None
        self._track(objects)

    def _track(self, objects: Mapping[str, object]) -> None:
        everything = add_generators(objects)
        if not self._has_restored:  # what is marked then is another session's
            self._received.forget()
        with self._arrivals.naming_absent("track() or start_over()"):
            check_source_ranks(everything, self._group)
            if self._coordinator is None:
                memory = self._directory, self._asked.memory.slots
                check_start(everything, self._topology, self._group, self._how, *memory, self._received)
        self._set_objects(everything)

    @one_at_a_time
    def step(self, step: int) -> None:
        """Note that `step` steps are trained; save when it is time. Costs next to nothing otherwise.

        It is time, too, when the job's leader asks for a checkpoint, as before a node goes away (see request_file).

        The first call, or the first save(), claims the store and the slots for this run. Superseded when a later
        attempt has the store; CheckpointError when another live process has the slots, they find no room, or somebody
        has saved something newer since this session restored.
        AgreementLost when rank 0 is gone. A save that fails is an event, not an error. CheckpointError also from within
        another step() or save(), as in a callback of an event.
        """
        step = check_step(step)
        self._events.tell_step(step)  # the first claim may take its time
        coordinator = self._claimed()
        # One rank asks for all, and rank 0 hears it soonest: each that asked would be one more save.
        if self._topology.rank == 0 and (asked := self._request_file.take()) is not None:
            # Another session of this process has its save still to begin.
            coordinator.ask(SaveRequest.make(asked.seconds, holds=is_only_session(self)))
        coordinator.step(step)

    @one_at_a_time
    def save(self, step: int, deadline: float | None = None, *, metadata: Mapping[str, Any] | None = None) -> Forecast:
        """Saves now, unless this step is saved already, once an earlier save is in the store; all ranks call it alike.

        metadata: a small JSON object that is kept with the checkpoint, beside what the attribute `metadata` says; rank
        0's counts. CheckpointError for another type, and above 64 KiB.

        deadline: seconds from now within which the checkpoint must be in the store. If it will not be, nothing is
        saved, and the forecast says how long it would take.
        """
        step, deadline = check_step(step), check_deadline(deadline)
        pack_metadata(metadata or {})
        self._events.tell_saved_step(step)
        coordinator = self._claimed()
        self._noted = dict(metadata or {})
        if metadata and coordinator.newest_step == step and self._topology.rank == 0:
            _log.warning("step %s is saved already, without this metadata: call save() before step()", step)
        try:
            return coordinator.save(step, deadline)
        finally:
            self._noted = {}

    def wait_for_copy(self) -> None:
        """To be called before anything but its own step() changes what a `torch.optim.Optimizer` holds.

        On a GPU, what is computed next waits until the last save has copied that; it costs nothing otherwise.
        """
        if self._coordinator is not None:
            self._coordinator.saver.wait_for_copy()

    def request(self, deadline: float | None = None) -> None:
        """Ask for a save at the next boundary, for all ranks; any one rank may, also in a signal's handler.

        A boundary is a step(), about once a second. Where neither a boundary nor a save() comes any more, `failed` is
        told at the end, and close() raises SaveFailed unless the deadline is over by then.
        """
        deadline = check_deadline(deadline)
        if self._coordinator is not None:
            self._coordinator.request(deadline)
        else:  # one rank alone claims nothing
            self._wish = SaveRequest.make(deadline).join(self._wish)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until what was saved is in the store. SaveFailed when the last save did not get there."""
        check_process(self._process, "wait()")
        if self._coordinator is not None:
            self._coordinator.wait(timeout)

    def on(self, event: str, callback: Callback) -> None:
        """Calls back with each event of this name: saved, restored, fell_back, stalled, failed, copy_failed (a save has
        no copy in another node's memory). All are logged."""
        self._events.on(event, callback)

    def metrics(self) -> dict[str, float | int | None]:
        """Return the figures of this rank so far: see events.Metrics."""
        return self._metrics.snapshot()

    def close(self, *, wait: bool = True) -> None:
        """End the session; with `wait` after the last commit, with the slots removed.

        In a child that was forked from the process of the session it does nothing: the session is its parent's.
        """
        if os.getpid() != self._process:
            return
        self.ended = "is called after close(): make another session, and restore() in it to go on"
        try:
            if self._coordinator is not None:
                self._coordinator.close(wait)
            elif self._node is not None and wait:  # what was claimed is given back, though nothing was saved
                with contextlib.suppress(CheckpointError):
                    self._node.call("bye")
            if self._coordinator is None and self._wish is not None:
                wish, self._wish = self._wish, None
                tell_unmet_request(self._events, wish.until, wait)
        finally:
            self._events.end_training()
            if self._coordinator is not None:
                self._coordinator.saver.close()
            if self._node is not None:
                self._node.close()
            self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the writer goes on by itself with what is filled; nobody waits for it. sys.exit(0) is none.
        self.close(wait=error is None or (isinstance(error, SystemExit) and not error.code))

    # ---- beginnings

    def check_call(self, call: str) -> None:
        """See that a call may be made: by the process that made the session, before its end.

        Args:
            call: Which one, for the message.

        Raises:
            CheckpointError: It may not.
        """
        check_process(self._process, call)
        if self.ended:
            raise CheckpointError(f"{call} {self.ended}")

    def _set_objects(self, objects: dict[str, object], step: int | None = None) -> None:
        """These are saved from here on. `step`: that training goes on from, where it was just restored."""
        warn_of_random_samplers(objects)
        if self._topology.rank == 0 and (dropped := sorted((self._objects or {}).keys() - objects.keys())):
            _log.warning(
                "%s, named by an earlier call, is not saved from here on: name all objects in one call of restore(), "
                "track() or start_over()",
                ", ".join(dropped),
            )
        self._objects = objects
        if self._coordinator is not None:
            # The same one: its saves may not have ended yet, and all ranks go on with the numbers that they have.
            self._coordinator.go_on(self._saver(self._coordinator.node), step)

    def _claimed(self) -> SaveCoordinator:
        """Return the coordinator; the first call of all ranks claims the store and the slots for them.

        Collective then.
        """
        if self._coordinator is not None:
            return self._coordinator
        if self._objects is None:
            raise CheckpointError("nothing is tracked yet: call restore(model=…, optimizer=…) first")
        with self._arrivals.naming_absent("the first step() or save()"):
            node = self._node = self._node or self._claim()
            saver = self._saver(node)
        self._coordinator = SaveCoordinator(
            saver=saver,
            node=node,
            agreement=self._agreement,
            kv_store=self._kv_store,
            trigger=self._trigger,
            attempt=Attempt.parse(node.config.attempt),
            events=self._events,
            metrics=self._metrics,
            policy=self._asked.policy,
            timeout=self._asked.times.timeout,
            commit_timeout=self._asked.times.commit_timeout,
            is_stopped=self._request_file.is_gone,
        )
        self._events.begin_training()
        if self._wish is not None:
            until = self._wish.until
            self._coordinator.request(None if until is None else max(0.0, until - time.monotonic()))
        return self._coordinator

    def _saver(self, node: WriterConnection) -> Saver:
        assert self._objects is not None
        saver = Saver(self._objects, self._topology, self._group, node, self._how)
        saver.note, saver.received = self._asked.watch_metadata(self._note), self._received
        try:
            self._group.run_on_all_ranks(saver.prepare)
        except BaseException:
            saver.close()
            raise
        return saver

    def _note(self, step: int) -> dict[str, Any]:
        return {**(self.metadata(step) if callable(self.metadata) else self.metadata), **self._noted}

    def _claim(self) -> WriterConnection:
        """Take the attempt, this node's writer and its slots for this run. Collective."""
        fenced = self._asked.attempt is None and self._given is not None
        node = claiming.claim_node(
            self.store,
            self._given,
            self._seen,
            self._topology,
            self._group,
            self._directory,
            linger_seconds=self._asked.times.linger,
            keeps_copies=self._keeps_copies,
            learn=self._learn_failures,
            settings={**self._asked.describe_for_writer(), "fence": str(fence.FENCE) if fenced else None},
        )
        self.attempt = Attempt.parse(node.config.attempt)
        replace_earlier_session(self._directory, self, self.store.url)
        return node

    def _learn_failures(self) -> None:
        if self._trigger.auto and self._asked.times.time_between_failures is None:
            with contextlib.suppress(StoreError):  # a store that is away keeps no run from going on by its memory
                self._trigger.between_failures = estimate_mean_time_between_failures(*claiming.read_history(self.store))

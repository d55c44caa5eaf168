"""One rank's part in a save: state, plan, snapshot, and a word to the writer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError, CheckpointRankLost
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.start_mark import pack_mark
from everstep.checkpoint.format.user_metadata import pack_metadata
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.save import planning
from everstep.checkpoint.save.device_staging import choose_staging
from everstep.checkpoint.save.planning import WritePlan
from everstep.checkpoint.save.same_step import check_same_step
from everstep.checkpoint.save.snapshots import Snapshots
from everstep.checkpoint.slots.slot_files import check_is_own, explain_removed
from everstep.checkpoint.slots.slots import PartRecord, Slot, Slots
from everstep.checkpoint.state.flat import Flat, flatten_objects, of_optimizers, predict_optimizer_tensors
from everstep.checkpoint.state.kinds import unwrap_marked
from everstep.checkpoint.state.received import ReceivedLeaves
from everstep.checkpoint.state.staging import Staging
from everstep.checkpoint.state.steps import STEPS, has_hooked_steps
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterConfig, WriterLink, WriterLost
from everstep.coordination.errors import RankLost
from everstep.coordination.group import RankGroup

_log = logging.getLogger("everstep.checkpoint")

ALLOCATION_TIMEOUT = 600.0  # seconds; memory that was never touched comes at some hundred MB each second
COPY_TIMEOUT = 300.0  # seconds for a copy that was begun: far more than any takes that ends
_AGAIN = 10.0  # seconds between two tries to find a lost writer
_NEVER = 0  # as the number of a connection
_SEEN = 1.0  # seconds that a writer may take to see that a rank is gone


class WriterConnection:
    """This rank's connection to its node's writer, made again when the writer is lost."""

    def __init__(self, directory: Path, config: WriterConfig, local: int, linger: float) -> None:
        self.directory = directory
        self.config = config
        self.kept: tuple[int, ...] = ()  # ranks of another node, whose copies are kept here
        self.start = ""  # the mark of this start of the ranks; see format/start_mark.py
        self._local = local
        self._linger = linger
        self._link: WriterLink | None = control.join_writer(directory, config, local, linger)
        self._tried = time.monotonic()
        self.connections = 1  # so many times it was made
        self._begun: dict[Key, int] = {}  # by which of them each save was begun, or was asked for last

    @property
    def port(self) -> int | None:
        """Return the port on which other nodes reach our writer; None without a connection."""
        return None if self._link is None else self._link.port

    @property
    def is_connected(self) -> bool:
        """Tell whether the writer was there when it was last spoken with."""
        return self._link is not None

    def settle(self, config: WriterConfig, kept: tuple[int, ...]) -> None:
        """Tell the writer what is known only after all nodes have met; all ranks of the node do."""
        self.config, self.kept = config, kept
        link = self._found()
        try:
            link.hello(config, self._local)
        except WriterLost:
            self.close()
            self._found()

    def call(self, verb: str, timeout: float = control.ANSWER_TIMEOUT, **fields: Any) -> Any:
        """See WriterLink.call; a writer that was lost before is looked for first."""
        return self.answer(self.tell(verb, **fields), timeout)

    def call_until_heard(self, verb: str, timeout: float = control.ANSWER_TIMEOUT, **fields: Any) -> Any:
        """See WriterLink.call, for what may be said twice: where the writer is lost, a new one is told, once."""
        try:
            return self.call(verb, timeout, **fields)
        except WriterLost:
            return self.call(verb, timeout, **fields)

    def tell(self, verb: str, **fields: Any) -> int:
        """See WriterLink.tell."""
        try:
            return self._found().tell(verb, **fields)
        except WriterLost:
            self.close()
            raise

    def tell_begin(self, key: Key) -> int:
        """Tell the writer that this rank begins a save; the number is for answer(), which says in which slot."""
        number = self.tell("begin", key=str(key))
        self._begun[key] = self.connections
        return number

    def ask_for_ends(self, keys: Iterable[Key]) -> list[dict[str, Any]]:
        """Return how saves have ended that this rank began before its connection was made anew: reports were lost then.

        A save that this rank has not begun is not asked for. No writer need know of it, and the new one would say that
        it was lost with the one before.
        """
        lost = [key for key in keys if self._begun.get(key, self.connections) != self.connections]
        if not lost:
            return []
        found: list[dict[str, Any]] = self.call("ended", keys=[str(key) for key in lost])
        self._begun.update(dict.fromkeys(lost, self.connections))
        return found

    def ask_again(self) -> None:
        """Let the next ask_for_ends() ask for all that was begun, as when a report was received and not read."""
        self._begun = dict.fromkeys(self._begun, _NEVER)

    def forget(self, key: Key) -> None:
        """Forget a save, whose end is known."""
        self._begun.pop(key, None)

    def tell_if_connected(self, verb: str) -> None:
        """Tell the writer, unless it was lost; wait for nothing, and start no other one."""
        if self._link is not None:
            with contextlib.suppress(WriterLost):
                self._link.tell(verb)

    def answer(self, number: int, timeout: float = control.ANSWER_TIMEOUT) -> Any:
        """See WriterLink.answer."""
        if self._link is None:
            raise WriterLost("the writer is gone")
        try:
            return self._link.answer(number, timeout)
        except WriterLost:
            self.close()
            raise

    def reports(self, timeout: float = 0.0) -> list[dict[str, Any]]:
        """Return the writer's reports that have come by now, after waiting at most `timeout` seconds for one.

        Raises:
            WriterLost: Once for each loss; a new writer is started by the next call.
        """
        if self._link is None and time.monotonic() - self._tried < _AGAIN:
            time.sleep(min(timeout, 0.1))
            return []
        try:
            return self._found().reports(timeout)
        except WriterLost:
            self.close()
            raise

    def list_lost_ranks(self) -> list[int]:
        """Return the ranks of this node whose connection to the writer has ended; none where it cannot be asked."""
        with contextlib.suppress(CheckpointError):
            if self._link is not None:  # a new writer would know none
                return [self.config.ranks[local] for local in self.call("lost")]
        return []

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _found(self) -> WriterLink:
        if self._link is None:
            self._tried = time.monotonic()
            self._link = control.join_writer(self.directory, self.config, self._local, self._linger)
            self.connections += 1
        return self._link


@dataclass(frozen=True)
class How:
    """Choices about the bytes of a save."""

    checksum: str
    allow_pickle: bool


def check_values(objects: Mapping[str, object], topology: Topology, how: How) -> Flat:
    """See that all of a state can be saved, before hours were trained, and return it. Claims and plans nothing.

    Raises:
        CheckpointError: A value of this rank has a type that no checkpoint holds.
    """
    return flatten_objects(objects, rank=topology.rank, step=None, allow_pickle=how.allow_pickle)


def check_start(
    objects: Mapping[str, object],
    topology: Topology,
    group: RankGroup,
    how: How,
    directory: Path,
    slots: int,
    received: ReceivedLeaves,
) -> None:
    """See that a state can be saved and that its slots find room here, without claiming anything. Collective.

    Args:
        objects: What is to be saved.
        topology: Where this rank is.
        group: See planning.make_save_plan().
        how: How it is to be saved.
        directory: Where the slots will be, there or not.
        slots: How many there will be.
        received: What of them this rank leaves to rank 0.

    Raises:
        CheckpointError: A value cannot be saved, the ranks' states do not fit together, there is no room
            (InsufficientMemory), or the slots that are there are another user's.
    """
    group.run_on_all_ranks(lambda: check_is_own(directory))
    plan = planning.make_save_plan(lambda: _after_a_step(objects, topology.rank, how, received), topology.rank, group)
    memory = next(folder for folder in (directory, *directory.absolute().parents) if folder.is_dir())
    need = Slots(directory).need([plan.sizes[rank] for rank in topology.ranks], slots)
    available_memory.check_memory(memory, need, slots)


class Saver:
    """Saves the objects it was given, when it is told to. Every method may raise CheckpointError."""

    def __init__(
        self,
        objects: Mapping[str, object],
        topology: Topology,
        group: RankGroup,
        node: WriterConnection,
        how: How,
    ) -> None:
        self._objects = dict(objects)
        self._topology = topology
        self._group = group
        self._node = node
        self._slots = Slots(node.directory)
        self._how = how
        self._plan: WritePlan | None = None
        self._is_agreed = False  # made for a save, so that ranks have compared their states, and none has failed since
        self._bulk: frozenset[str] = frozenset()  # names of what was planned for bytes of arrays, or left out then
        self._layout = ""
        self._staging: Staging | None = None
        self._snapshots: Snapshots | None = None
        self._copying: tuple[Slot, PartRecord] | None = None
        self._begun: tuple[Slot, Flat] | None = None
        self.note: Callable[[int], Mapping[str, Any]] = lambda step: {}  # a user's metadata for a step
        self.received = ReceivedLeaves(group)

    @property
    def bytes(self) -> int:
        """Return how many bytes a save writes, by all ranks."""
        return sum(self._plan.sizes) if self._plan else 0

    @property
    def world(self) -> int:
        return self._topology.world

    def prepare(self) -> None:
        """Plan and reserve memory, so that what cannot be saved is known before hours were trained. Collective."""
        # Not compared: a script may make its replicas equal after this, and before its first step.
        self._make_plan(self._after_a_step, step=None)

    def begin(self, key: Key) -> bool:
        """Begin a save by the plan that is there; whether it still is the plan of this state. take() goes on."""
        assert self._plan is not None
        self._begun = None
        self._finish_earlier()
        # Ranks differed, perhaps, and nobody has compared them since; or what came after the plan has failed.
        if not self._is_agreed or self._snapshots is None:
            return False
        if not (self._snapshots.are_current and self._slots.has_layout(self._layout)):
            _log.warning("the slots in %s were removed by another process: they are made anew", self._slots.directory)
            return False
        begun = self._node.tell_begin(key)  # the writer looks for a slot while we look at our state
        flat = self._flat(key.step).fitted(self._plan.signature, self._bulk, planning.compute_signature)
        self._begun = (self._slots[self._node.answer(begun, ALLOCATION_TIMEOUT)], flat)
        return planning.compute_signature(flat.tensors, flat.elsewhere) == self._plan.signature

    def take(self, key: Key, replan: bool) -> None:
        """Copies the state into a slot. Collective only with `replan`; without it begin() was called before.

        Raises:
            StepsDiffer: On all ranks that plan together: they save different steps. The plan stays as it was.
            CheckpointError: This rank's part cannot be saved.
        """
        if replan or self._plan is None:
            flat = self._make_plan(lambda: self._flat_after_copy(key.step), step=key.step)
            slot = self._slots[self._node.answer(self._node.tell_begin(key), ALLOCATION_TIMEOUT)]
        else:
            assert self._begun is not None
            slot, flat = self._begun
        self._begun = None
        assert self._plan is not None
        assert self._snapshots is not None
        flat = flat.fitted(self._plan.signature, self._bulk, planning.compute_signature)
        self._snapshots.take(slot, key, flat.tensors, is_beside_training=STEPS.are_announced(self._optimizers()))
        record = PartRecord(
            key=key,
            rank=self._topology.rank,
            world=self._topology.world,
            size=self._plan.sizes[self._topology.rank],
            layout=self._layout,
            model=self._plan.model,
            checksum=self._how.checksum,
            values={**flat.values, **self._noted(key.step), **pack_mark(self._node.start)},
        )
        self._copying = (slot, record)
        try:
            self.finish_copy()
        except WriterLost as error:  # a new one finds in the slot what could not be said
            _log.warning("%s is copied, and its writer could not be told: %s", key, error)

    @property
    def copying(self) -> Key | None:
        """Return the save that a GPU still copies; None if there is none.

        For it finish_copy() is to be called again: the writer waits for it.
        """
        return None if self._copying is None else self._copying[1].key

    def finish_copy(self, timeout_seconds: float = 0.0) -> bool:
        """Tell the writer that this rank's part is filled as soon as it is, within this time.

        Returns:
            Whether nothing is being copied any more.

        Raises:
            CheckpointError: It never will be, or the writer cannot be told.
        """
        if self._copying is None:
            return True
        assert self._staging is not None
        if not self._staging.wait_until_copied(timeout_seconds):
            return False
        slot, record = self._copying
        try:
            slot.record(self._topology.local, record)
            self._node.tell("filled", key=str(record.key))
        except Exception as error:
            self._copying = None
            if isinstance(error, FileNotFoundError):
                raise CheckpointError(explain_removed(slot.path)) from error
            raise
        self._copying = None  # only now: where a signal's handler has interrupted us, the next call says it again
        return True

    def drop(self, key: Key, why: str) -> None:
        """Drop this save, which is not to be completed; another one that is being copied is."""
        if self._copying is None or self._copying[1].key == key:
            self._copying = None
            # The slot may be filled anew after this: nothing may still be on its way there, also after half a copy.
            if self._staging is not None and not self._staging.wait_until_copied(COPY_TIMEOUT):
                raise CheckpointError(f"{key}: the GPU's copy has not ended after {COPY_TIMEOUT:g} s")
        self._node.call("void", key=str(key), why=why)

    def wait_for_copy(self) -> None:
        """See Staging.wait_for_copy."""
        if self._staging is not None:
            self._staging.wait_for_copy()

    def close(self) -> None:
        """Give back what this holds of the slots, also where whoever made it is still referred to."""
        if self._staging is not None:
            self._staging.close()
        self._staging = self._snapshots = self._begun = self._copying = None

    def _noted(self, step: int) -> dict[str, object]:
        """Return the metadata on rank 0, whose word is the checkpoint's: what is measured differs from rank to rank."""
        return pack_metadata(self.note(step)) if self._topology.rank == 0 else {}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose state may be copied beside training."""
        every = [unwrap_marked(each) for each in self._objects.values()]
        return [each for each in every if isinstance(each, torch.optim.Optimizer) and has_hooked_steps(each)]

    def _finish_earlier(self) -> None:
        if not self.finish_copy(COPY_TIMEOUT):  # the writer waits for that one, and nobody would announce it any more
            raise CheckpointError(f"the GPU's copy of an earlier step has not ended after {COPY_TIMEOUT:g} s")

    def _flat_after_copy(self, step: int) -> Flat:
        """Flatten the state after earlier copies are finished.

        Where this fails while ranks plan together, the others are told: they wait for this rank there.
        """
        self._finish_earlier()
        return self._flat(step)

    def _flat(self, step: int | None) -> Flat:
        flat = flatten_objects(self._objects, rank=self._topology.rank, step=step, allow_pickle=self._how.allow_pickle)
        return self.received.leave_out(flat)

    def _after_a_step(self) -> Flat:
        return _after_a_step(self._objects, self._topology.rank, self._how, self.received)

    def _make_plan(self, state: Callable[[], Flat], *, step: int | None) -> Flat:
        """`step`: that is saved by it at once; None for a plan alone, for which replicas are not compared."""
        topology = self._topology
        found: list[Flat] = []

        def made() -> Flat:
            found.append(state())
            return found[0]

        # A rank whose state fails tells the others in the planning itself: they are waiting for it there.
        try:
            if step is not None:
                check_same_step(step, self._group)
                self._is_agreed = False
            plan = planning.make_save_plan(made, topology.rank, self._group, compare=step is not None)
            self.received.warn_of_losses(found[0])
        except RankLost as error:
            lost = error.ranks or self._absent()
            raise CheckpointRankLost(lost, "left while ranks planned this save together") from error
        sizes = [[plan.sizes[rank] for rank in ranks] for ranks in (topology.ranks, self._node.kept)]
        if why := self._node.call_until_heard("reserve", ALLOCATION_TIMEOUT, sizes=sizes[0], kept=sizes[1]):
            _log.warning("no copy of another node's slots is kept here: %s", why)
        layout = self._slots.save_layout(plan.boxes)
        steady = of_optimizers(self._objects, rank=topology.rank)
        # Only now: where there is no room for the new plan, all that belongs to the old one stays as it was.
        self.close()
        self._plan, self._layout, self._bulk = plan, layout, found[0].left_out.union(found[0].bulk)
        self._staging = choose_staging(list(found[0].tensors.values()))
        self._snapshots = Snapshots(
            self._slots, plan, topology, self._how.checksum, self._staging, steady, self._node.config.slots
        )
        self._is_agreed = step is not None
        return found[0]

    def _absent(self) -> list[int]:
        """Return the ranks of this node that their writer sees no more; none when it was one of another node."""
        ranks, until = self._topology.ranks, time.monotonic() + _SEEN
        with contextlib.suppress(CheckpointError):  # who has left is only a better message
            while time.monotonic() < until:
                here = self._node.call("ranks")
                if len(here) < len(ranks):
                    return [rank for local, rank in enumerate(ranks) if local not in here]
                time.sleep(0.01)
        return []


def _after_a_step(objects: Mapping[str, object], rank: int, how: How, received: ReceivedLeaves) -> Flat:
    flat = flatten_objects(objects, rank=rank, step=None, allow_pickle=how.allow_pickle)
    tensors = flat.tensors | predict_optimizer_tensors(objects, rank=rank)
    return received.leave_out(Flat(tensors, flat.values, flat.bulk, flat.elsewhere, shards=flat.shards))

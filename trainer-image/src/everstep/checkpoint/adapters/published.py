"""Folders that a framework writes, in a store: published whole, and back on every node as all ranks agree."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from everstep.checkpoint.adapters.background import BackgroundPublisher, HeldFolder, clear_leftovers
from everstep.checkpoint.catalog.candidates import list_candidates, read_index, read_manifest
from everstep.checkpoint.catalog.needed_checkpoints import read_needs
from everstep.checkpoint.catalog.selection import NoSuchStep
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints, verify_and_mark
from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, Removed, StoreError, WriterConflict, is_damage
from everstep.checkpoint.events import Callback, CheckpointEvent, Events
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.publish import fence, folder
from everstep.checkpoint.publish.folder import NoFolder
from everstep.checkpoint.publish.publication import claim_attempt, may_not_publish
from everstep.checkpoint.ranks import topology
from everstep.checkpoint.ranks.host_group import open_host_group
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint
from everstep.checkpoint.retention import retention
from everstep.checkpoint.save.outcomes import SaveFailed
from everstep.checkpoint.session.arguments import check_argument
from everstep.checkpoint.session.job_arguments import fill_arguments
from everstep.checkpoint.store.base import Store, open_store
from everstep.coordination.group import RankGroup

_log = logging.getLogger("everstep.checkpoint")

_STALE = 60.0  # seconds that a network mount may go on showing an old list of files
_AGAIN = 0.2
_INTERRUPTED_SECONDS = 60.0  # that a restore waits for the last save of a training before it, as the end of a process
_COLLECTIVE_SECONDS = 1800.0  # as torch's own groups

T = TypeVar("T")

_of_process: WeakSet[Published] = WeakSet()


@dataclass
class _Training:
    """The saves between two restores or ends: steps that come one after the other, under one attempt."""

    attempt: Attempt | None = None
    submitted: int = -1
    saved: int = -1
    keys: dict[int, Key] = field(default_factory=dict)  # what this training saved, or went on from, by step


class Published:
    """A store of folders, for a run of any number of ranks; `store` and `keep_last` as in everstep.checkpointer."""

    def __init__(
        self,
        store: str | os.PathLike[str] | None,
        *,
        keep_last: int | None = None,
        finish_timeout: float = 600.0,
        events: Events | None = None,
    ) -> None:
        """`finish_timeout`: seconds that the end of training waits at most for what is still being stored. `events`:
        with callbacks that are registered already."""
        asked = fill_arguments({"store": store, "keep_last": keep_last})
        self._place: str | os.PathLike[str] = asked["store"]
        self.store: Store = open_store(self._place)
        self._keep_last: int = check_argument("keep_last", asked["keep_last"])
        self._finish_timeout = finish_timeout
        self._training = _Training()
        self._is_claimed = False  # of a run that was given its attempt
        self._group: RankGroup | None = None
        self._events = Events() if events is None else events
        self._background = BackgroundPublisher(self._events.emit)
        _of_process.add(self)

    def __reduce__(self) -> Any:
        """Return how a copy is made: of the same store, with the same callbacks, for a training of its own.

        Frameworks copy what they are given for another process (Lightning's ddp_spawn), or for their own records
        (LightningCLI). What is being stored here stays here.
        """
        return _make_published, (self._place, self._keep_last, self._finish_timeout, self._events)

    def on(self, event: str, callback: Callback) -> None:
        """Call back with each event of this name; `saved`, `failed` and `skipped` come from another thread."""
        self._events.on(event, callback)

    def hear_first(self, said: T) -> T:
        """Return what rank 0 says. All ranks call it."""
        return self._all().broadcast(said)

    def see(self, path: Path, *, own: str) -> None:
        """Wait until rank 0 sees every file that the ranks have written to `path`, before it publishes them.

        All ranks call it. The first time it sees, too, that the store is this job's.

        Args:
            path: The folder that all ranks have written to.
            own: A pattern for names of files that rank 0 need not see.

        Raises:
            CheckpointError: On all ranks, when rank 0 does not see other files in time, or another job or a later
                attempt has the store.
        """
        group = self._all()
        group.run_on_first_rank(self._claim)
        group.gather(None)  # all have written
        mine = {name for name in _list_files(path) if not fnmatch(name, own)}
        until = time.monotonic() + _STALE
        while True:
            seen = group.broadcast(_list_files(path))
            unseen = group.gather(min(mine - seen, default=None))
            if not any(unseen):
                return
            if group.broadcast(time.monotonic() >= until):
                rank, name = next((rank, name) for rank, name in enumerate(unseen) if name)
                raise CheckpointError(
                    f"rank {rank} has written {path / name}, which rank 0 does not see: where each rank saves its own "
                    "share of the state, all nodes must save to a folder that they share"
                )
            time.sleep(_AGAIN)

    def publish(self, path: Path, step: int, *, needed: tuple[Path, int] | None = None) -> None:
        """Have the folder committed as this step's checkpoint, beside training. One rank calls it.

        The folders may be deleted when this returns. One that is written into before it is stored is not stored: see
        begin_training(). A failure is an event and ends no training: see finish(). A step that is reached again,
        after a restore or by a training that begins anew, is saved as a later attempt, where nobody gave this run its
        attempt; else that is an error.

        Args:
            path: The folder to publish.
            step: Its step.
            needed: Another folder and its step, without which this one is worth nothing. It is stored before this one,
                if it is not in the store yet, and stays there as long as this one.

        Raises:
            StoreTaken, Superseded, AttemptTaken: At the first folder: this run is not to save in the store.
        """
        self._claim()
        self._events.tell_saved_step(step)
        if step < self._training.submitted:
            self._training = _Training()
        self._training.submitted = step
        other, needed_step = needed or (None, None)
        if other is not None and not other.is_dir():
            other = None
        try:
            publish = partial(self._publish, self._training, needed_step=needed_step)
            # What was stored already may be gone from here.
            known = needed_step in self._training.keys
            self._background.submit(path, step, publish, None if known else other)
        except CheckpointError as error:
            self._events.emit(CheckpointEvent("failed", details={"step": step}, why=str(error)))

    def _claim(self) -> None:
        """Claim the store for a run that was given its attempt, before anything is handed over.

        All that it saved would be lost, or would take the place of another job's.
        """
        if self._is_claimed or fence.get_given_attempt() is None:
            return
        try:
            claim_attempt(self.store)
            self._is_claimed = True
        except StoreError as error:  # ends no training: nothing is stored before it is claimed
            _log.warning("whose store it is is not known yet: %s", error)

    def begin_training(self) -> None:
        """Note that a training begins: what it saves is its own, whatever steps one before it has saved that ended with
        an error, and what the framework writes leaves alone what is still to be stored. One rank calls it.
        """
        if self._training.submitted >= 0:  # else it goes on from what newest() has brought back
            self._training = _Training()
        try:
            self._background.part_from_owners()
        except CheckpointError as error:
            _log.warning("%s", error)

    def change(self, path: Path, work: Callable[[], None]) -> None:
        """Have one rank of each node change a folder that newest() has brought back. All ranks call it."""
        group = self._all()
        group.run_on_all_ranks(work if self._is_first(path, group) else lambda: None)

    def finish(self) -> None:
        """Wait, at the end of training, until what was published is in the store, and end the group. Any rank calls it.

        Raises:
            SaveFailed: The last folder did not get there in time. It is only a warning while another error is raised.
        """
        underway = sys.exc_info()[1]
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._training = _Training()
        try:
            self._background.finish(self._finish_timeout)
        except SaveFailed as error:
            if underway is None:
                raise
            _log.warning("%s", error)

    def newest(
        self, into: Callable[[Key], Path], *, needed_step: Callable[[Path], int | None] = lambda path: None
    ) -> Path | None:
        """Return the newest folder that is good for all ranks, on every node at `into(its key)`. All ranks call it.

        Args:
            into: Returns the path for the folder of a key.
            needed_step: Returns the step of another folder without which the one at a path is worth nothing, or None.
                The other folder is brought back too; where it cannot be, the first one is not good.

        Returns:
            The path of the folder; None when none was ever published.

        Raises:
            NoGoodCheckpoint: Some were published and none is good.
        """
        group = self._all()
        group.run_on_first_rank(self._await_saves)
        bad: dict[str, str] = {}
        while True:
            key = group.run_on_first_rank(lambda: _find_next(self.store, bad))
            if key is None:
                if bad:
                    raise NoGoodCheckpoint(bad)
                return None
            why = self._fetch_on_all_nodes(key, into(key), group)
            keys = {key.step: key}
            if not why:
                step = group.run_on_first_rank(partial(needed_step, into(key)))
                if step is not None and step != key.step:
                    why = self._fetch_needed(key, step, into, keys, group)
            if not why:
                self._training = _Training(keys=keys)
                self._events.emit(CheckpointEvent("restored", key))
                return into(key)
            self._events.emit(CheckpointEvent("fell_back", key, why))
            bad[str(key)] = why

    def _await_saves(self) -> None:
        """Wait for what is still being stored of a training in this process, as one that was interrupted in a notebook
        and is begun again: its last save is to be gone on from."""
        until = time.monotonic() + _INTERRUPTED_SECONDS
        for each in [each for each in _of_process if each.store.url == self.store.url]:
            if not each._background.wait(max(0.0, until - time.monotonic())):
                _log.warning("the last save of the training before is still being stored, and is not waited for")

    def _fetch_needed(
        self,
        key: Key,
        step: int,
        into: Callable[[Key], Path],
        keys: dict[int, Key],
        group: RankGroup,
    ) -> str:
        """Bring back what a checkpoint needs, and note its key; why that cannot be done, or ""."""
        found = group.run_on_first_rank(lambda: _find_needed(self.store, key, step))
        why = ""
        for other in found:
            why = self._fetch_on_all_nodes(other, into(other), group)
            if not why:
                keys[step] = other
                return ""
        return (
            f"it cannot be gone on from without step {step}, the best one, which "
            f"{f'is not good: {why}' if why else f'is not in {self.store.url}'}"
        )

    def _fetch_on_all_nodes(self, key: Key, into: Path, group: RankGroup) -> str:
        """Bring a folder to every place that ranks name, by one rank of each node; why it is bad, or ""."""
        return _collect_failures(
            partial(self._fetch, key, into) if self._is_first(into, group) else lambda: None, group
        )

    def _is_first(self, path: Path, group: RankGroup) -> bool:
        """Tell whether this is the first rank of its node that names this place. Collective."""
        place = topology.find_topology(group)
        mine = place.node, os.path.realpath(path)
        return group.gather(mine).index(mine) == place.rank

    def _publish(
        self, training: _Training, held: HeldFolder, step: int, needed: HeldFolder | None, *, needed_step: int | None
    ) -> None:
        """Publish the folder, in the thread beside training."""
        if needed is not None and needed_step is not None and needed_step not in training.keys:
            # Of a training before this one, or given way to a later one.
            same = _find_same(self.store, needed.contents, needed_step)
            if same is None:
                self._publish_one(training, needed, needed_step)
            else:
                training.keys[needed_step] = same
        needs = () if needed_step is None or needed_step not in training.keys else (training.keys[needed_step],)
        self._publish_one(training, held, step, needs)

    def _publish_one(self, training: _Training, held: HeldFolder, step: int, needs: tuple[Key, ...] = ()) -> None:
        began = time.monotonic()
        manifest = self._save(training, held, step, needs)
        if manifest is None:
            return
        training.saved = step
        training.keys[step] = manifest.key
        size = sum(part.size for part in manifest.parts)
        details = {"bytes": size, "seconds": round(time.monotonic() - began, 3)}
        self._events.emit(CheckpointEvent("saved", manifest.key, details=details))
        try:
            verify_and_mark(self.store, manifest.key)
            retention.prune_verified(VerifiedCheckpoints(self.store), keep_last=self._keep_last)
        except CheckpointError as error:  # the next one that is published removes the old ones too
            _log.warning("older checkpoints were not removed: %s", error)

    def _save(self, training: _Training, held: HeldFolder, step: int, needs: tuple[Key, ...]) -> Manifest | None:
        """Commit the folder; its manifest, or None where this training has saved the step already."""
        given = fence.get_given_attempt()
        while True:
            if training.attempt is None:
                training.attempt = claim_attempt(self.store)
            key = Key(training.attempt, step)
            try:
                fenced = partial(may_not_publish, self.store, key)
                return folder.save_folder(
                    self.store, key, held.path, contents=held.contents, needs=needs, fenced=fenced
                )
            except folder.Changed as error:
                raise CheckpointError(
                    f"{held.owned} was written into before it was stored, and is no longer what it was"
                ) from error
            except WriterConflict as error:
                committed = read_manifest(self.store, key)
                if folder.holds_contents(committed, held.contents):
                    return committed  # by a try of ours whose answer was lost
                if step == training.saved:
                    why = "this training has saved the step before; what it saves of it again is not published"
                    self._events.emit(CheckpointEvent("skipped", key, why, {"step": step}))
                    return None
                if given is not None:
                    raise CheckpointError(
                        f"{error}, with other content: this run was given attempt {given}, and has reached the step "
                        "again. Start the job anew, which gives it a later attempt, or give this training a store of "
                        "its own"
                    ) from error
                training.attempt = None

    def _all(self) -> RankGroup:
        """Return the group of all ranks. Collective."""
        if self._group is None:
            self._group = open_host_group(_COLLECTIVE_SECONDS, "a save or restore of a folder")
        return self._group

    def _fetch(self, key: Key, into: Path) -> str | None:
        try:
            clear_leftovers(into.parent)
            folder.restore_folder(self.store, into, step=key, replace=True)
        except (NoFolder, NoSuchStep, Removed) as error:
            return str(error)
        except CheckpointError as error:
            if not is_damage(error):
                raise
            return str(error)
        return None


def _make_published(place: str | os.PathLike[str], keep_last: int, finish_timeout: float, events: Events) -> Published:
    return Published(place, keep_last=keep_last, finish_timeout=finish_timeout, events=events)


def _list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _find_next(store: Store, bad: dict[str, str]) -> Key | None:
    return next((key for key in list_candidates(store) if str(key) not in bad), None)


def _find_needed(store: Store, key: Key, step: int) -> list[Key]:
    """Return the checkpoints that one may need, later ones first.

    That is the checkpoint of the step that it says it needs; of one that does not say, all that may be.
    """
    found = [other for other in list_candidates(store) if other.step == step and other.attempt <= key.attempt]
    named: list[Key] = []
    with suppress(Missing, Damaged):
        named = [other for other in read_needs(read_index(store, key).values) if other.step == step]
    return [other for other in found if other in named] if named else found


def _find_same(store: Store, contents: folder.Contents, step: int) -> Key | None:
    """Return the checkpoint of this step that has exactly these contents, if there is one."""
    for key in list_candidates(store):
        if key.step == step:
            with suppress(Missing, Damaged):
                if folder.holds_contents(read_manifest(store, key), contents):
                    return key
    return None


def _collect_failures(work: Callable[[], str | None], group: RankGroup) -> str:
    """Return why it was bad, in the words of the first rank for which it was; "" when it was good for all."""
    said = group.gather(group.run_on_all_ranks(work))
    return next((f"rank {rank}: {why}" for rank, why in enumerate(said) if why), "")

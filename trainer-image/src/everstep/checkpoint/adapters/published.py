"""Folders that a framework writes, in a store: published whole, and back on every node as all ranks agree."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch.distributed as dist

from everstep.checkpoint import attempts, fence, folder, retention, topology
from everstep.checkpoint.adapters.background import BackgroundPublisher, clear_leftovers
from everstep.checkpoint.candidates import candidates, read_manifest
from everstep.checkpoint.collectives import gather, tell
from everstep.checkpoint.errors import CheckpointError, Conflict, Removed, is_damage
from everstep.checkpoint.events import Callback, Event, Events
from everstep.checkpoint.folder import NoFolder
from everstep.checkpoint.format import Manifest
from everstep.checkpoint.host_group import close_host_group, open_host_group
from everstep.checkpoint.keys import Attempt, Key
from everstep.checkpoint.outcomes import SaveFailed
from everstep.checkpoint.publication import may_not_publish
from everstep.checkpoint.restore import NoGoodCheckpoint
from everstep.checkpoint.selection import NoSuchStep
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.together import together
from everstep.checkpoint.verification import VerifiedCheckpoints, verify_and_mark

_log = logging.getLogger("everstep.checkpoint")

_STALE = 60.0  # seconds that a network mount may go on showing an old list of files
_AGAIN = 0.2
_COLLECTIVE_SECONDS = 1800.0  # as torch's own groups


@dataclass
class _Training:
    """The saves between two restores or ends: steps that come one after the other, under one attempt."""

    attempt: Attempt | None = None
    submitted: int = -1
    saved: int = -1


class Published:
    """A store of folders, for a run of any number of ranks; `keep_last` as in everstep.checkpointer."""

    def __init__(self, store: str | os.PathLike[str], *, keep_last: int = 3, finish_timeout: float = 600.0) -> None:
        """`finish_timeout`: seconds that the end of training waits at most for what is still being stored."""
        self.store: Store = open_store(store)
        self._keep_last = keep_last
        self._finish_timeout = finish_timeout
        self._training = _Training()
        self._group: dist.ProcessGroup | None = None
        self._events = Events()
        self._background = BackgroundPublisher(self._events.emit)

    def on(self, event: str, callback: Callback) -> None:
        """Call back with each event of this name; `saved`, `failed` and `skipped` come from another thread."""
        self._events.on(event, callback)

    def see(self, path: Path, *, own: str) -> None:
        """By all ranks, before rank 0 publishes what they have written to `path`: it must see all of their files.

        `own`: a pattern for names of files that may be missing. CheckpointError, on all ranks, when others are.
        """
        group = self._all()
        gather(None, group)  # all have written
        mine = {name for name in _files(path) if not fnmatch(name, own)}
        until = time.monotonic() + _STALE
        while True:
            seen = tell(_files(path), group)
            unseen = gather(min(mine - seen, default=None), group)
            if not any(unseen):
                return
            if tell(time.monotonic() >= until, group):
                rank, name = next((rank, name) for rank, name in enumerate(unseen) if name)
                raise CheckpointError(
                    f"rank {rank} has written {path / name}, which rank 0 does not see: where each rank saves its own "
                    "share of the state, all nodes must save to a folder that they share"
                )
            time.sleep(_AGAIN)

    def publish(self, path: Path, step: int) -> None:
        """By one rank: have the folder committed as this step's checkpoint, beside training.

        The folder may be deleted when this returns, but not written into. What fails is an event and ends no training:
        see finish(). A step that is reached again, after a restore or by a training that begins anew, is saved as a
        later attempt, where nobody gave this run its attempt; else that is an error.
        """
        if step < self._training.submitted:
            self._training = _Training()
        self._training.submitted = step
        try:
            self._background.submit(path, step, partial(self._publish, self._training))
        except CheckpointError as error:
            self._events.emit(Event("failed", details={"step": step}, why=str(error)))

    def finish(self) -> None:
        """By any rank, at the end of training: wait until what was published is in the store, and end the group.

        SaveFailed when the last folder did not get there in time; only a warning while another error is on its way.
        """
        underway = sys.exc_info()[1]
        group, self._group = self._group, None
        close_host_group(group)
        self._training = _Training()
        try:
            self._background.finish(self._finish_timeout)
        except SaveFailed as error:
            if underway is None:
                raise
            _log.warning("%s", error)

    def newest(self, into: Callable[[Key], Path]) -> Path | None:
        """By all ranks: the newest folder that is good for all of them, on every node at `into(its key)`.

        None when none was ever published; NoGoodCheckpoint when some were and none is good.
        """
        group = self._all()
        place = topology.find(group)
        bad: dict[str, str] = {}
        while True:
            key = _told(lambda: _next(self.store, bad), place.rank, group)
            if key is None:
                if bad:
                    raise NoGoodCheckpoint(bad)
                return None
            why = _failures(partial(self._fetch, key, into(key)) if place.local == 0 else lambda: None, group)
            if not why:
                self._training = _Training()
                self._events.emit(Event("restored", key))
                return into(key)
            self._events.emit(Event("fell_back", key, why))
            bad[str(key)] = why

    def _publish(self, training: _Training, path: Path, step: int) -> None:
        """In the thread beside training."""
        began = time.monotonic()
        manifest = self._save(training, path, step)
        if manifest is None:
            return
        training.saved = step
        size = sum(part.size for part in manifest.parts)
        details = {"bytes": size, "seconds": round(time.monotonic() - began, 3)}
        self._events.emit(Event("saved", manifest.key, details=details))
        try:
            verify_and_mark(self.store, manifest.key)
            retention.prune_verified(VerifiedCheckpoints(self.store), keep_last=self._keep_last)
        except CheckpointError as error:  # the next one that is published removes the old ones too
            _log.warning("older checkpoints were not removed: %s", error)

    def _save(self, training: _Training, path: Path, step: int) -> Manifest | None:
        """Commit the folder; its manifest, or None where this training has saved the step already."""
        given = fence.given()
        while True:
            if training.attempt is None:
                training.attempt = given or attempts.claim(self.store)
            key = Key(training.attempt, step)
            try:
                return folder.save(self.store, key, path, fenced=partial(may_not_publish, self.store, key))
            except Conflict as error:
                committed = read_manifest(self.store, key)
                if folder.holds(committed, folder.Contents.of(path)):
                    return committed  # by a try of ours whose answer was lost
                if step == training.saved:
                    why = "this training has saved the step before; what it saves of it again is not published"
                    self._events.emit(Event("skipped", key, why, {"step": step}))
                    return None
                if given is not None:
                    raise CheckpointError(
                        f"{error}, with other content: this run was given attempt {given}, and has reached the step "
                        "again. Start the job anew, which gives it a later attempt, or give this training a store of "
                        "its own"
                    ) from error
                training.attempt = None

    def _all(self) -> dist.ProcessGroup | None:
        """All ranks, on the CPU; None for one process. Collective."""
        if self._group is None:
            self._group = open_host_group(_COLLECTIVE_SECONDS)
        return self._group

    def _fetch(self, key: Key, into: Path) -> str | None:
        try:
            clear_leftovers(into.parent)
            folder.restore(self.store, into, step=key, replace=True)
        except (NoFolder, NoSuchStep, Removed) as error:
            return str(error)
        except CheckpointError as error:
            if not is_damage(error):
                raise
            return str(error)
        return None


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _next(store: Store, bad: dict[str, str]) -> Key | None:
    return next((key for key in candidates(store) if str(key) not in bad), None)


def _told(find: Callable[[], Key | None], rank: int, group: dist.ProcessGroup | None) -> Key | None:
    """What rank 0 found, on all ranks."""
    return tell(together(lambda: find() if rank == 0 else None, group), group)


def _failures(work: Callable[[], str | None], group: dist.ProcessGroup | None) -> str:
    """Why it was bad, in the words of the first rank for which it was; "" when it was good for all."""
    said = gather(together(work, group), group)
    return next((f"rank {rank}: {why}" for rank, why in enumerate(said) if why), "")

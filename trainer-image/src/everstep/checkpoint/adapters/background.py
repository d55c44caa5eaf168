"""Publishing beside training: folders are stored by a thread of their own, one at a time, and at most one waits.

A folder that is handed over is linked under a name of ours first, so that its owner may delete it. Before its owner
writes into its files again, it gets copies of them in their place (`part_from_owners`). Nothing is lost by a kill in
the middle but the publication itself: what the store holds stays, and a folder counts when all of it is there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.host import unfinished
from everstep.checkpoint.publish.folder import Contents
from everstep.checkpoint.save.outcomes import SaveFailed

_log = logging.getLogger("everstep.checkpoint")

_AT_EXIT_SECONDS = 60.0  # of a process that ends without finish(): its training failed
_RETRY_SECONDS = (1.0, 60.0)  # before the second try, and at most


@dataclass(frozen=True)
class HeldFolder:
    """A folder of ours at `path`, with links to the files in `owned`, and its `contents` when it was handed over."""

    path: Path
    owned: Path
    contents: Contents


Publish = Callable[[HeldFolder, int, HeldFolder | None], None]


@dataclass
class _Publication:
    """A folder of ours that `publish` is to store as `step`, with another that it needs; `held` removes them."""

    folder: HeldFolder
    step: int
    needed: HeldFolder | None
    publish: Publish
    held: ExitStack


class BackgroundPublisher:
    """Publishes folders in a thread beside training."""

    def __init__(self, emit: Callable[[CheckpointEvent], None]) -> None:
        """`emit`: told about what fails or is skipped; called from the thread."""
        self._emit = emit
        self._changed = threading.Condition()
        self._waiting: _Publication | None = None
        self._current: _Publication | None = None
        self._works = False  # a thread is there while something is to be published
        self._registered: int | None = None  # the process whose exit waits for what is being stored
        self._ends_at: float | None = None  # no try is begun after it
        self._failure = ""  # why the last folder is not in the store
        self._refused = ""  # why the last one that was handed over could not be held

    def submit(self, path: Path, step: int, publish: Publish, needed: Path | None = None) -> None:
        """Have a complete folder published; returns at once. One that waits already gives way to this one.

        Args:
            path: May be deleted by its owner from now on. What is written into it is not stored: see part_from_owners.
            step: Number of trained steps that it holds.
            publish: Stores it, in the thread, given a folder, the step and `needed`. Its CheckpointError is told as
                the event `failed`, and it is tried again where that may pass, until a newer folder waits.
            needed: Another folder, as `path`.

        Raises:
            CheckpointError: The folder cannot be linked or copied to a place beside it.
        """
        try:
            with ExitStack() as stack:
                ours = _hold_files(path, stack)
                publication = _Publication(
                    ours, step, None if needed is None else _hold_files(needed, stack), publish, stack.pop_all()
                )
        except CheckpointError as error:
            self._refused = f"step {step} was not published: {error}"
            raise
        self._refused = ""
        with self._changed:
            replaced, self._waiting = self._waiting, publication
            self._ends_at = None
            if not self._works:
                self._works = True
                threading.Thread(target=self._work, name="everstep-publish", daemon=True).start()
            if self._registered != os.getpid():
                self._registered = os.getpid()
                _call_at_exit(self._end_of_process)
            self._changed.notify_all()
        if replaced is not None:
            replaced.held.close()
            why = "an earlier step is still being stored, and a later one waits"
            self._emit(CheckpointEvent("skipped", details={"step": replaced.step}, why=why))

    def part_from_owners(self) -> None:
        """Have what owners write into their folders from now on leave alone what is still to be stored of them.

        Raises:
            CheckpointError: A file cannot be copied.
        """
        with self._changed:
            publications = [each for each in (self._current, self._waiting) if each is not None]
        for each in publications:
            for held in (each.folder, each.needed):
                if held is not None:
                    _part_files(held)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until nothing is being stored; return whether that is so. In a child that was forked, nothing is."""
        if self._registered not in (None, os.getpid()):
            return True
        with self._changed:
            return self._changed.wait_for(lambda: not self._works, timeout_seconds)

    def finish(self, timeout_seconds: float) -> None:
        """Wait until all that was submitted is in the store; in a child that was forked meanwhile, for nothing.

        Args:
            timeout_seconds: What is not there by then is given up.

        Raises:
            SaveFailed: The last folder is not in the store.
        """
        # A child (a loader's worker) has no thread that stores, and maybe a lock for ever.
        if self._registered not in (None, os.getpid()) and not self._refused:
            return
        until = time.monotonic() + timeout_seconds
        with self._changed:
            self._ends_at = until
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._works, timeout_seconds)
            failure, self._failure, self._refused = self._refused or self._failure, "", ""
            last = self._waiting or self._current
        if failure:
            raise SaveFailed(f"{failure}. Earlier checkpoints are as they were")
        if last is not None:
            raise SaveFailed(
                f"step {last.step} is not in the store {timeout_seconds:g} s after training: it is still being stored. "
                "Earlier checkpoints are as they were; give more time by finish_timeout="
            )

    def _end_of_process(self) -> None:
        try:
            self.finish(_AT_EXIT_SECONDS)
        except SaveFailed as error:
            _log.warning("%s", error)

    def _work(self) -> None:
        while True:
            with self._changed:
                publication, self._waiting = self._waiting, None
                self._current, self._works = publication, publication is not None
                self._changed.notify_all()
            if publication is None:
                return
            with publication.held:
                self._store(publication)

    def _store(self, publication: _Publication) -> None:
        """Publish it; try again until it is in the store, or nothing would come of another try."""
        pause, longest = _RETRY_SECONDS
        tries = 0
        while True:
            failure, passes = "", False
            try:
                publication.publish(publication.folder, publication.step, publication.needed)
            except Exception as error:  # whatever it is, training goes on, and its end is told
                failure = f"step {publication.step} was not published: {error}"
                passes = isinstance(error, StoreError) and error.may_pass
                if not isinstance(error, CheckpointError):
                    _log.exception("step %s was not published", publication.step)
                if not tries:
                    self._emit(CheckpointEvent("failed", details={"step": publication.step}, why=failure))
            tries += 1
            with self._changed:
                self._failure = failure
                if failure and passes:
                    self._changed.wait_for(lambda: self._waiting is not None, min(pause, self._left()))
                if not passes or self._waiting is not None or self._left() <= 0:
                    return
            pause = min(2 * pause, longest)

    def _left(self) -> float:
        return threading.TIMEOUT_MAX if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())


def _hold_files(path: Path, held: ExitStack) -> HeldFolder:
    """Link the files under a name of ours beside the folder; that stays until `held` is closed."""
    try:
        contents = Contents.of(path)
        place = held.enter_context(unfinished.make_unfinished_folder(path.with_name("outgoing")))
        ours = place / path.name
        ours.mkdir()
        for empty in contents.empty:
            (ours / empty).mkdir(parents=True, exist_ok=True)
        for file in contents.files:
            (ours / file.path).parent.mkdir(parents=True, exist_ok=True)
            _link_file(path / file.path, ours / file.path)
        return HeldFolder(ours, path, Contents.of(ours))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be kept for its publication: {error}") from error


def _link_file(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)  # of a link, what it leads to
    except OSError:  # no links here, or not of this file
        shutil.copy2(source, target)


def _part_files(held: HeldFolder) -> None:
    """Put copies in the place of the files that the owner's folder and ours both have."""
    for file in held.contents.files:
        theirs = (held.owned / file.path).resolve()
        draft = theirs.with_name(f".everstep-{secrets.token_hex(4)}")
        try:
            # Gone, another one's already, or stored meanwhile: there is nothing to part.
            with contextlib.suppress(FileNotFoundError):
                if theirs.samefile(held.path / file.path):
                    shutil.copy2(theirs, draft)
                    draft.replace(theirs)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise CheckpointError(f"{theirs} is still being stored, and cannot be copied: {error}") from error


def _call_at_exit(callback: Callable[[], None]) -> None:
    # atexit comes after the pools of threads are closed, by which a large file is stored and verified.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the process is ending already
            register(callback)
    else:
        atexit.register(callback)


def clear_leftovers(folder: Path) -> None:
    """Remove what publications of processes that were killed have left in `folder`."""
    with contextlib.suppress(OSError):
        unfinished.clear_unfinished(folder / "outgoing")

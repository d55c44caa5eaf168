"""Watches a folder that another program writes its checkpoints to, and publishes each of them when it is complete.

Complete is what has its marker file, or what nobody has changed for a while. What changes while it is read is not
committed and waits for its turn again; so a checkpoint is always one state of the folder.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from everstep.checkpoint.catalog.candidates import each_candidate, list_candidates, read_manifest
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints, verify_and_mark
from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, StoreError, WriterConflict
from everstep.checkpoint.events import Callback, CheckpointEvent
from everstep.checkpoint.format.keys import MOST_DIGITS, Attempt, Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.publish import folder
from everstep.checkpoint.publish.folder import Changed, Contents
from everstep.checkpoint.publish.publication import claim_attempt, may_not_publish
from everstep.checkpoint.retention import retention
from everstep.checkpoint.store.base import Store

_STEP = re.compile(r"(\d+)$", re.ASCII)


def step_of(path: Path) -> int | None:
    """Return the number at the end of a folder's name: 500 of `checkpoint-500`.

    Raises:
        CheckpointError: It is larger than a step may be.
    """
    found = _STEP.search(path.name)
    if found and len(found[1].lstrip("0")) > MOST_DIGITS:
        raise CheckpointError(
            f"{path} ends with a number of more than {MOST_DIGITS} digits, which is no step: rename it, or publish it "
            "alone with --step"
        )
    return int(found[1]) if found else None


@dataclass
class Publisher:
    """Publishes `watched`, or with `each` (a pattern as `checkpoint-*`) every folder in it that matches.

    `marker`: a file in a folder that is written last, anew for each checkpoint, and best removed before anything else
    is written; without it a folder is complete after `quiet` seconds without a change. `keep_last`: older ones are
    removed once a new one is verified; None: never. `end_outage`: seconds for which a store that is unavailable at the
    end is waited for.
    Events: `saved`; `failed`, with a key where it is not tried again; `skipped`: it lay there when this began, and is
    too old, or is not complete when this ends; `untidy`: it is published, but could not be verified, or older ones not
    be removed.
    """

    store: Store
    watched: Path
    marker: str | None = None
    quiet: float = 5.0
    each: str | None = None
    keep_last: int | None = None
    tell: Callback = lambda event: None
    clock: Callable[[], float] = time.monotonic
    end_outage: float = 100.0
    _attempt: Attempt | None = None
    _waiting: bool = False  # something is there that is not published
    _unavailable: bool = False  # because the store is
    _newest: int = -1
    _published: dict[Path, Contents] = field(default_factory=dict)
    _seen: dict[Path, tuple[Contents, float]] = field(default_factory=dict)
    _told: Contents | None = None  # of which it was said that its marker is too old

    def __post_init__(self) -> None:
        newest = _newest_good(self.store)
        if newest is not None:
            self._newest = newest.key.step
        for path in self._folders():
            with suppress(FileNotFoundError):
                contents = Contents.of(path)
                if newest is not None and self._is_known(path, contents, newest):
                    self._published[path] = contents

    def _is_known(self, path: Path, contents: Contents, newest: Manifest) -> bool:
        """Tell whether a folder that was there before this publisher is published, or is not to be any more.

        What is older than what was published last, and of no greater step, would become the newest by being published
        now. It may have been published and removed since; where it is not in the store, that is told.
        """
        if self.each is None:
            return folder.holds_contents(newest, contents)
        step = step_of(path) or 0
        committed = (_read_manifest_if_any(self.store, key) for key in list_candidates(self.store) if key.step == step)
        if any(folder.holds_contents(each, contents) for each in committed):
            return True
        if step > newest.key.step or contents.changed > folder.get_changed_time(newest):
            return False
        if contents.files:
            why = f"{path} is older than {newest.key}, the newest checkpoint in the store, and would take its place"
            self.tell(CheckpointEvent("skipped", why=why))
        return True

    def run(self, stop: threading.Event, every: float = 1.0) -> None:
        """Look `every` so many seconds until `stop` is set; then publish what is complete or becomes so in time."""
        while not stop.wait(every):
            self.poll()
        self.poll()
        # What is in a pod's own folder, as the end of a training, is nowhere else. On a busy machine a look may take
        # longer than the folder has to be quiet: there is one more after that time, whenever it comes.
        looked, is_last = self.clock(), False
        while self._waiting and not is_last:
            is_last = self.clock() >= looked + self.quiet + every + (self.end_outage if self._unavailable else 0.0)
            time.sleep(every if self._unavailable else min(every, self.quiet))
            self.poll()
        if self._waiting:
            why = f"{self.watched} holds files that were not complete, or that the store did not take, at the end"
            self.tell(CheckpointEvent("skipped", why=why))

    def poll(self) -> list[Manifest]:
        """Look once; what was published. Errors that may pass are told, and met again at the next look."""
        done: list[Manifest] = []
        self._waiting = self._unavailable = False
        for path in self._folders():
            try:
                contents = Contents.of(path)
                if not contents.files or contents == self._published.get(path):
                    continue
                if self._complete(path, contents):
                    done.append(self._publish(path, contents))
                else:
                    self._waiting = True
            except (Changed, FileNotFoundError):
                # It is being written, or was removed: it is looked at again.
                self._waiting = True
                self._seen.pop(path, None)
            except WriterConflict as error:
                # What was complete first is this step's state; the others still get theirs.
                self._published[path] = contents
                why = f"{path} has other content than what was published: {error}, and a step is published once"
                self.tell(CheckpointEvent("failed", self._key(path), why=why))
            except StoreError as error:
                if not error.may_pass:
                    raise
                self._waiting = self._unavailable = True
                self.tell(CheckpointEvent("failed", why=str(error)))
        return done

    def _folders(self) -> list[Path]:
        """Those that are there, in the order of their steps."""
        if self.each is None:
            return [self.watched] if self.watched.is_dir() else []
        found = [path for path in self.watched.glob(self.each) if path.is_dir()]
        for path in found:
            if step_of(path) is None:
                raise CheckpointError(f"{path} has no step: its name must end with a number, as checkpoint-500 does")
        return sorted(found, key=lambda path: step_of(path) or 0)

    def _complete(self, path: Path, contents: Contents) -> bool:
        if self.marker is not None:
            written = _find_marker(contents, self.marker)
            before = self._published.get(path)
            if written is None or (before is not None and written == _find_marker(before, self.marker)):
                return False
            # In a folder that is used again and again, a marker that is older than a file is that of an earlier save;
            # unless the file was published before, as it is: the clock has gone back since.
            known = () if before is None else before.files
            newer = next(
                (file for file in contents.files if file.modified > written.modified and file not in known), None
            )
            if self.each is not None or newer is None:
                return True
            if self._is_quiet(path, contents) and contents != self._told:
                self._told = contents
                why = f"{path / newer.path} was changed after {self.marker}: write that anew when all else is written"
                self.tell(CheckpointEvent("failed", why=why))
            return False
        return self._is_quiet(path, contents)

    def _is_quiet(self, path: Path, contents: Contents) -> bool:
        known, since = self._seen.get(path, (None, 0.0))
        now = self.clock()
        if known != contents:
            self._seen[path] = contents, now
            return self.quiet <= 0
        return now - since >= self.quiet

    def _publish(self, path: Path, contents: Contents) -> Manifest:
        began = time.monotonic()
        manifest = self._save(path, contents)
        key = manifest.key
        self._published[path] = contents
        self._newest = max(self._newest, key.step)
        size = sum(file.size for file in contents.files)
        self.tell(CheckpointEvent("saved", manifest.key, details={"bytes": size, "seconds": time.monotonic() - began}))
        if self.keep_last is not None:
            self._tidy(key, self.keep_last)
        return manifest

    def _save(self, path: Path, contents: Contents) -> Manifest:
        """Commit the folder, where steps are counted as the first one that is free. WriterConflict: its step is not."""
        while True:
            key = self._key(path)
            fenced = partial(may_not_publish, self.store, key)
            try:
                return folder.save_folder(self.store, key, path, contents=contents, fenced=fenced)
            except WriterConflict:
                manifest = read_manifest(self.store, key)
                if folder.holds_contents(manifest, contents):
                    return manifest  # our own, of a try whose answer was lost, or that of another publisher beside us
                if self.each is not None:
                    raise
                self._newest = key.step

    def _key(self, path: Path) -> Key:
        if self._attempt is None:
            self._attempt = claim_attempt(self.store)
        return Key(self._attempt, self._newest + 1 if self.each is None else step_of(path) or 0)

    def _tidy(self, key: Key, keep_last: int) -> None:
        try:
            verify_and_mark(self.store, key)
            retention.prune_verified(VerifiedCheckpoints(self.store), keep_last=keep_last)
        except CheckpointError as error:  # the next one that is published removes the old ones too
            self.tell(CheckpointEvent("untidy", key, why=str(error)))


def _find_marker(contents: Contents, name: str) -> folder.File | None:
    return next((file for file in contents.files if file.path == name), None)


def _read_manifest_if_any(store: Store, key: Key) -> Manifest | None:
    with suppress(Missing, Damaged):
        return read_manifest(store, key)
    return None


def _newest_good(store: Store) -> Manifest | None:
    """Return the newest checkpoint whose manifest holds: enough to know what this folder was."""
    for key in each_candidate(store):
        if (found := _read_manifest_if_any(store, key)) is not None:
            return found
    return None


def publish_folder(
    store: Store, path: Path, *, step: int | None = None, on_bytes: Callable[[int], None] = lambda count: None
) -> Manifest:
    """Publish a folder once, as it is now. `step`: by default the number at its name's end, else the next one."""
    if step is None:
        step = step_of(path)
    if step is None:
        newest = _newest_good(store)
        step = newest.key.step + 1 if newest else 0
    key = Key(claim_attempt(store), step)
    return folder.save_folder(store, key, path, fenced=partial(may_not_publish, store, key), on_bytes=on_bytes)

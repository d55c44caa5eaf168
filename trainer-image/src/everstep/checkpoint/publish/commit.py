"""The commit: when all nodes have said what they wrote, one immutable manifest makes a checkpoint of it.

Everything that a manifest names was durable before its node said so; so a manifest that is there is a checkpoint that
is whole, and a writer that dies or freezes anywhere before has changed nothing.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, StoreError, WriterConflict
from everstep.checkpoint.format.index import (
    CheckpointIndex,
    IndexMerger,
    decode_announcement,
    describe_node_manifest,
    encode_announcement,
    encode_index,
)
from everstep.checkpoint.format.keys import HINT, Key
from everstep.checkpoint.format.manifest import Manifest, encode_manifest
from everstep.checkpoint.store.base import Store

_log = logging.getLogger("everstep.checkpoint.commit")

_FIRST_POLL, _SLOWEST_POLL = 0.02, 1.0  # seconds


class Fenced(CheckpointError):
    """Raised when this attempt may not publish any more."""


class Abandoned(CheckpointError):
    """Raised when not all nodes said in time that they have written their parts."""


def announce_node(store: Store, node: int, manifest: Manifest) -> None:
    """Store the manifest of a node and tell the committer; all of its parts are in the store and durable."""
    announcement = _put_node_manifest(store, node, manifest)
    store.replace(manifest.key.node_name(node), encode_announcement(announcement))


def is_node_announced(store: Store, node: int, manifest: Manifest) -> bool:
    """Tell whether this node has announced this manifest before: then its parts stay as they are.

    Raises:
        WriterConflict: It announced something else.
    """
    name = manifest.key.node_name(node)
    try:
        said = store.read(name)
    except Missing:
        return any(store.list(manifest.key.manifest_name))
    if said != encode_announcement(describe_node_manifest(manifest, encode_manifest(manifest), node)):
        raise WriterConflict(name, "was written by somebody else with the same attempt")
    return True


def read_announcement(store: Store, key: Key, node: int) -> CheckpointIndex:
    """Return what a node has announced: an index of its share alone. Raises Missing, Damaged, UnknownFormat."""
    name = key.node_name(node)
    announcement = decode_announcement(store.read(name), name)
    if announcement.key != key or len(announcement.nodes) != 1:
        raise Damaged(name, f"speaks of {announcement.key} and {len(announcement.nodes)} nodes")
    return announcement


def commit_checkpoint(
    store: Store,
    key: Key,
    nodes: int,
    *,
    fenced: Callable[[], str | None],
    timeout: float,
    on_wait: Callable[[], None] = lambda: None,
) -> CheckpointIndex:
    """Wait at most `timeout` seconds for all nodes, then commit `key`; its index.

    `fenced` says why this attempt may not publish, or None; it is asked last. `on_wait` is called while nodes are
    waited for and may raise. Errors: Abandoned, Fenced, StoreError; MissingRanks, Incomplete or WriterConflict when the
    nodes do not make a whole; UnknownFormat when one of them runs another version of everstep.
    """
    merged = _gather_announcements(store, key, nodes, timeout, on_wait).merged()
    why = fenced()
    if why is not None:
        raise Fenced(f"{key} is not committed: {why}")
    data = encode_index(merged)
    # A commit whose answer was lost is our own; one with other bytes is a second writer with the same token.
    if not store.put_if_absent(key.manifest_name, data) and store.read(key.manifest_name) != data:
        raise WriterConflict(key.manifest_name, "is already committed, by somebody else with the same attempt")
    _move_hint(store, key)
    return merged


def commit_alone(store: Store, manifest: Manifest, *, fenced: Callable[[], str | None]) -> CheckpointIndex:
    """Commit what one process wrote, which is all of a checkpoint, and is durable.

    Nothing is announced: an announcement has the same name whoever makes it, and the commit of one process would be of
    what another one has announced. So whatever is committed is all of one process's.

    Args:
        store: Where its part is.
        manifest: Of a world of one, whose part has a name of this process alone.
        fenced: Says why this attempt may not publish, or None; it is asked last.

    Returns:
        The index that was committed.

    Raises:
        WriterConflict: Another process's checkpoint of this key is committed; nothing of this one ever will be.
        Fenced: This attempt may not publish.
        StoreError: It may be committed, or not.
    """
    key = manifest.key
    merger = IndexMerger(1)
    merger.add(0, _put_node_manifest(store, 0, manifest))
    merged = merger.merged()
    why = fenced()
    if why is not None:
        raise Fenced(f"{key} is not committed: {why}")
    data = encode_index(merged)
    store.put_if_absent(key.manifest_name, data)
    # Read in any case: where a store cannot create exclusively, two may believe to have been first.
    if store.read(key.manifest_name) != data:
        raise WriterConflict(key.manifest_name, "is already committed, by somebody else with the same attempt")
    _move_hint(store, key)
    return merged


def _put_node_manifest(store: Store, node: int, manifest: Manifest) -> CheckpointIndex:
    """Store what a node wrote; an index of its share alone."""
    data = encode_manifest(manifest)
    announcement = describe_node_manifest(manifest, data, node)
    (share,) = announcement.nodes
    if not store.put_if_absent(share.name, data) and store.read(share.name) != data:
        # Its name says what is in it: this is what a power loss has left of an earlier try.
        store.delete([share.name])
        store.put_if_absent(share.name, data)
    return announcement


def _move_hint(store: Store, key: Key) -> None:
    try:
        store.replace(HINT, key.manifest_name.encode())
    except StoreError as error:
        _log.warning("%s is committed; the hint is not moved: %s", key, error)


def _gather_announcements(
    store: Store, key: Key, nodes: int, timeout: float, on_wait: Callable[[], None]
) -> IndexMerger:
    """Return what the nodes 0..nodes-1 have announced."""
    deadline = time.monotonic() + timeout
    poll = _FIRST_POLL
    missing = {key.node_name(node): (node, "nothing") for node in range(nodes)}
    merger = IndexMerger(nodes)
    while True:
        # One listing for all nodes: a thousand reads of what is not there would keep a store busy.
        for name in sorted(missing.keys() & {entry.name for entry in store.list(key.data_prefix)}):
            node = missing[name][0]
            try:
                merger.add(node, read_announcement(store, key, node))
                del missing[name]
            except (Damaged, Missing) as error:
                # A store whose replace is not atomic shows it half for a moment.
                missing[name] = node, str(error)
        if not missing:
            return merger
        on_wait()
        if time.monotonic() >= deadline:
            name, (_, said) = min(missing.items())
            raise Abandoned(f"{key}: {len(missing)} of {nodes} nodes are not done in {timeout:g} s; {name}: {said}")
        time.sleep(min(poll * random.uniform(0.5, 1.0), max(0.0, deadline - time.monotonic())))  # noqa: S311 (jitter)
        poll = min(poll * 1.5, _SLOWEST_POLL)

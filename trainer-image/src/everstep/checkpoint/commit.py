"""The commit: when all nodes have said what they wrote, one immutable manifest makes a checkpoint of it.

Everything that a manifest names was durable before its node said so; so a manifest that is there is a checkpoint that
is whole, and a writer that dies or freezes anywhere before has changed nothing.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from everstep.checkpoint.errors import CheckpointError, Conflict, Damaged, Missing, StoreError
from everstep.checkpoint.format import Manifest, decode, encode
from everstep.checkpoint.keys import HINT, Key
from everstep.checkpoint.merging import merge
from everstep.checkpoint.store.base import Store

_log = logging.getLogger("everstep.checkpoint.commit")

_FIRST_POLL, _SLOWEST_POLL = 0.02, 1.0  # seconds


class Fenced(CheckpointError):
    """This attempt may not publish any more."""


class Abandoned(CheckpointError):
    """Not all nodes said in time that they have written their parts."""


def announce(store: Store, node: int, manifest: Manifest) -> None:
    """Tell the committer what this node wrote; all of its parts are in the store and durable."""
    store.replace(manifest.key.node_name(node), encode(manifest))


def announced(store: Store, node: int, manifest: Manifest) -> bool:
    """Whether this node has said so before: then its parts stay as they are. Conflict if it said something else."""
    name = manifest.key.node_name(node)
    try:
        said = store.read(name)
    except Missing:
        return any(store.list(manifest.key.manifest_name))
    if said != encode(manifest):
        raise Conflict(name, "was written by somebody else with the same attempt")
    return True


def commit(
    store: Store,
    key: Key,
    nodes: int,
    *,
    fenced: Callable[[], str | None],
    timeout: float,
    on_wait: Callable[[], None] = lambda: None,
) -> Manifest:
    """Wait at most `timeout` seconds for all nodes, then commit `key`; its manifest.

    `fenced` says why this attempt may not publish, or None; it is asked last. `on_wait` is called while nodes are
    waited for and may raise. Errors: Abandoned, Fenced, StoreError; MissingRanks, Incomplete or Conflict when the nodes
    do not make a whole; UnknownFormat when one of them runs another version of everstep.
    """
    merged = merge(_gather(store, key, nodes, timeout, on_wait))
    why = fenced()
    if why is not None:
        raise Fenced(f"{key} is not committed: {why}")
    data = encode(merged)
    # A commit whose answer was lost is our own; one with other bytes is a second writer with the same token.
    if not store.put_if_absent(key.manifest_name, data) and store.read(key.manifest_name) != data:
        raise Conflict(key.manifest_name, "is already committed, by somebody else with the same attempt")
    try:
        store.replace(HINT, key.manifest_name.encode())
    except StoreError as error:
        _log.warning("%s is committed; the hint is not moved: %s", key, error)
    return merged


def _gather(store: Store, key: Key, nodes: int, timeout: float, on_wait: Callable[[], None]) -> list[Manifest]:
    """What the nodes 0..nodes-1 have announced, in this order."""
    deadline = time.monotonic() + timeout
    poll = _FIRST_POLL
    missing = {key.node_name(node): "nothing" for node in range(nodes)}
    found: dict[str, Manifest] = {}
    while True:
        # One listing for all nodes: a thousand reads of what is not there would keep a store busy.
        for name in sorted(missing.keys() & {entry.name for entry in store.list(key.data_prefix)}):
            try:
                found[name] = _node_manifest(store, key, name)
                del missing[name]
            except (Damaged, Missing) as error:
                missing[name] = str(error)  # a store whose replace is not atomic shows it half for a moment
        if not missing:
            return [found[name] for name in sorted(found)]
        on_wait()
        if time.monotonic() >= deadline:
            name, said = min(missing.items())
            raise Abandoned(f"{key}: {len(missing)} of {nodes} nodes are not done in {timeout:g} s; {name}: {said}")
        time.sleep(min(poll * random.uniform(0.5, 1.0), max(0.0, deadline - time.monotonic())))  # noqa: S311 (jitter)
        poll = min(poll * 1.5, _SLOWEST_POLL)


def _node_manifest(store: Store, key: Key, name: str) -> Manifest:
    manifest = decode(store.read(name), name)
    if manifest.key != key:
        raise Damaged(name, f"speaks of {manifest.key}")
    return manifest

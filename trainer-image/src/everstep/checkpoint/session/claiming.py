"""The claim of a run on its store, by rank 0: its attempt, and that it goes on from what the store holds; and on each
node's writer and slots."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.catalog.leases import find_time
from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.format.keys import MANIFESTS, Attempt, Key
from everstep.checkpoint.format.start_mark import draw_mark
from everstep.checkpoint.peers.discovery import connect_peers
from everstep.checkpoint.publish import attempts
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.retention.retention import remove_uncommitted
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterConfig
from everstep.coordination.group import RankGroup

_log = logging.getLogger("everstep.checkpoint")

# What passes within seconds ends no run that begins. Others wait for rank 0 meanwhile: a store that is silent for each
# try as long as it may be is not asked again.
_AGAIN = Retry(tries=20, first=0.5, longest=5.0, within=30.0)


@dataclass(frozen=True)
class LastSeen:
    """The state of its store as a session knew it when it restored, or found it empty.

    Attributes:
        newest: The greatest checkpoint, also one that was not chosen, or that the writer of a run which was over had
            not stored yet.
        restored: The one that training goes on from.
    """

    newest: Key | None
    restored: Key | None

    def __str__(self) -> str:
        if self.restored is None:
            return "there was no checkpoint when this session began"
        if self.restored == self.newest:
            return f"{_describe_key(self.restored)} was restored and was the newest"
        return f"{_describe_key(self.restored)} was restored when {_describe_key(self.newest)} was the newest"


def claim_node(
    store: Store,
    given: Attempt | None,
    seen: LastSeen | None,
    topology: Topology,
    group: RankGroup,
    directory: Path,
    *,
    linger_seconds: float,
    keeps_copies: bool,
    learn: Callable[[], None],
    settings: Mapping[str, Any],
) -> WriterConnection:
    """Take an attempt, this node's writer and its slots for a run. Collective over `group`.

    Args:
        store: Where the run saves.
        given: The attempt that the run was given, if any.
        seen: What the session saw when it restored; None where it starts over, whatever there is.
        topology: This rank's place in the run.
        group: All ranks.
        directory: Of this node's slots.
        linger_seconds: How long a writer stays whose ranks are gone.
        keeps_copies: Whether each node keeps copies of another one's slots.
        learn: Reads from the store what rank 0 learns of earlier attempts, before this one is there.
        settings: The other fields of the writer's configuration.

    Returns:
        This rank's link to its node's writer.

    Raises:
        CheckpointError: The store or the slots are another run's, or something newer was saved since the session
            restored, which what it saves would push out; see claim_attempt.
    """

    def claim_on_first() -> tuple[str, str, str, str]:
        learn()
        mark = "" if given is None else draw_mark()  # an attempt that is claimed is one start's
        return *claim_attempt(store, given, identity, seen), secrets.token_hex(32), mark

    machines, hosts = zip(*group.gather((attempts.identify_machine(), socket.gethostname())), strict=True)
    identity = attempts.RunIdentity(attempts.get_own_job(), tuple(dict.fromkeys(machines)))
    token, run, secret, mark = group.run_on_first_rank(claim_on_first)
    config = WriterConfig(
        url=store.url,
        attempt=token,
        node=topology.node,
        nodes=topology.nodes,
        world=topology.world,
        ranks=topology.ranks,
        secret=secret if keeps_copies else "",
        run=run,
        first_host=hosts[0],
        **settings,
    )
    # First what may keep a writer from starting, which one rank of its node alone hears: the others would wait for it.
    group.run_on_all_ranks(lambda: control.ensure_writer(directory, linger_seconds) if topology.local == 0 else None)
    node = group.run_on_all_ranks(lambda: WriterConnection(directory, config, topology.local, linger_seconds))
    node.start = mark
    restored = None if seen is None else seen.restored
    if given is not None or seen is not None:
        try:
            if given is not None:
                _drop_steps_ahead(store, given, restored, topology, group, node)
            # Only now: the run that had the node may have saved for as long as it was waited for.
            if seen is not None:
                group.run_on_all_ranks(
                    lambda: _check_nothing_newer(store, seen, given, identity, topology, directory, config)
                )
        except BaseException:
            with suppress(CheckpointError):
                node.call("bye")  # its memory is given back, once what is in it is stored
            node.close()
            raise
    if config.secret:
        try:
            found = connect_peers(node.port or 0, config.secret, topology, group)
            settled = replace(config, keeper=found.addresses[found.keeper])
            group.run_on_all_ranks(lambda: node.settle(settled, found.kept))
        except BaseException:
            node.close()
            raise
    return node


def claim_attempt(
    store: Store, given: Attempt | None, identity: attempts.RunIdentity, seen: LastSeen | None
) -> tuple[str, str]:
    """Claim an attempt of a store: the given one, or the next.

    Args:
        store: Where the run saves.
        given: The attempt that the run was given, if any.
        identity: Who the run is.
        seen: What the session saw when it restored; None where it starts over. A node's memory may have a later attempt
            than the store, which may have gone back to an earlier moment: by a backup, or a copy that lags behind.

    Returns:
        The attempt, and what the store is called: empty when it cannot be asked now.

    Raises:
        StoreTaken: Another job has the store.
        Superseded: A later attempt has it.
        AttemptTaken: Another run was given the same one.
        CheckpointError: This very attempt has saved a later step than the one that training goes on from.
    """
    if given is None:
        after = None if seen is None or seen.newest is None else seen.newest.attempt
        return str(_AGAIN(lambda: attempts.claim_next_attempt(store, after))), _AGAIN(lambda: attempts.run_of(store))
    run = ""
    try:
        attempts.claim_store(store, given, identity)
        _check_goes_on(store, given, None if seen is None else seen.restored)
        run = attempts.run_of(store)
    except StoreError as error:
        # Nodes may hold in memory what is needed; a later attempt's checkpoints are greater than ours anyway.
        _log.warning("whether a later attempt has used the store is not known: %s", error)
    return str(given), run


def _drop_steps_ahead(
    store: Store,
    attempt: Attempt,
    restored: Key | None,
    topology: Topology,
    group: RankGroup,
    node: WriterConnection,
) -> None:
    """Drop what ranks of this very attempt, which was given, have saved before, later than what training goes on from.

    A launcher may start ranks again under one attempt. They reach these steps again, maybe with other values, and what
    is left of a save that was never whole has the names of theirs. Collective over `group`.

    Raises:
        CheckpointError: It has been committed after all.
    """
    key = None if restored is None else str(restored)
    group.run_on_all_ranks(lambda: node.call_until_heard("drop_ahead", to=key) if topology.local == 0 else None)

    def remove() -> None:
        try:
            _check_goes_on(store, attempt, restored)
            remove_uncommitted(store, attempt, restored)
        except StoreError as error:
            _log.warning("what earlier ranks of attempt %s have left in the store is not known: %s", attempt, error)

    group.run_on_first_rank(remove)


def check_is_empty(store: Store, keep_last: int) -> None:
    """See that a run which begins without restoring leaves nothing behind.

    Raises:
        CheckpointError: The store holds checkpoints, which go when `keep_last` newer ones are saved.
    """
    newest = next(iter(_AGAIN(lambda: list_candidates(store))), None)
    if newest is not None:
        raise CheckpointError(
            f"{store.url} holds a checkpoint of step {newest.step} (attempt {newest.attempt}), and track() "
            "would begin without it: call restore(…) with the same objects to continue from there, or start_over(…) "
            f"to leave it behind; it is removed then when {keep_last} newer ones are saved"
        )


def read_history(store: Store) -> tuple[int, float]:
    """Return how often this run has failed so far, by its attempts, and the seconds since its first checkpoint."""
    entries = list(store.list(MANIFESTS))
    if not entries:
        return 0, 0.0
    tokens = {entry.name.partition("-")[0] for entry in entries}
    return len(tokens), max(0.0, find_time(store) - min(entry.modified for entry in entries))


def _check_nothing_newer(
    store: Store,
    seen: LastSeen,
    given: Attempt | None,
    identity: attempts.RunIdentity,
    topology: Topology,
    directory: Path,
    config: WriterConfig,
) -> None:
    """See that nobody has saved anything since the session restored: it would be removed after some saves of ours.

    Rank 0 looks into the store, and one rank of each node into its slots, from which a writer still stores. What this
    attempt has saved itself is no matter here, see _check_goes_on.

    Raises:
        CheckpointError: Somebody has.
    """
    own = Attempt.parse(config.attempt)
    found: list[Key | None] = []
    if topology.local == 0:
        found.append(Slots(directory).find_newest_claimed(config.run, without=own))
    if topology.rank == 0:
        try:
            found.append(max((key for key in list_candidates(store) if key.attempt != own), default=None))
        except StoreError as error:
            _log.warning("whether somebody has saved since this session restored is not known: %s", error)
    newest = max((key for key in found if key is not None), default=None)
    if newest is None or (seen.newest is not None and newest <= seen.newest):
        return
    what = f"{seen}, and {_describe_key(newest)} was saved in {store.url} since"
    if given is not None and _is_earlier_incarnation(store, newest.attempt, identity):
        # Whoever gave the attempts has ended that one: were it alive somewhere, we would never begin.
        _log.warning("%s, by an earlier attempt of this job, which is over: it is left behind", what)
        return
    raise CheckpointError(
        f"{what}, by another run or by an earlier one that had not ended: a save of this session would replace it as "
        "the newest. Start this run again; it continues from there"
    )


def _is_earlier_incarnation(store: Store, attempt: Attempt, identity: attempts.RunIdentity) -> bool:
    try:
        first = attempts.read_identity(store, attempt)
    except StoreError:
        return False
    if first is None or not first.job or not identity.job:
        return False
    return attempts.is_same_job(first.job, identity.job)


def _describe_key(key: Key | None) -> str:
    return "none" if key is None else f"step {key.step} (attempt {key.attempt})"


def _check_goes_on(store: Store, token: Attempt, restored: Key | None) -> None:
    start = 0 if restored is None else restored.step
    newer = [key for key in list_candidates(store) if key.attempt == token and key.step > start]
    if newer:
        began = "the run starts over" if restored is None else f"step {start} was restored"
        raise CheckpointError(
            f"{began}, and attempt {token} has saved step {newer[0].step} already: a save now would be "
            "older. Continue as a later attempt: without attempt=, or with a greater generation"
        )

"""Record which ranks have come to a place where all must: what waits there does not say for whom.

Gloo says of a rank that never came only that a wait has ended, and of one that died only an address.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from everstep.coordination.errors import ErrorTypes, KVStoreLost, RankLost
from everstep.coordination.group import RankGroup
from everstep.coordination.kv_store import KVStore, SharedKVStore

_GRACE = 5.0  # seconds in which a rank that is only late still comes
_SETTLE = 10.0  # seconds for which rank 0, which holds the store, stays for the others
_PAUSE, _LONGEST_PAUSE = 0.02, 0.25  # seconds

_ABSENT = "left before {}, or did not come to it in time"


def find_absent_ranks(store: KVStore, place: str, seconds: float) -> list[int]:
    """Wait until all ranks have called mark_arrival() for this place, and return those that have not in time."""
    begun = time.monotonic()
    # One counter, however many ranks wait: who is absent is asked once.
    while store.count(place) < store.ranks:
        waited = time.monotonic() - begun
        if waited >= seconds:
            return [rank for rank in range(store.ranks) if not store.count(f"{place}/{rank}")]
        time.sleep(min(max(_PAUSE, waited / 10), _LONGEST_PAUSE, seconds - waited))
    return []


def mark_arrival(store: KVStore, place: str, rank: int) -> None:
    """Say that this rank has come to a place."""
    store.count(f"{place}/{rank}", 1)
    store.count(place, 1)


def open_meeting(
    store: dist.Store, call: str, ranks: Sequence[int], timeout_seconds: float, errors: ErrorTypes | None = None
) -> SharedKVStore:
    """Return what ranks share at their next meeting in a call, to which all of them come equally often.

    How often they have come is counted in the store of the process group, and ends with it: a process that has been in
    another one before meets processes that are new.

    Args:
        store: Of the process group.
        call: The call in which they meet.
        ranks: Those that meet; this one is among them.
        timeout_seconds: How long the store may take to answer.
        errors: The errors that are raised.

    Raises:
        KVStoreLost: The store cannot be reached.
    """
    calls = SharedKVStore(store, f"everstep/{call}", len(ranks), timeout_seconds, errors)
    number = calls.count(f"calls/{dist.get_rank()}", 1)
    return SharedKVStore(store, f"everstep/{call}/{number}", len(ranks), timeout_seconds, errors)


class RollCall:
    """One meeting of all processes before there is a group, by the store of the default process group.

    Args:
        call: The call in which they meet. All processes of a process group come to one call equally often.
        timeout_seconds: How long the store may take to answer.

    Raises:
        KVStoreLost: The store cannot be reached.
    """

    def __init__(self, call: str, timeout_seconds: float) -> None:
        found = dist.distributed_c10d._get_default_store()
        self._store = None
        if found is not None:
            self._store = open_meeting(found, call, range(dist.get_world_size()), timeout_seconds)

    def find_missing(self, moment: str, seconds: float) -> list[int]:
        """Say that this rank has come to a moment of the meeting, and wait for the others.

        Args:
            moment: The same on all ranks.
            seconds: How long to wait.

        Returns:
            The ranks that had not come in time; none if the process group has no store.

        Raises:
            KVStoreLost: The store cannot be reached.
        """
        if self._store is None:
            return []
        mark_arrival(self._store, moment, dist.get_rank())
        return find_absent_ranks(self._store, moment, seconds)

    def find_lost(self) -> list[int]:
        """Return the ranks that do not find out, within a few seconds, that one is lost, as this rank has."""
        if self._store is None:
            return []
        try:
            mark_arrival(self._store, "lost", dist.get_rank())
            return _find_absent(self._store, "lost", dist.get_rank())
        except KVStoreLost:
            return [0]


def open_group_of_all(call: str, timeout_seconds: float, errors: ErrorTypes) -> RankGroup:
    """Open the group of all ranks, once all have come to a call. Collective.

    Args:
        call: What the script calls, for the message.
        timeout_seconds: How long a rank waits for the others, here and in each collective.
        errors: See RankGroup.

    Raises:
        RankLost: With the ranks that did not come in time.
    """
    _meet(call, timeout_seconds, errors)
    return RankGroup.open(timeout_seconds, errors)


@contextlib.contextmanager
def opening_group_of_all(call: str, timeout_seconds: float, errors: ErrorTypes) -> Iterator[RankGroup]:
    """Open the group of all ranks for a block that opens more by it, and close it where that fails. Collective.

    Args:
        call: What the script calls, for the message.
        timeout_seconds: How long a rank waits for the others, here and in each collective.
        errors: See RankGroup.

    Raises:
        RankLost: With the ranks that did not come in time, or were lost in the block.
    """
    roll = _meet(call, timeout_seconds, errors)
    group: RankGroup | None = None
    try:
        group = RankGroup.open(timeout_seconds, errors)
        yield group
    except BaseException as error:
        if group is not None:
            _release_frames(error)
            group.close()  # the others wait for this rank in it no longer
        if roll is not None and isinstance(error, RankLost) and not error.ranks and (lost := roll.find_lost()):
            raise errors.lost(lost, _ABSENT.format(f"the end of {call}")) from error
        raise


def _release_frames(error: BaseException | None) -> None:
    """Let go of what the calls of an error hold: a group whose calls hold it keeps its connections."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _meet(call: str, timeout_seconds: float, errors: ErrorTypes) -> RollCall | None:
    """Meet all ranks in a call; None where there are no others."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    try:
        roll = RollCall(call, timeout_seconds)
        absent = roll.find_missing("came", timeout_seconds)
    except KVStoreLost as error:
        raise errors.lost([0], f"cannot be reached in {call}") from error
    if absent:
        raise errors.lost(absent, _ABSENT.format(call))
    return roll


class Arrivals:
    """One rank's side. All ranks come to the same calls in the same order."""

    def __init__(self, store: KVStore, group: RankGroup) -> None:
        self._store = store
        self._group = group
        self._number = 0

    @contextlib.contextmanager
    def naming_absent(self, call: str) -> Iterator[None]:
        """Say that this rank has come, and name those that have not where a collective within loses a rank.

        Args:
            call: What the script calls, for the message.

        Raises:
            RankLost: With the ranks that died before they came, where it is known which.
        """
        name = f"arrived/{self._number}"
        self._number += 1
        try:
            mark_arrival(self._store, name, self._group.rank)
            self._meet(call)
            yield
        except KVStoreLost as error:
            raise self._group.errors.lost([0], f"cannot be reached in {call}") from error
        except RankLost as error:
            if error.ranks:
                raise
            if absent := _find_absent(self._store, name, self._group.rank):
                raise self._group.errors.lost(absent, _ABSENT.format(call)) from error
            raise

    def _meet(self, call: str) -> None:
        """Have all ranks talk with rank 0, which tells them whom it misses. In other collectives most ranks have
        nothing to do with the one that died: they wait for those between, or name one of these."""
        try:
            came = self._group.gather_bytes(b"")
            self._group.scatter_bytes(None if came is None else [b""] * len(came))
        except RankLost as error:
            if error.ranks:
                raise self._group.errors.lost(error.ranks, _ABSENT.format(call)) from error
            raise


def _find_absent(store: KVStore, place: str, rank: int) -> list[int]:
    """Return the ranks that have not come to a place, nor do so soon, once the others know them too."""
    try:
        absent = find_absent_ranks(store, place, _GRACE)
        _settle(store, f"{place}/heard", rank, store.ranks - len(absent))
    except KVStoreLost:
        return [0]
    return absent


def _settle(store: KVStore, heard: str, rank: int, present: int) -> None:
    """Let the others find out before rank 0 ends, and the store with it."""
    store.count(heard, 1)
    until = time.monotonic() + _SETTLE
    while rank == 0 and store.count(heard) < present and time.monotonic() < until:
        time.sleep(_PAUSE)

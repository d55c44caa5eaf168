"""Define the errors of a checkpoint or its store; every error says where and why."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.coordination.errors import KVStoreLost
from everstep.coordination.errors import RankLost as RankLost


class CheckpointError(Exception):
    """The base of all errors of everstep.checkpoint: anything that it refuses or cannot do."""


class Damaged(CheckpointError):
    """The bytes of `name` are not what was written."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why


class Incomplete(CheckpointError):
    """Raised when nobody wrote some elements: `region` is a (start, stop) for each dimension of `tensor`."""

    def __init__(self, tensor: str, region: Sequence[tuple[int, int]]) -> None:
        where = ", ".join(f"{start}:{stop}" for start, stop in region)
        super().__init__(f"{tensor}[{where}] was written by nobody")
        self.tensor = tensor
        self.region = tuple(region)


class MissingRanks(CheckpointError):
    """A checkpoint of `world` ranks lacks what `ranks` have written: it does not cover its world."""

    def __init__(self, name: str, world: int, ranks: Sequence[int]) -> None:
        named = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
        super().__init__(f"{name} is of {world} ranks, and has no part of rank {named}")
        self.name = name
        self.world = world
        self.ranks = tuple(ranks)


class UnknownFormat(CheckpointError):
    """Raised when another version of everstep wrote `name`, in a format that this one cannot read.

    It may be perfectly good: nobody falls back to something older because of it, and retention leaves it alone.
    """

    def __init__(self, name: str, found: object, known: int) -> None:
        super().__init__(
            f"{name} has format {found}; this version of everstep reads format {known}: use the version of everstep "
            "that wrote it, or a later one"
        )
        self.name = name
        self.found = found


class WriterConflict(CheckpointError):
    """Raised when two writers of one checkpoint disagree about `name`, or both wrote it."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why


class StoreError(CheckpointError):
    """A store did not do `what` at `where`; `may_pass`: the same call may succeed later."""

    def __init__(self, what: str, where: str, *, may_pass: bool = False) -> None:
        super().__init__(f"{where}: {what}")
        self.what = what
        self.where = where
        self.may_pass = may_pass


class Missing(StoreError):
    """Raised when there is no object of this name."""

    def __init__(self, where: str) -> None:
        super().__init__("there is no such object", where)


class Removed(CheckpointError):
    """The checkpoint `name` was removed while it was read, or just before: that is no damage."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} was removed while it was read: its store keeps newer ones; take one of these")
        self.name = name


class Denied(StoreError):
    """The store does not let this user do it. Who may read the object may find it good: that is no damage."""


class Full(StoreError):
    """Raised when no space or quota is left; earlier checkpoints are as they were."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(why, where, may_pass=True)


class NoSlot(CheckpointError):
    """Raised when no part of a node's memory can take a save now: it is filled, stored or read."""


class CheckpointRankLost(RankLost, CheckpointError):
    """A RankLost of a session, a load or a writer."""


class AgreementLost(KVStoreLost, CheckpointError):
    """Rank 0 cannot be reached, or has not decided in time: this rank cannot know what the others save."""


def is_damage(error: BaseException) -> bool:
    """Tell whether a reader's error means that the checkpoint is bad and an older one may be good.

    A store that is unavailable for a while or refuses this user says nothing about a checkpoint, nor does a format that
    this version of everstep does not know: falling back because of them would throw good steps away.
    """
    if isinstance(error, StoreError):
        return not (error.may_pass or isinstance(error, Denied))
    return isinstance(error, (Damaged, MissingRanks, Incomplete, WriterConflict))


class RestoreFailed(CheckpointError):
    """The objects were touched and are undefined now: their tensors may hold anything of the checkpoint and of before.

    Raised on all ranks. The checkpoint had been verified a moment before; a new process may restore it, or an older
    one.
    """

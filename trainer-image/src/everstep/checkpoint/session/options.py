"""Define what a script may say of a session beyond the usual keywords: what stays, memory, storage, and times.

Each value is checked when the options are made, in the script's words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from everstep.checkpoint.catalog.best import Mode
from everstep.checkpoint.format import checksum as checksums
from everstep.checkpoint.session.arguments import DEFAULT_EVERY, check_argument
from everstep.checkpoint.session.job_arguments import fill_arguments
from everstep.checkpoint.session.retention_warnings import Note, warn_of_missed_multiple, warn_of_missing_metric

if TYPE_CHECKING:
    from everstep.checkpoint.save.save_coordinator import Policy


class _Checked:
    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # all that inherit are dataclasses
            object.__setattr__(self, each.name, check_argument(each.name, getattr(self, each.name)))


@dataclass(frozen=True)
class RetentionOptions(_Checked):
    """The options of which checkpoints stay beside the newest `keep_last`.

    Attributes:
        keep_every: Each checkpoint stays whose step is a multiple of this; None for none.
        keep_best: The number of checkpoints that stay for a number in their metadata; None for none.
        best_metric: The name of that number.
        best_mode: Whether the least (`min`) or the greatest (`max`) is the best.

    Raises:
        ValueError: A value is not allowed.
    """

    keep_every: int | None = None
    keep_best: int | None = None
    best_metric: str = "loss"
    best_mode: Mode = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_best is None and (self.best_metric, self.best_mode) != ("loss", "min"):
            raise ValueError(
                "best_metric and best_mode say which checkpoints are the best: give keep_best, how many of them stay"
            )


@dataclass(frozen=True)
class MemoryOptions(_Checked):
    """The options of the copies in the nodes' memory, from which they are stored, and restored after a failure.

    Attributes:
        directory: The directory of this node's slots; None for one in /dev/shm, or in EVERSTEP_CHECKPOINT_MEMORY.
        slots: The number of copies in each node's memory; with one, no whole copy is there while a save is copied.
        peers: 1 to keep a copy of each node's slots in the memory of another node, so that the loss of a node costs no
            read of the store, 0 for none; None for 1 where there are several nodes with room for it. What a node fails
            together with is EVERSTEP_FAILURE_DOMAIN, by default its machine.

    Raises:
        ValueError: A value is not allowed.
    """

    directory: str | os.PathLike[str] | None = None
    slots: int = 2
    peers: Literal[0, 1] | None = None


@dataclass(frozen=True)
class StorageOptions(_Checked):
    """The options of how checkpoints are stored.

    Attributes:
        options: The options of the store, by their names; see the stores of the page docs/how-to/checkpoints.md.
        checksum: The algorithm by which what is read is verified.
        allow_pickle: Whether values of other types than those of the format are saved as pickles.

    Raises:
        ValueError: A value is not allowed.
    """

    options: Mapping[str, Any] | None = None
    checksum: str = checksums.DEFAULT
    allow_pickle: bool = False


@dataclass(frozen=True)
class TimeOptions(_Checked):
    """The times of a session, in seconds.

    Attributes:
        timeout: The time that a rank waits for other ranks, or for its writer.
        commit_timeout: The time that a save may take until it is in the store.
        stall_after: The time without progress after which a save is reported as stalled.
        linger: The time that a writer stays whose ranks are gone.
        time_between_failures: The mean time between failures, for `every="auto"`; None to learn it from the store.

    Raises:
        ValueError: A value is not allowed.
    """

    timeout: float = 300.0
    commit_timeout: float = 1800.0
    stall_after: float = 60.0
    linger: float = 600.0
    time_between_failures: float | None = None


GROUPS: dict[str, type[Any]] = {
    "retention": RetentionOptions,
    "memory": MemoryOptions,
    "storage": StorageOptions,
    "times": TimeOptions,
}


@dataclass(frozen=True)
class SessionArguments:
    """The arguments of a session, which are those of `Checkpointer`, checked, and with defaults in place of None.

    Raises:
        ValueError: One is not allowed; names it, its value and what is allowed.
    """

    store: str | os.PathLike[str]
    every: str | float | None
    every_steps: int | None
    keep_last: int
    policy: Policy
    retention: RetentionOptions
    memory: MemoryOptions
    storage: StorageOptions
    times: TimeOptions
    attempt: tuple[int, int] | None

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> Self:
        """Return the arguments of a session, from the job where the script gave none.

        Args:
            given: What a script gave, by name.

        Raises:
            ValueError: One is not allowed.
        """
        checked = {
            name: _check_group(name, value, GROUPS[name]) if name in GROUPS else check_argument(name, value)
            for name, value in fill_arguments(given).items()
        }
        if checked["every"] is None and checked["every_steps"] is None:
            checked["every"] = DEFAULT_EVERY
        return cls(**checked)

    def watch_metadata(self, note: Note) -> Note:
        """Return the function that makes metadata, with warnings where retention keeps nothing of what it is to."""
        kept = self.retention
        if kept.keep_best is not None:
            note = warn_of_missing_metric(note, kept.best_metric, self.keep_last)
        return note if kept.keep_every is None else warn_of_missed_multiple(note, kept.keep_every)

    def describe_for_writer(self) -> dict[str, Any]:
        """Return what the writer process is told of a session, by the fields of its configuration."""
        return {
            "options": dict(self.storage.options or {}),
            "keep_last": self.keep_last,
            **asdict(self.retention),
            "slots": self.memory.slots,
            "insist": self.memory.peers == 1,
            "commit_timeout": self.times.commit_timeout,
            "stall_after": self.times.stall_after,
        }


def _check_group(name: str, given: Any, kind: type[Any]) -> Any:
    """Return a group of options as it was given, or its defaults; ValueError for anything else."""
    if given is None:
        return kind()
    if not isinstance(given, kind):
        example = f"{name}={kind.__name__}({fields(kind)[0].name}=…)"
        raise ValueError(f"{name} is {given!r}, and must be a {kind.__name__}, as {example}, or None")
    return given

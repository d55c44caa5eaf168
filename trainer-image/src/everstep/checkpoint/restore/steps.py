"""A step of a restore: every rank does its share, and all of them hear alike how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from everstep.checkpoint.errors import CheckpointError, Removed, RestoreFailed, is_damage
from everstep.coordination.consensus import Consensus

T = TypeVar("T")


class BadCheckpoint(Exception):
    """Raised when this checkpoint is bad on some rank."""


class UndefinedObjects(Exception):
    """Bytes changed between the two passes, when objects had some of them already."""


def run_restore_step(consensus: Consensus, rank: int, work: Callable[[], T], *, is_local: bool) -> Any:
    """Run the work of every rank, and fail where one of them does.

    Args:
        consensus: Of this restore.
        rank: This one.
        work: This rank's share.
        is_local: Whether the others need not know what this rank made.

    Returns:
        What all ranks made, in their order; where `is_local`, what this one did.

    Raises:
        BadCheckpoint: On all ranks: the checkpoint is bad for one of them.
        RestoreFailed: On all ranks: objects are undefined.
        Removed: On all ranks: it is not there any more for one of them.
        CheckpointError: On all ranks: anything else went wrong. Where it did, the error itself.
    """
    made: T | None = None
    failure: Exception | None = None
    message: dict[str, Any] = {}
    try:
        made = work()
        if not is_local:
            message["made"] = made
    except Exception as error:  # the other ranks wait: they are told whatever it is
        failure = error
        kind = "undefined" if isinstance(error, UndefinedObjects) else "bad" if is_damage(error) else "failed"
        message[kind] = f"rank {rank}: {error}"
        if isinstance(error, Removed):
            message = {"removed": error.name}
    outcome = consensus.agree(message, _judge_votes)
    if outcome.get("failed"):
        if failure is not None and not (isinstance(failure, UndefinedObjects | Removed) or is_damage(failure)):
            raise failure
        raise CheckpointError(outcome["failed"])
    if outcome.get("undefined"):
        raise RestoreFailed(
            f"{outcome['undefined']}, though they were verified a moment before. The objects to "
            "restore are undefined now: start all ranks again, and restore into new objects"
        ) from failure
    if outcome.get("removed"):
        raise Removed(outcome["removed"]) from failure
    if outcome.get("bad"):
        raise BadCheckpoint(outcome["bad"]) from failure
    return made if is_local else outcome["made"]


def _judge_votes(messages: list[dict[str, Any]]) -> dict[str, Any]:
    for kind in ("failed", "undefined", "removed", "bad"):
        said = [message[kind] for message in messages if kind in message]
        if said:
            if kind == "removed":
                return {kind: said[0]}
            more = f" (and {len(said) - 1} more ranks)" if len(said) > 1 else ""
            return {kind: said[0] + more}
    return {"made": [message.get("made") for message in messages]}

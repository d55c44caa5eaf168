"""The group of all ranks as this library opens it: what goes wrong between ranks is a CheckpointError too."""

from __future__ import annotations

from contextlib import AbstractContextManager

from everstep.checkpoint.errors import AgreementLost, CheckpointError, CheckpointRankLost
from everstep.coordination.arrivals import open_group_of_all, opening_group_of_all
from everstep.coordination.errors import ErrorTypes
from everstep.coordination.group import RankGroup

ERRORS = ErrorTypes(CheckpointRankLost, AgreementLost, CheckpointError)


def open_host_group(timeout_seconds: float, call: str) -> RankGroup:
    """Open the group of all ranks, for the few collectives of a session or an adapter. Collective.

    Args:
        timeout_seconds: How long a rank waits for the others, here and in each collective.
        call: What the script calls, for the message.

    Raises:
        RankLost: With the ranks that did not come.
    """
    return open_group_of_all(call, timeout_seconds, ERRORS)


def opening_host_group(timeout_seconds: float, call: str) -> AbstractContextManager[RankGroup]:
    """Open the group of all ranks for a block that opens more by it, as a session does: see opening_group_of_all().

    Args:
        timeout_seconds: How long a rank waits for the others, here and in each collective.
        call: What the script calls, for the message.

    Raises:
        RankLost: With the ranks that did not come, or were lost in the block.
    """
    return opening_group_of_all(call, timeout_seconds, ERRORS)

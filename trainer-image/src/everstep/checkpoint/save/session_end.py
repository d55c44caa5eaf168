"""Let a rank leave a session: rank 0, which holds the key-value store, after all others, no rank after a lost one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.events import CheckpointEvent, Events
from everstep.checkpoint.save.outcomes import SaveFailed, SaveOutcomes
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.save.step_agreement import Agreement
from everstep.checkpoint.slots.slots import Slots
from everstep.coordination.errors import KVStoreLost

_BRIEF = 2.0  # seconds that telling it may take after an error
_LOOK = 0.25  # seconds between two looks for ranks that are lost
_SURELY_LOST = 2.0  # seconds without a connection to the writer: a rank that lives may be about to connect again
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds
_TIDY = 30.0  # seconds that what was saved last may take to be verified, and older ones to be removed
_FREE = 1.0  # seconds that a writer may take to give the memory back when all ranks of its node have left


def tell_unmet_request(events: Events, deadline: float | None, raises: bool) -> None:
    """Tell that a save was asked for and neither a boundary nor save() came before the session ended.

    Args:
        events: Of the session.
        deadline: When the time of the request is over, by this process's monotonic clock.
        raises: Whether to raise too, unless the deadline is over.

    Raises:
        SaveFailed: The same words.
    """
    why = (
        "a save was asked for by request(), and no step() that could take it came before the session ended: "
        "call save(step) before the end"
    )
    events.emit(CheckpointEvent("failed", None, why))
    if raises and (deadline is None or time.monotonic() < deadline):
        raise SaveFailed(why)


class SessionEnd:
    """One rank's end of its session.

    Args:
        node: Its writer is told, and knows which ranks are lost.
        agreement: Rank 0's end ends it.
        outcomes: Through it rank 0 is told.
    """

    def __init__(self, node: WriterConnection, agreement: Agreement, outcomes: SaveOutcomes) -> None:
        self.ended: set[int] = set()  # on rank 0: ranks whose session is over
        self._node = node
        self._agreement = agreement
        self._outcomes = outcomes

    def leave_in_order(
        self,
        wait: Callable[[float], None],
        hear: Callable[[], None],
        world: int,
        *,
        timeout: float,
        limit: float,
    ) -> None:
        """Wait for the last commit and for other ranks, also where a signal's handler calls sys.exit(0) meanwhile.

        So a process ends well that is told to end and has some time left. Whatever else interrupts, as Ctrl-C does,
        ends the wait.

        Args:
            wait: Waits for so many seconds until what was saved is in the store.
            hear: Reads what others tell rank 0, and adds to `ended`.
            world: The number of ranks.
            timeout: In seconds: how long rank 0 waits for ranks of which nothing is known.
            limit: In seconds: how long is waited for the commit, with all interruptions.

        Raises:
            SystemExit: The handler's, when all is done.
            SaveFailed: The last save did not get there.
        """
        until = time.monotonic() + limit
        exited: SystemExit | None = None
        while True:
            try:
                try:
                    wait(limit if exited is None else max(0.0, until - time.monotonic()))
                except Exception:
                    self._say_goodbye(hear, world, timeout)
                    raise
                self._say_goodbye(hear, world, timeout)
            except Exception:
                raise
            except BaseException as error:
                if not isinstance(error, SystemExit) or error.code:
                    self._node.tell_if_connected("bye")
                    self.leave_briefly()
                    raise
                exited = error
            else:
                break
        if exited is not None:
            raise exited

    def leave_briefly(self) -> None:
        """Leave after an error: nobody is waited for, not even a store that does not answer."""

        def tell_end() -> None:
            with contextlib.suppress(CheckpointError):
                self._tell_end()

        telling = threading.Thread(target=tell_end, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: the error that ends the session is what counts
            telling.start()
            telling.join(_BRIEF)

    def wait_until_tidy(self) -> None:
        """Wait, in one rank of each node, until its writer has verified what was saved last.

        A container ends with its ranks, and the writer with it: the last checkpoint of a job would never be verified,
        and those before it would stay. It is in the store already, so that this wait is short and fails for nothing.
        Not for who is told to end: the process would be killed, and count as failed.
        """
        if self._node.config.ranks[0] != self._agreement.rank:
            return
        until, pause = time.monotonic() + _TIDY, _FIRST_PAUSE
        with contextlib.suppress(CheckpointError):
            while (left := until - time.monotonic()) > 0 and self._node.is_connected:
                if not self._node.call("tidying", left):
                    return
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def wait_until_memory_is_free(self) -> None:
        """Hang up, and wait until the node's writer has given the memory back, as it does when its last rank leaves.

        What is done next, as a session in another store, may need this memory. Not for long: other ranks of the node
        may stay in their sessions, and other processes may read the slots.
        """
        self._node.close()
        slots = Slots(self._node.directory)
        until, pause = time.monotonic() + _FREE, _FIRST_PAUSE
        while slots.hold_memory and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _say_goodbye(self, hear: Callable[[], None], world: int, timeout_seconds: float) -> None:
        """Leave in order. Rank 0 waits for the others, which may have more to do before they close than it has."""
        self._outcomes.guard(lambda: self._node.call_until_heard("bye"))
        with contextlib.suppress(KVStoreLost):
            self._tell_end()
            if self._agreement.leads:
                self._wait_for_others(hear, world, timeout_seconds)

    def _tell_end(self) -> None:
        if self._agreement.leads:
            self._agreement.end()
        else:
            self._outcomes.leave_note({"kind": "ended", "rank": self._agreement.rank})

    def _wait_for_others(self, hear: Callable[[], None], world: int, timeout_seconds: float) -> None:
        until = time.monotonic() + timeout_seconds
        lost_since: dict[int, float] = {}
        pause, next_look = _FIRST_PAUSE, 0.0
        while (now := time.monotonic()) < until:
            hear()
            lost = {rank for rank, since in lost_since.items() if now - since >= _SURELY_LOST}
            if len({0} | self.ended | lost) >= world:
                return
            if now >= next_look:  # not before: a writer that stands still takes a minute to say nothing
                next_look = now + _LOOK
                lost_since = {rank: lost_since.get(rank, now) for rank in self._node.list_lost_ranks()}
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

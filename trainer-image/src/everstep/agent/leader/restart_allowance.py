"""Limits how often, and how soon, a generation may follow one that failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from everstep.agent.config import FAIL, IGNORE
from everstep.agent.wire.protocol import APPLICATION, FENCED, EndedGeneration, parse_generation_id

MAX_HISTORY_ENTRIES = 64
MIN_IGNORED_SECONDS = 1.0  # seconds before a restart that no budget pays: nothing else would bound their number
STABLE_AFTER_SECONDS = 600.0  # seconds of running after which earlier failures do not slow a restart any more


class RestartAllowance:
    """The generation history, and the operator's word on it: `allowance` application restarts are left after entry
    `charged`.

    The operator charges in its own time and its answer may be old; the history says what happened since. So the two can
    never add up to more restarts than were granted.
    """

    def __init__(self, allowance: int, max_backoff: float, exit_code_actions: Mapping[int, str] | None = None) -> None:
        self.history: deque[EndedGeneration] = deque(maxlen=MAX_HISTORY_ENTRIES)
        self._charged = (0, 0)
        self._allowance = allowance
        self._max_backoff = max_backoff
        self._exit_code_actions = exit_code_actions or {}
        self._in_row = 0

    def grant(self, charged: str, allowance: int) -> None:
        """Note that `allowance` application restarts are left after the entry `charged`.

        A request that was overtaken by a newer one grants nothing.

        Raises:
            ValueError: The id is malformed.
        """
        order = parse_generation_id(charged)
        if order >= self._charged:
            self._charged, self._allowance = order, allowance

    def find_exhausting_failure(self) -> EndedGeneration | None:
        """Return the failure after which no restart is left or wanted, or None."""
        used = []
        for entry in self.history:
            if not entry.application or entry.order <= self._charged:
                continue
            action = self._find_action(entry)
            if action == FAIL:
                return entry
            if action != IGNORE:
                used.append(entry)
        return used[-1] if len(used) > self._allowance else None

    def record_end(self, entry: EndedGeneration, ran: float) -> float:
        """Book a generation that ran for `ran` seconds, and return the seconds to wait before the next.

        The first failure restarts at once: most are not the application's habit. Then 1, 2, 4 ... seconds. What befell
        a pod is never slowed down: its replacement takes its time anyway. Nodes that stop their ranks by themselves are
        not replaced, and one that does so at once would make hundreds of generations a second.
        """
        self.history.append(entry)
        if not entry.application and entry.cause != FENCED:
            return 0.0
        self._in_row = 1 if ran >= STABLE_AFTER_SECONDS else self._in_row + 1
        if self._in_row == 1:
            return 0.0
        least = MIN_IGNORED_SECONDS if self._find_action(entry) == IGNORE else 0.0
        return max(least, min(2.0 ** min(self._in_row - 2, 30), self._max_backoff))

    def _find_action(self, entry: EndedGeneration) -> str | None:
        # What was killed for memory or hangs has not chosen its exit code.
        return self._exit_code_actions.get(entry.status) if entry.cause == APPLICATION else None

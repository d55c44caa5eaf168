"""Keep how the saves of a node have ended, for ranks that had lost their connection to the writer when it told that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from everstep.checkpoint.format.keys import Key

_KEPT = 64  # more saves than ranks ever wait for
_ENDS = ("saved", "put", "failed")


class SaveEnds:
    """The writer's reports on the ends of the newest saves."""

    def __init__(self) -> None:
        self._reports: OrderedDict[Key, dict[str, Any]] = OrderedDict()

    def note(self, report: dict[str, Any]) -> None:
        """Keep a report if it is on the end of a save."""
        if report["event"] not in _ENDS:
            return
        self._reports[Key.parse(report["key"])] = report
        while len(self._reports) > _KEPT:
            self._reports.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the node has another run."""
        self._reports.clear()

    def find(self, keys: Iterable[Key], is_under_way: Callable[[Key], bool]) -> list[dict[str, Any]]:
        """Return the reports on the ends of these saves.

        Args:
            keys: Of saves that a rank waits for.
            is_under_way: Whether a save is about to end. Of one that is not, nothing is left: the writer before this
                one has died before all ranks had copied their parts, and nobody else would ever say so.
        """
        found = []
        for key in keys:
            if key in self._reports:
                found.append(self._reports[key])
            elif not is_under_way(key):
                found.append({"event": "failed", "key": str(key), "why": "its writer died before all had copied"})
        return found

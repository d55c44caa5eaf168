"""Define the errors of coordination, and how a library makes them errors of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

_MOST_NAMED = 16


class RankLost(RuntimeError):
    """These ranks are gone, silent, have failed or have left too early; none is named where it is not known which."""

    def __init__(self, ranks: Iterable[int], why: str) -> None:
        self.ranks, self.why = tuple(ranks), why
        named = ", ".join(map(str, self.ranks[:_MOST_NAMED])) + (", ..." if len(self.ranks) > _MOST_NAMED else "")
        super().__init__(f"{f'rank {named}' if named else 'a rank'} {why}; all ranks have to be started again")


class KVStoreLost(RuntimeError):
    """Raised when a key-value store cannot be reached, as its host is gone, or does not answer in time."""


@dataclass(frozen=True)
class ErrorTypes:
    """The errors that groups and stores raise: a library gives classes that are its own errors too.

    Args:
        lost: Made of the lost ranks and what they did.
        store_lost: Made of a text.
        failed: Made of the texts of other ranks' errors, where the work of this one went well.
    """

    lost: Callable[[Iterable[int], str], RankLost] = RankLost
    store_lost: Callable[[str], KVStoreLost] = KVStoreLost
    failed: Callable[[str], Exception] = RuntimeError

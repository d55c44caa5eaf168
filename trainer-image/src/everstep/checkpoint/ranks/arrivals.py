"""Record which ranks have come to a call that begins with a collective.

A broken connection does not say whose it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch.distributed as dist

from everstep.checkpoint.errors import RankLost
from everstep.checkpoint.ranks.collectives import gather_bytes, scatter_bytes
from everstep.checkpoint.ranks.kv_store import AgreementLost, KVStore

_GRACE = 5.0  # seconds in which a rank that is only late still comes
_SETTLE = 10.0  # seconds for which rank 0, which holds the board, stays for the others
_PAUSE = 0.02  # seconds

_ABSENT = "left before {}, or did not come to it in time"


class Arrivals:
    """One rank's side. All ranks come to the same calls in the same order."""

    def __init__(self, board: KVStore, rank: int, group: dist.ProcessGroup | None) -> None:
        self._board = board
        self._rank = rank
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
            self._board.count(f"{name}/{self._rank}", 1)
            self._meet(call)
            yield
        except AgreementLost as error:
            raise RankLost([0], f"cannot be reached in {call}") from error
        except RankLost as error:
            if error.ranks:
                raise
            if absent := self._find_absent(name):
                raise RankLost(absent, _ABSENT.format(call)) from error
            raise

    def _meet(self, call: str) -> None:
        """Have all ranks talk with rank 0, which tells them whom it misses. In other collectives most ranks have
        nothing to do with the one that died: they wait for those between, or name one of these."""
        try:
            came = gather_bytes(b"", self._group)
            scatter_bytes(None if came is None else [b""] * len(came), self._group)
        except RankLost as error:
            if error.ranks:
                raise RankLost(error.ranks, _ABSENT.format(call)) from error
            raise

    def _find_absent(self, name: str) -> list[int]:
        try:
            until = time.monotonic() + _GRACE
            while (absent := self._list_absent(name)) and time.monotonic() < until:
                time.sleep(_PAUSE)
            self._settle(f"{name}/heard", self._board.ranks - len(absent))
        except AgreementLost:
            return [0]
        return absent

    def _list_absent(self, name: str) -> list[int]:
        return [rank for rank in range(self._board.ranks) if not self._board.count(f"{name}/{rank}")]

    def _settle(self, heard: str, present: int) -> None:
        """Let the others find out before rank 0 ends, and the board with it."""
        self._board.count(heard, 1)
        until = time.monotonic() + _SETTLE
        while self._rank == 0 and self._board.count(heard) < present and time.monotonic() < until:
            time.sleep(_PAUSE)

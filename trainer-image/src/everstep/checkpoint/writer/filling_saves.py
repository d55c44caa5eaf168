"""The saves that a node's ranks are about: who has filled a part, who is to, and what was given up."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Key

C = TypeVar("C", bound=Hashable)


@dataclass
class _Save(Generic[C]):
    ranks: dict[int, C]  # the connection by which each local rank makes it
    done: set[int] = field(default_factory=set)


class Filling(Generic[C]):
    """Local ranks come by connections `C`. One may end long after its rank, with the last child that the rank had: it
    says nothing about a save that its local rank makes by a later one."""

    def __init__(self) -> None:
        self._saves: dict[Key, _Save[C]] = {}
        self._void: dict[Key, str] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._saves

    def begin(self, key: Key, local: int, connection: C, newest: Mapping[int, C]) -> None:
        """A rank begins a save. `newest`: connection of each rank. CheckpointError: it was given up."""
        self.check(key)
        if key not in self._saves:
            self._saves[key] = _Save(dict(newest))
        self._saves[key].ranks[local] = connection

    def check(self, key: Key) -> None:
        """Raise CheckpointError if this save was given up."""
        if key in self._void:
            raise CheckpointError(f"{key} was given up: {self._void[key]}")

    def waits_for_others(self, local: int) -> bool:
        """Tell whether this local rank is done with a save that others are still to fill."""
        return any(local in save.done for save in self._saves.values())

    def fill(self, key: Key, local: int, count: int) -> bool:
        """Note that a rank is done; return whether all `count` are, which ends it here.

        CheckpointError: it was given up.
        """
        save = self._saves.get(key)
        if save is None:
            raise CheckpointError(f"{key} was given up")
        save.done.add(local)
        if len(save.done) < count:
            return False
        del self._saves[key]
        return True

    def give_up(self, key: Key, why: str) -> bool:
        """Give up this save: it will not be complete, and whoever comes later does not begin it.

        Returns:
            Whether anybody had begun it.
        """
        self._void[key] = why
        return self._saves.pop(key, None) is not None

    def forget(self, key: Key) -> None:
        """Forget this save: all ranks are done with it, whether they could say so or not."""
        self._saves.pop(key, None)

    def join(self, local: int, connection: C, before: C | None, *, is_new_process: bool) -> None:
        """A local rank has made a new connection; `before`: the lost one of the same process, whose saves it goes on
        with. A process that begins may come to steps that another one gave up; one that only connects again does not,
        and what was given up stays so for the ranks that have not come to it yet."""
        if is_new_process:
            self._void.clear()
        for save in self._saves.values():
            if before is not None and save.ranks.get(local) == before:
                save.ranks[local] = connection

    def list_begun(self) -> list[Key]:
        """Return the saves that some rank is still to fill."""
        return list(self._saves)

    def list_passed(self, local: int, key: Key) -> list[Key]:
        """Return the saves that this local rank, which is at a newer one, has not said to be done with."""
        return [each for each, save in self._saves.items() if each < key and local not in save.done]

    def without(self, local: int, connection: C) -> list[Key]:
        """Return the saves that cannot be complete when this connection has ended."""
        saves = self._saves.items()
        return [k for k, save in saves if local not in save.done and save.ranks.get(local, connection) == connection]

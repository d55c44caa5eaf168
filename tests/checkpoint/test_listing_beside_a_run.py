"""Checkpoints are listed while a run saves others and removes these."""

from __future__ import annotations

from pathlib import Path

from everstep.checkpoint.catalog.listing import list_checkpoints
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, key

TRAINING = Training(rows=2)


class Overtaken(PosixStore):
    """A store in which the only checkpoint makes room for the next one, `times` times, just before it is read."""

    def __init__(self, folder: Path, times: int) -> None:
        super().__init__(folder)
        self._step, self._times = 1, times
        TRAINING.save(PosixStore(folder), key(1))

    def read(self, name: str) -> bytes:
        if self._step <= self._times and name == key(self._step).manifest_name:
            self._step += 1
            TRAINING.save(PosixStore(self.url), key(self._step))
            self.delete([name])
        return super().read(name)


def test_a_store_that_always_holds_a_checkpoint_is_never_listed_as_empty(tmp_path: Path) -> None:
    (found,) = list_checkpoints(Overtaken(tmp_path / "store", times=5))
    assert found.key == key(6)

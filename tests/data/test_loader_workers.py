"""Workers of a loader that begins within a restore or a session are forked from it, and hold nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

import everstep  # noqa: E402
from everstep.checkpoint.restore.node_cache import NodeCache  # noqa: E402
from everstep.checkpoint.slots.slots import Slots  # noqa: E402
from tests.checkpoint.sessions import session, state, steps_in  # noqa: E402

pytestmark = pytest.mark.torch


def make() -> Any:
    return stateful_dataloader.StatefulDataLoader(range(40), batch_size=2, num_workers=1)


def save_one(folder: Path) -> None:
    """A run saves step 10, and what it has in memory stays."""
    loader = make()
    ckpt = session(folder)
    ckpt.restore(loader=everstep.PerRank(loader))
    next(iter(loader))
    ckpt.save(10)
    ckpt.wait()
    ckpt.close(wait=False)


def test_slots_from_which_a_run_was_restored_are_filled_while_workers_of_its_loader_live(tmp_path: Path) -> None:
    save_one(tmp_path)
    loader = make()
    with session(tmp_path) as ckpt:
        assert ckpt.restore(loader=everstep.PerRank(loader)).tier == "memory"
        assert [worker.is_alive() for worker in loader._iterator._workers] == [True]
        assert not any(slot.is_read for slot in Slots(tmp_path / "memory"))
        for step in (11, 12):  # the second one into the slot that was restored
            ckpt.save(step)
    assert steps_in(tmp_path) == [10, 11, 12]


def test_the_memory_of_a_session_is_given_back_at_its_end_though_workers_that_were_forked_in_it_live(
    tmp_path: Path,
) -> None:
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, persistent_workers=True)
    with session(tmp_path) as ckpt:
        ckpt.track(model=state(1))
        ckpt.save(1)
        list(loader)
    assert [worker.is_alive() for worker in loader._iterator._workers] == [True]
    assert not (tmp_path / "memory").exists()


class Tells:
    """Notes when it takes in its state."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def state_dict(self) -> dict[str, Any]:
        return state(1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._events.append("loaded")


def test_memory_that_was_read_into_is_given_back_before_anything_takes_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    keep = NodeCache.keep

    def keep_and_tell(cache: NodeCache, *args: Any) -> None:
        events.append("given back")
        keep(cache, *args)

    monkeypatch.setattr(NodeCache, "keep", keep_and_tell)
    with session(tmp_path) as ckpt:
        ckpt.track(model=Tells(events))
        ckpt.save(1)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(model=Tells(events)).step == 1
    assert events == ["given back", "loaded"]

"""A rank leaves to rank 0 what a restore has brought, while its content stays, in any session of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import everstep
from everstep.checkpoint.session.checkpointer import SaveFailed
from tests.checkpoint import ranks
from tests.checkpoint.sessions import session

pytestmark = pytest.mark.torch


def add_by_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def add_by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] += 1


# torch counts no change of the tensor for these.
UNSEEN: tuple[Callable[[torch.Tensor], None], ...] = (add_by_data, add_by_numpy)


def averages_its_part(rank: int, folder: Path, add: Callable[[torch.Tensor], None]) -> tuple[list[str], list[float]]:
    """Each rank averages a part of its own in a dictionary that is empty when it is restored: rank 0 gets all parts."""
    failed: list[str] = []
    for start in (0, 1):
        state: dict[str, Any] = {}
        with contextlib.suppress(SaveFailed), session(folder, every="1h") as ckpt:
            ckpt.on("failed", lambda event: failed.append(event.why))
            ckpt.restore(state=state)
            add(state.setdefault(f"average{rank}", torch.zeros(2)))
            ckpt.save(start + 1)
    found = everstep.load(folder / "store")["state"]
    return failed, [float(each[0]) for each in found.values()]


@pytest.mark.parametrize("add", UNSEEN)
def test_a_change_that_torch_does_not_see_is_not_lost(add: Callable[[torch.Tensor], None], folder: Path) -> None:
    for failed, found in ranks.run(2, averages_its_part, folder, add):
        assert len(failed) == 1
        assert "state.average1 differs between ranks" in failed[0]
        assert found == [1.0, 1.0]


def updates_on_all_ranks(rank: int, folder: Path, add: Callable[[torch.Tensor], None]) -> float:
    for start in (0, 2):
        state: dict[str, Any] = {}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            for step in (start + 1, start + 2):
                add(state.setdefault("average", torch.zeros(2)))
                ckpt.save(step)
                ckpt.wait()
    return float(everstep.load(folder / "store")["state"]["average"][0])


@pytest.mark.parametrize("add", UNSEEN)
def test_what_all_ranks_change_alike_is_saved(add: Callable[[torch.Tensor], None], folder: Path) -> None:
    assert ranks.run(2, updates_on_all_ranks, folder, add) == [4.0, 4.0]


def begins_in_another_order(rank: int, folder: Path, sharing: bool) -> list[str]:
    """Rank 1 holds the same leaves in another order, or one tensor in two places, beside what is empty yet."""
    failed: list[str] = []
    one = torch.ones(2)
    pairs = [("a", one), ("b", one if sharing and rank else one.clone())]
    state = dict(reversed(pairs) if rank and not sharing else pairs) | {"best": None, "seen": []}
    with contextlib.suppress(SaveFailed), session(folder, every="1h") as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.restore(state=state)
        ckpt.save(1)
    return failed


@pytest.mark.parametrize("sharing", [False, True])
def test_states_with_something_empty_are_built_the_same_on_all_ranks(sharing: bool, folder: Path) -> None:
    for failed in ranks.run(2, begins_in_another_order, folder, sharing):
        assert len(failed) == 1
        assert "state is not built the same on rank 0" in failed[0]


class Loop:
    """An object whose state is in its attributes."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def tries_again(rank: int, folder: Path) -> tuple[dict[str, Any], list[int]]:
    """A script goes on with the objects that it has, in another session of its process."""
    state: dict[str, Any] = {"n": 0, "seen": [], "best": None}
    loop = Loop()
    for step in (1, 2, 3, 4):
        with session(folder, every="1h") as ckpt:
            assert ckpt.restore(state=state, loop=loop).step == step - 1
            state["n"] = step
            if not rank:
                state["seen"].append(step)
                state["best"] = torch.tensor(float(step))
                loop.seen.append(step)
            ckpt.save(step)
            ckpt.wait()
    loaded = everstep.load(folder / "store")
    return dict(loaded["state"]), loaded["loop"]["seen"]


def test_what_rank_0_alone_keeps_is_saved_by_a_script_that_tries_again_in_its_process(folder: Path) -> None:
    for state, seen in ranks.run(2, tries_again, folder):
        assert state == {"n": 4, "seen": [1, 2, 3, 4], "best": torch.tensor(4.0)}
        assert seen == [1, 2, 3, 4]


def restores_in_two_calls(rank: int, folder: Path) -> list[int]:
    for step in (1, 2, 3):
        state: dict[str, Any] = {}
        other = {"n": 0}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state, other=other)
            ckpt.restore(other=other)
            ckpt.track(state=state, other=other)
            if not rank:
                state.setdefault("seen", []).append(step)
            ckpt.save(step)
            ckpt.wait()
    return list(everstep.load(folder / "store")["state"]["seen"])


def test_a_later_restore_of_other_objects_forgets_nothing(folder: Path) -> None:
    assert ranks.run(2, restores_in_two_calls, folder) == [[1, 2, 3]] * 2


def starts_over(rank: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Rank 1 alone holds what a restore of another session had brought, in a run that is another one."""
    failed: list[str] = []
    with session(folder, every="1h") as ckpt:
        ckpt.track(state={} if rank else {"best": 1.5})
        ckpt.save(1)
    state: dict[str, Any] = {}
    with session(folder, every="1h") as ckpt:
        ckpt.restore(state=state)
    with session(folder, every="1h") as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.start_over(state={"best": 1.5} if rank else {})
        ckpt.save(2)
    return failed, dict(everstep.load(folder / "store")["state"])


def test_a_run_that_starts_over_leaves_nothing_to_rank_0(folder: Path) -> None:
    assert ranks.run(2, starts_over, folder) == [([], {"best": 1.5})] * 2

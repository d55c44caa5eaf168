"""Leaves that a restore has brought to a rank are left to rank 0 while they stay as they came, in any session."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

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


def evaluate(folder: Path) -> None:
    """Read a checkpoint of a live run in its process, by a session of its own."""
    reader = session(folder)
    reader.restore(state={})
    reader.close(wait=False)


def evaluates_beside_training(rank: int, folder: Path) -> tuple[list[str], list[list[str]], float]:
    """A run that was restarted restores its own newest checkpoint into other objects, between its saves."""
    failed: list[str] = []
    held: list[list[str]] = []
    for start in (0, 2):
        state: dict[str, Any] = {"n": 0}
        with contextlib.suppress(SaveFailed), session(folder, every="1h") as ckpt:
            ckpt.on("failed", lambda event: failed.append(event.why))
            ckpt.restore(state=state)
            for step in (start + 1, start + 2):
                state["n"] = step
                if not rank:
                    state["best"] = 1 / step
                ckpt.save(step)
                ckpt.wait()
                held.append(sorted(everstep.load(folder / "store")["state"]))
                evaluate(folder)
    return failed, held, float(everstep.load(folder / "store")["state"]["best"])


def test_an_evaluation_in_the_process_changes_nothing_for_the_run(folder: Path) -> None:
    assert ranks.run(2, evaluates_beside_training, folder) == [([], [["best", "n"]] * 4, 0.25)] * 2


def evaluates_what_another_rank_keeps(rank: int, folder: Path) -> list[list[str]]:
    """Rank 1 alone keeps something; the evaluation brings it to all ranks, and the run holds it on rank 1 as before."""
    held: list[list[str]] = []
    state: dict[str, Any] = {"kept": 1.5, "tensor": torch.ones(2)} if rank else {}
    for start in (0, 2):
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            for step in (start + 1, start + 2):
                ckpt.save(step)
                ckpt.wait()
                held.append(sorted(everstep.load(folder / "store")["state"]))
                evaluate(folder)
    return held


def test_what_another_rank_keeps_is_saved_after_an_evaluation_in_the_process(folder: Path) -> None:
    assert ranks.run(2, evaluates_what_another_rank_keeps, folder) == [[["kept", "tensor"]] * 4] * 2


def removes_and_tries_again(rank: int, folder: Path) -> list[tuple[list[str], Any]]:
    """Rank 0 removes what others have received, and puts another thing there after the script has tried again."""
    found = []
    state: dict[str, Any] = {"n": 0}
    with session(folder, every="1h") as ckpt:
        ckpt.track(state={"n": 0} if rank else {"n": 0, "best": 1.5})
        ckpt.save(1)
    for step in (2, 3, 4):
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            state["n"] = step
            if not rank and step == 2:
                del state["best"]
            if not rank and step == 4:
                state["best"] = {"step": torch.ones(1)}
            ckpt.save(step)
            ckpt.wait()
        loaded = everstep.load(folder / "store")["state"]
        found.append((sorted(loaded), loaded.get("best")))
    return found


def test_what_rank_0_has_removed_does_not_come_back_when_a_script_tries_again(folder: Path) -> None:
    best = {"step": torch.ones(1)}
    expected = [(["n"], None), (["n"], None), (["best", "n"], best)]
    assert ranks.run(2, removes_and_tries_again, folder) == [expected] * 2


def tracks_after_a_restore(rank: int, folder: Path) -> int:
    for step in (1, 2, 3):
        state: dict[str, Any] = {}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            if not rank:
                state["best"] = torch.ones(step)
            ckpt.track(state=state, more={"n": step})
            ckpt.save(step)
            ckpt.wait()
    return len(everstep.load(folder / "store")["state"]["best"])


def test_what_rank_0_has_made_larger_since_a_restore_is_tracked(folder: Path) -> None:
    assert ranks.run(2, tracks_after_a_restore, folder) == [3, 3]


def drops_what_others_keep(rank: int, folder: Path, all_do: bool) -> list[str]:
    """Each rank keeps a tensor in a dictionary. All, or rank 0, drop those of others that a restore has brought."""
    told: list[str] = []
    log = logging.getLogger("everstep.checkpoint")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    for step in (1, 2, 3):
        state: dict[str, Any] = {}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            if step == 1:
                state[f"kept{rank}"] = torch.ones(2)
            for other in {"kept0", "kept1", "kept2"} - {f"kept{rank}"} if all_do or not rank else set():
                state.pop(other, None)
            ckpt.save(step)
            ckpt.wait()
    return [each for each in told if "is not saved" in each]


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_keeps_what_rank_0_has_dropped_is_told_that_it_is_not_saved(world: int, folder: Path) -> None:
    first, *others = ranks.run(world, drops_what_others_keep, folder, True)
    assert first == []
    for rank, told in enumerate(others, 1):
        assert len(told) == 1
        assert told[0].startswith(
            f"rank {rank} holds state.kept{rank} as a restore has brought it, and rank 0 holds it "
        )
        assert "everstep.PerRank()" in told[0]


def test_nobody_is_told_what_rank_0_drops_of_what_all_hold(folder: Path) -> None:
    assert ranks.run(3, drops_what_others_keep, folder, False) == [[], [], []]


def averages_shards(rank: int, folder: Path) -> tuple[list[str], list[str]]:
    """Averages of a sharded parameter: one is held when the run begins, the other comes with the first step."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("everstep.checkpoint").addHandler(handler)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for start in (0, 1):
        state: dict[str, Any] = {"held": torch.zeros_like(parameter)}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            if not start:
                state["came"] = parameter.clone()
                ckpt.save(1)
                ckpt.track(state=state, more={"held": torch.zeros_like(parameter)})
                ckpt.save(2)
    return [each for each in told if "DTensor" in each], [type(state[name]).__name__ for name in ("held", "came")]


def test_shards_that_a_new_process_will_hold_whole_are_told_of(folder: Path) -> None:
    (told, kinds), (others, _) = ranks.run(2, averages_shards, folder)
    assert kinds == ["DTensor", "Tensor"]
    assert len(told) == 1
    assert told[0].startswith("state.came is a DTensor that was not there when its object was given to restore()")
    assert not others, "rank 0 says it for all"

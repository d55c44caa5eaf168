"""Ranks that hold the same leaves, but share them otherwise or hold them in another order, are told so at a save."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save import planning
from everstep.checkpoint.session.checkpointer import SaveFailed
from everstep.checkpoint.state.flat import flatten_objects
from everstep.checkpoint.state.kinds import FromRank, PerRank
from tests.checkpoint import ranks
from tests.checkpoint.sessions import session, steps_in

pytestmark = pytest.mark.torch


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Extra(nn.Module):  # type: ignore[misc]
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def trained(how: str, is_sharing: bool, is_last_first: bool = False) -> dict[str, Any]:
    """A model of which rank 1 has no element of the last layer when it is sharded, and its optimizer."""
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    if how == "sharded":
        fully_shard(model)
    if how == "replicated":
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    params = list(model.parameters())
    for some in (params[2:], params) if is_last_first else (params,):
        for param in some:
            param.grad = torch.ones_like(param)
        optimizer.step()
    with torch.no_grad():
        for param in params:
            state = optimizer.state[param]
            state["momentum_buffer"].fill_(1.0)
            state["same"] = state["momentum_buffer"] if is_sharing else state["momentum_buffer"].clone()
            param.fill_(1.0)
    return {"model": model, "optimizer": optimizer}


def in_order(first: bool, make: Any = dict) -> Any:
    pairs = [("a", torch.ones(2)), ("b", torch.zeros(2))]
    return make(pairs if first else reversed(pairs))


def shared(is_one: bool) -> dict[str, Any]:
    one = torch.ones(2)
    return {"a": one, "b": one if is_one else one.clone()}


def why_not_planned(objects: dict[str, Any]) -> str:
    rank = dist.get_rank()
    try:
        planning.make_save_plan(lambda: flatten_objects(objects, rank=rank), rank, ranks.world_group(), compare=True)
    except CheckpointError as error:
        return str(error)
    return ""


def plan_all(rank: int) -> dict[str, str]:
    """Each of these is other on rank 1."""
    one = rank == 0
    return {
        "optimizer.state.0.weight": why_not_planned(trained("replicated", one)),
        "optimizer.state.0.weight when sharded": why_not_planned(trained("sharded", one)),
        "optimizer.state.0.bias": why_not_planned(trained("replicated", True, is_last_first=one)),
        "values": why_not_planned({"values": in_order(one)}),
        "shared": why_not_planned({"shared": shared(one)}),
        "kind": why_not_planned({"kind": in_order(True, dict if one else OrderedDict)}),
        "stateful": why_not_planned({"stateful": Stateful({"inner": in_order(one)})}),
        "extra": why_not_planned({"extra": Extra(shared(one))}),
    }


def test_ranks_that_share_or_order_otherwise_are_refused_with_both_and_the_name() -> None:
    first, second = ranks.run(2, plan_all)
    assert first == second
    for name, why in first.items():
        assert "on rank 0 (" in why, name
        assert "on rank 1 (" in why, name
        said = why.removeprefix("the ranks' states do not fit together: ")
        # Of the parameters of an optimizer any one is named.
        assert said.startswith(f"{name.partition('.state.')[0]}"), (name, why)
        assert "is not built the same" in said


# What the two ranks have at one place: a value and what lies in a dictionary, two kinds of containers, a value and a
# tensor, an empty list and a tensor.
OTHER_KINDS: dict[str, tuple[Any, Any]] = {
    "best": (float("inf"), {"step": 3}),
    "seen": ([torch.ones(1)], {"a": torch.ones(1)}),
    "pair": ([torch.ones(1)], (torch.ones(1),)),
    "loss": (float("inf"), torch.ones(())),
    "kept": ([], torch.ones(2)),
    "last": (torch.ones(2), {"a": torch.ones(2)}),
}


def plan_other_kinds(rank: int) -> list[str]:
    states = [{"epoch": 1, name: pair[rank]} for name, pair in OTHER_KINDS.items()]
    return [why_not_planned({"state": each}) for state in states for each in (state, Stateful(state))]


def test_ranks_that_hold_other_kinds_of_things_at_one_place_are_refused_with_both_and_the_name() -> None:
    first, second = ranks.run(2, plan_other_kinds)
    assert first == second
    for name, why in zip([name for name in OTHER_KINDS for _ in range(2)], first, strict=True):
        assert f"state.{name}" in why, name
        assert "rank 0" in why, name
        assert "rank 1" in why, name


def becomes_of_other_kinds(rank: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Rank 0 has another kind of thing at the second save, for which no new plan is made."""
    failed: list[str] = []
    state: dict[str, Any] = {"best": None}
    with session(folder, every="1h") as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.track(state=state)
        for step, mine, others in ((1, None, None), (2, {"step": 2}, 1), (3, 1, 1)):
            state["best"] = others if rank else mine
            ckpt.save(step)
            with contextlib.suppress(SaveFailed):
                ckpt.wait()
    return failed, everstep.load(folder / "store", step=3)["state"]


def test_a_state_that_nobody_could_build_is_not_committed_whenever_ranks_come_to_hold_it(folder: Path) -> None:
    for failed, loaded in ranks.run(2, becomes_of_other_kinds, folder):
        assert len(failed) == 1
        assert "state.best: is held by one rank, and state.best.step by another" in failed[0]
        assert loaded == {"best": 1}
    assert steps_in(folder) == [1, 3]


def keeps_more_and_more(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 0 alone keeps something, from the first save on and from the second on."""
    state: dict[str, Any] = {"losses": [] if rank else [1.5], "best": None, "by_epoch": None, "seen": {}, "n": 0}
    with session(folder, every="1h") as ckpt:
        ckpt.track(state=state, loop=Stateful(state))
        for step in (1, 2, 3):
            state["n"] = step
            ckpt.save(step)
            ckpt.wait()
            if not rank:
                state["losses"].append(1.0)
                state |= {"best": 0.5 / step, "by_epoch": {step: 1.0}, "seen": {"a": step}}
    loaded = everstep.load(folder / "store")
    assert loaded["state"] == loaded["loop"]
    return dict(loaded["state"])


def test_what_one_rank_alone_keeps_is_saved_at_each_save_where_others_have_nothing(folder: Path) -> None:
    kept = {"losses": [1.5, 1.0, 1.0], "best": 0.25, "by_epoch": {2: 1.0}, "seen": {"a": 2}, "n": 3}
    assert ranks.run(2, keeps_more_and_more, folder) == [kept, kept]
    assert steps_in(folder) == [1, 2, 3]


def keeps_over_restarts(rank: int, folder: Path) -> list[tuple[int, Any]]:
    """Rank 0 alone keeps a history; the others find in their state what was restored, and leave it there."""
    found = []
    for _ in range(3):
        log: dict[str, Any] = {
            "losses": [],
            "grids": [],
            "best": None,
            "by_epoch": {},
            "tensor": None,
            "deep": {"at": {}},
        }
        loop = Stateful({"seen": [], "steps": 0})
        state: dict[str, Any] = {"n": 0, "everywhere": torch.zeros(2), "log": log}
        with session(folder, every="1h") as ckpt:
            start = ckpt.restore(state=state, loop=loop).step
            for step in (start + 1, start + 2):
                state["n"] = step
                state["everywhere"] += 1
                state.setdefault("by_all", torch.zeros(2)).add_(1)
                loop.state["steps"] += 1
                if not rank:
                    log["losses"].append(step)
                    log["grids"].append(torch.full((2,), float(step)))
                    log |= {"best": 1 / step, "tensor": torch.full((3,), float(step)), "array": np.full(500, step)}
                    log["by_epoch"][step] = log["deep"]["at"][f"{step}"] = step
                    loop.state["seen"].append(step)
                ckpt.save(step)
                ckpt.wait()
        loaded = everstep.load(folder / "store")
        found.append((start, repr((loaded["state"], loaded["loop"]) if rank else (state, loop.state))))
    return found


def test_what_rank_0_alone_keeps_is_saved_after_restarts_that_bring_it_to_all_ranks(folder: Path) -> None:
    first, second = ranks.run(2, keeps_over_restarts, folder)
    assert [start for start, _ in first] == [0, 2, 4]
    assert first == second
    assert "'losses': [1, 2, 3, 4, 5, 6]" in first[2][1]
    assert "'by_all': tensor([6., 6.])" in first[2][1]


def removes_what_others_received(rank: int, folder: Path) -> list[str]:
    found = []
    for step in (1, 2, 3):
        state: dict[str, Any] = {"n": 0, "seen": {}}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            state["n"] = step
            if not rank and step == 1:
                state |= {"best": 1.5, "a": torch.ones(2)}
                state["seen"]["x"] = 1
            if not rank and step == 2:
                del state["best"], state["a"], state["seen"]["x"]
            ckpt.save(step)
            ckpt.wait()
        found.append(repr(everstep.load(folder / "store")["state"]))
    return found


def test_what_rank_0_removes_is_gone_though_others_received_it(folder: Path) -> None:
    first, second = ranks.run(2, removes_what_others_received, folder)
    assert first == second
    assert first[1:] == ["{'n': 2, 'seen': {}}", "{'n': 3, 'seen': {}}"]


class Copied(Stateful):
    """An object that returns a copy of its state, another one each time."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.asked = 0  # since it has taken in a state

    def state_dict(self) -> Any:
        self.asked += 1
        return copy.deepcopy(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.asked = 0
        self.state = {key: state.pop(key) for key in list(state)}


def keeps_in_a_copied_state(rank: int, folder: Path) -> list[tuple[int, str]]:
    found = []
    for _ in range(3):
        loop = Copied({"n": 0, "best": None, "seen": []})
        with session(folder, every="1h") as ckpt:
            start = ckpt.restore(loop=loop).step
            asked = loop.asked if start else 0
            loop.state["n"] = start + 1
            if not rank:
                loop.state["best"] = {"weights": torch.full((2,), float(start)), "array": np.full(500, start)}
                loop.state["seen"].append(start)
            ckpt.save(start + 1)
            ckpt.wait()
        found.append((asked, repr(everstep.load(folder / "store")["loop"])))
    return found


def test_an_object_that_copies_its_state_is_saved_after_restarts_and_not_asked_by_the_restore(folder: Path) -> None:
    first, second = ranks.run(2, keeps_in_a_copied_state, folder)
    assert first == second
    assert [asked for asked, _ in first] == [0, 0, 0]
    assert "'weights': tensor([2., 2.])" in first[2][1]
    assert "'seen': [0, 1, 2]" in first[2][1]


def restores_twice(rank: int, folder: Path) -> list[Any]:
    for step in (1, 2, 3):
        state: dict[str, Any] = {"seen": [], "best": None}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            ckpt.restore(state=state)
            if not rank:
                state["seen"].append(step)
                state["best"] = torch.full((2,), float(step))
            ckpt.save(step)
            ckpt.wait()
    return list(everstep.load(folder / "store")["state"]["seen"])


def test_what_rank_0_alone_keeps_is_saved_after_a_session_has_restored_it_twice(folder: Path) -> None:
    assert ranks.run(2, restores_twice, folder) == [[1, 2, 3]] * 2


def builds_otherwise(rank: int, folder: Path) -> list[str]:
    """Rank 0 alone keeps averages; it holds one in two places, then two, then others in another order."""
    found = []
    for step in (1, 2, 3):
        state: dict[str, Any] = {"n": 0}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            state["n"] = step
            if not rank:
                last = {"weights": torch.full((2,), float(step))}
                log = state["log"] = {"last": last, "best": state.get("log", {}).get("best", last)}
                if step == 3:
                    log["last"] = log.pop("last")
            ckpt.save(step)
            ckpt.wait()
        found.append(repr(everstep.load(folder / "store")["state"]["log"]))
    return found


def test_what_rank_0_builds_otherwise_after_a_restart_is_saved_as_it_builds_it(folder: Path) -> None:
    first, second = ranks.run(2, builds_otherwise, folder)
    assert first == second
    best = "'best': {'weights': tensor([1., 1.])}"
    assert first[1:] == [
        f"{{'last': {{'weights': tensor([2., 2.])}}, {best}}}",
        f"{{{best}, 'last': {{'weights': tensor([3., 3.])}}}}",
    ]


def empties_on_rank_0(rank: int, folder: Path) -> list[float]:
    """All ranks fill a list, and rank 0 empties it before each save."""
    for step in (1, 2, 3):
        state: dict[str, Any] = {"n": 0, "losses": []}
        with session(folder, every="1h") as ckpt:
            ckpt.restore(state=state)
            state["n"] = step
            state["losses"].append(torch.tensor([float(step)]))
            if not rank:
                state["losses"].clear()
            ckpt.save(step)
            ckpt.wait()
    return [float(each) for each in everstep.load(folder / "store")["state"]["losses"]]


def test_a_list_that_came_by_a_restore_and_is_longer_by_now_is_saved_whole(folder: Path) -> None:
    assert ranks.run(2, empties_on_rank_0, folder) == [[1.0, 2.0, 3.0]] * 2


def changes_later(rank: int, folder: Path) -> tuple[list[str], float]:
    """All ranks change alike an array that the restore has brought to them, after the first save of the run."""
    failed: list[str] = []
    for start in (0, 3):
        state: dict[str, Any] = {"n": 0}
        with session(folder, every="1h") as ckpt:
            ckpt.on("failed", lambda event: failed.append(event.why))
            ckpt.restore(state=state)
            state.setdefault("counts", np.zeros(500))
            for step in (start + 1, start + 2, start + 3):
                state["n"] = step
                if step > start + 1:
                    state["counts"] += 1
                ckpt.save(step)
                with contextlib.suppress(SaveFailed):
                    ckpt.wait()
    return failed, float(everstep.load(folder / "store")["state"]["counts"].sum())


def test_an_array_that_came_by_a_restore_is_saved_as_all_ranks_have_it_once_these_change_it(folder: Path) -> None:
    assert ranks.run(2, changes_later, folder) == [([], 4 * 500.0)] * 2


def plan_ordinary(rank: int) -> list[str]:
    found = [
        why_not_planned(trained(how, is_sharing)) for how in ("sharded", "replicated") for is_sharing in (False, True)
    ]
    found += [why_not_planned(trained(how, True, is_last_first=True)) for how in ("sharded", "replicated")]
    # Others than these leaves: a stage of a pipeline each, of one object.
    stages = {0: {"a": torch.ones(1), "c": torch.ones(2)}, 1: {"b": torch.ones(1), "d": torch.zeros(1)}}
    found.append(why_not_planned({"stages": dict(reversed(stages[rank].items())) if rank else stages[rank]}))
    found.append(why_not_planned({"own": PerRank(in_order(rank == 0)), "first": FromRank(shared(rank == 0))}))
    return found


def test_ranks_that_build_the_same_or_hold_other_leaves_are_not_refused() -> None:
    assert ranks.run(2, plan_ordinary) == [[""] * 8] * 2

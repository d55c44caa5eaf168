"""Parameters that a checkpoint does not have, or that are not wanted of it, keep what their optimizer holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

HEAD = ("head.weight", "head.bias")
LEFT_OUT: dict[str, Any] = {"model.head.": None}


def trained(seed: int, *, has_head: bool = True, dtype: Any = torch.float32) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("body", nn.Linear(3, 3, dtype=dtype))
    if has_head:
        model.add_module("head", nn.Linear(3, 2, dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(seed):
        model(torch.rand(4, 3, dtype=dtype)).sum().backward()
        optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].double() / 3  # of another type than its parameter
    return {"model": model, "optimizer": optimizer}


def states(objects: dict[str, Any]) -> dict[str, dict[str, Any]]:
    held = objects["optimizer"].state
    return {
        name: {key: each.clone() for key, each in held[param].items()}
        for name, param in objects["model"].named_parameters()
    }


def by_restore(folder: Path, objects: dict[str, Any], rename: Any) -> Any:
    with session(folder) as ckpt:
        return ckpt.restore(strict=False, rename=rename, **objects)


def by_load_into(folder: Path, objects: dict[str, Any], rename: Any) -> Any:
    return everstep.load_into(folder / "store", strict=False, rename=rename, **objects)


@pytest.mark.parametrize("load", [by_restore, by_load_into])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("is_saved", [False, True], ids=["not-in-the-checkpoint", "left-out-by-rename"])
def test_what_a_checkpoint_does_not_give_keeps_its_own_state(
    is_saved: bool, dtype: Any, load: Callable[..., Any], tmp_path: Path
) -> None:
    theirs = trained(1, has_head=is_saved, dtype=dtype)
    ours = trained(2, dtype=dtype)
    expected = {**states(theirs), **{name: state for name, state in states(ours).items() if name in HEAD}}
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), dict(theirs))
    restored = load(tmp_path, ours, LEFT_OUT if is_saved else None)
    assert {"model.head.weight", "model.head.bias"} <= set(restored.missing)
    found = states(ours)
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert ranks.same(found[name], state), name
        assert all(found[name][key].dtype is each.dtype for key, each in state.items())


def test_a_state_that_was_not_there_yet_when_saved_is_none_after_a_restore(tmp_path: Path) -> None:
    """Only for a parameter that the checkpoint knows: it had taken no step."""
    ours = trained(2)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), dict(trained(0)))
    by_load_into(tmp_path, ours, None)
    assert not ours["optimizer"].state


def test_load_leaves_out_what_an_optimizer_holds_of_a_parameter_that_is_left_out(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path), ranks.key(1), dict(trained(1)))
    loaded = everstep.load(tmp_path, rename=LEFT_OUT)
    assert sorted(loaded["model"]) == sorted(loaded["optimizer"]["state"]) == ["body.bias", "body.weight"]
    assert [sorted(group["params"]) for group in loaded["optimizer"]["param_groups"]] == [["body.bias", "body.weight"]]

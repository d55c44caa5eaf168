"""A session with wrong arguments is rejected when it is made, with the argument and the allowed values."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import numpy as np

import everstep
from everstep.checkpoint.session.arguments import CHECKS
from tests.checkpoint.grouping import GROUPS, group_session
from tests.checkpoint.sessions import state

pytestmark = pytest.mark.torch
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md").read_text()

COUNTS = (0, -1, 1.5, "3", True, math.nan)
TIMES = (-1, math.nan, math.inf, "10", True, 1e12)
WRONG: dict[str, tuple[Any, ...]] = {
    "store": ("", 5, b"x", "memory://run"),
    "every": (0, -5, "soon", "", math.nan, True, b"10m"),
    "every_steps": (*COUNTS, 2.5),
    "keep_last": COUNTS,
    "keep_every": COUNTS,
    "keep_best": COUNTS,
    "best_metric": (None, "", 5),
    "best_mode": ("x", None, "MIN"),
    "policy": ("Wait", None, "", True),
    "slots": (*COUNTS, None),
    "peers": (2, -1, True, 1.0, "1"),
    "directory": ("", 5),
    "attempt": ((1,), (1, 2, 3), (-1, 0), (0.5, 1), "12", (0, 10**10), 3),
    "checksum": ("md5", None, "XXH3_64"),
    "allow_pickle": (1, None, "yes"),
    "time_between_failures": (0, *TIMES),
    "timeout": (0, None, *TIMES),
    "commit_timeout": (0, None, *TIMES),
    "stall_after": (0, None, *TIMES),
    "linger": (None, *TIMES),
    "options": ([], "part_size", {1: 2}),
}


DIRECT = inspect.signature(everstep.checkpointer).parameters.keys() - GROUPS.keys()
FIELDS = {each.name for group in GROUPS.values() for each in fields(group)}


@pytest.mark.parametrize("name", sorted(DIRECT | FIELDS))
def test_each_argument_that_is_wrong_is_told_at_once(name: str, tmp_path: Path) -> None:
    assert name in CHECKS
    for value in WRONG[name]:
        given: dict[str, Any] = {"store": tmp_path / "store", "directory": tmp_path / "memory", name: value}
        with pytest.raises(ValueError, match="and must be") as caught:
            everstep.checkpointer(**group_session(**given))
        assert str(caught.value).startswith(f"{name} is {value!r}, and must be ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("of_best", [{"best_metric": "accuracy"}, {"best_mode": "max"}])
def test_what_the_best_checkpoints_are_is_not_said_without_how_many_stay(of_best: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give keep_best, how many of them stay"):
        everstep.RetentionOptions(**of_best)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_options_that_is_none_is_told_at_once(name: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {name: tmp_path / "memory"}
    with pytest.raises(ValueError, match=rf"^{name} is .*, and must be a {GROUPS[name].__name__}, as {name}="):
        everstep.checkpointer(tmp_path / "store", **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keyword", "place"),
    [("linger", "times=TimeOptions(linger=…)"), ("slots", "memory=MemoryOptions(slots=…)")],
)
def test_an_option_outside_of_its_group_is_told_its_place(keyword: str, place: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {keyword: 1}
    with pytest.raises(TypeError) as caught:
        everstep.checkpointer(tmp_path / "store", **given)
    assert str(caught.value) == f"Checkpointer() has no keyword {keyword!r}: give it as {place}"


@pytest.mark.parametrize("group", GROUPS.values())
def test_the_page_names_every_option(group: type[Any]) -> None:
    (row,) = re.findall(rf"^\| `\w+={group.__name__}\(…\)` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [each.name for each in fields(group)]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        name: np.int64(2) for name in ("every_steps", "keep_last", "keep_every", "keep_best", "slots")
    }
    times: dict[str, Any] = {
        name: np.float32(100) for name in ("every", "timeout", "commit_timeout", "stall_after", "linger")
    }
    store, memory = tmp_path / "store", tmp_path / "memory"
    attempt: Any = (np.int64(1), 0)
    with everstep.checkpointer(store, attempt=attempt, **group_session(directory=memory, **options, **times)) as ckpt:
        ckpt.track(state=state(1))
        assert ckpt.save(1).saves
        ckpt.wait()
    assert [each.step for each in everstep.list_checkpoints(store)] == [1]

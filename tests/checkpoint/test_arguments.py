"""A session with wrong arguments is rejected when it is made, with the argument and the allowed values."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import numpy as np

import everstep
from everstep.checkpoint.session.arguments import CHECKS
from tests.checkpoint.sessions import state

pytestmark = pytest.mark.torch

COUNTS = (0, -1, 1.5, "3", True, math.nan)
TIMES = (-1, math.nan, math.inf, "10", True, 1e12)
WRONG: dict[str, tuple[Any, ...]] = {
    "store": ("", 5, None, b"x"),
    "every": (0, -5, "soon", "", math.nan, True, b"10m"),
    "every_steps": (*COUNTS, 2.5),
    "keep_last": (*COUNTS, None),
    "keep_every": COUNTS,
    "keep_best": COUNTS,
    "best_metric": (None, "", 5),
    "best_mode": ("x", None, "MIN"),
    "policy": ("Wait", None, "", True),
    "slots": (*COUNTS, None),
    "peers": (2, -1, True, 1.0, "1"),
    "memory": ("", 5),
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


@pytest.mark.parametrize("name", [*inspect.signature(everstep.checkpointer).parameters])
def test_each_argument_that_is_wrong_is_told_at_once(name: str, tmp_path: Path) -> None:
    assert name in CHECKS
    for value in WRONG[name]:
        given: dict[str, Any] = {"store": tmp_path / "store", "memory": tmp_path / "memory", name: value}
        with pytest.raises(ValueError, match="and must be") as caught:
            everstep.checkpointer(**given)
        assert str(caught.value).startswith(f"{name} is {value!r}, and must be ")
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        name: np.int64(2) for name in ("every_steps", "keep_last", "keep_every", "keep_best", "slots")
    }
    times: dict[str, Any] = {
        name: np.float32(100) for name in ("every", "timeout", "commit_timeout", "stall_after", "linger")
    }
    store, memory = tmp_path / "store", tmp_path / "memory"
    attempt: Any = (np.int64(1), 0)
    with everstep.checkpointer(store, memory=memory, attempt=attempt, **options, **times) as ckpt:
        ckpt.track(state=state(1))
        assert ckpt.save(1).saves
        ckpt.wait()
    assert [each.step for each in everstep.list_checkpoints(store)] == [1]

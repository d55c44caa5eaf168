"""A writer that ends removes its slots while others list them: these find none, which is no error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.slots.slots import Claim, Slots

KEY = Key(Attempt(0, 1), 20)

ASKED: dict[str, Callable[[Slots], object]] = {
    "all": list,
    "whole": Slots.whole,
    "newest": Slots.newest,
    "newest claimed": Slots.find_newest_claimed,
    "first": lambda slots: slots.first(2),
    "surplus": lambda slots: slots.surplus(0),
    "cleared": Slots.clear_removed,
    "read": lambda slots: [slot for slot in slots if slot.is_read],
    "removed": lambda slots: None if slots.remove() else slots,
}


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    made = Slots.create(tmp_path / "memory", 2)
    for slot in made:
        slot.claim(Claim(KEY, 1, 0, 1))
    return made


def removing_first(folder: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(path: Any = ".") -> Any:
        if not isinstance(path, int) and Path(path) == folder:
            shutil.rmtree(folder, ignore_errors=True)
        return call(path)

    return run


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_memory_that_is_removed_right_before_it_is_listed_has_no_slots(
    ask: Callable[[Slots], object], slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        for name in ("scandir", "listdir"):
            patched.setattr(os, name, removing_first(slots.directory, getattr(os, name)))
        assert not ask(slots)
    assert not slots.directory.exists()


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_slots_that_are_removed_right_after_they_were_listed_are_none(
    ask: Callable[[Slots], object], slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_then_remove(this: Slots) -> Any:
        found = listed(this)
        shutil.rmtree(slots.directory, ignore_errors=True)
        return found

    listed = Slots.__iter__
    monkeypatch.setattr(Slots, "__iter__", list_then_remove)
    found = ask(slots)
    assert not found or ask in (ASKED["all"], ASKED["first"], ASKED["surplus"])

"""A small session on a folder, what it trains, and what it has saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import everstep
from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.session.checkpointer import Checkpointer
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.grouping import group_session


def session(folder: Path, **options: Any) -> Checkpointer:
    """A session whose waits end within a test's patience."""
    common: dict[str, Any] = {"directory": folder / "memory", "timeout": 20.0, "commit_timeout": 20.0, "linger": 20.0}
    if "every" not in options:
        common["every_steps"] = 10
    return everstep.checkpointer(folder / "store", **group_session(**common | options))


def claim(ckpt: Checkpointer) -> WriterConnection:
    """Claim the node and its writer, as the first step or save of a session does."""
    return ckpt._claimed().node


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step)), "step": torch.tensor(step)}


class Model:
    """Its state follows from the step that it has trained."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return state(self.at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["step"])
        assert torch.equal(state["weights"], torch.full((1000,), float(self.at)))


def steps_in(folder: Path) -> list[int]:
    return sorted(key.step for key in list_candidates(PosixStore(folder / "store")))


def train(ckpt: Checkpointer, model: Model, until: int, pause: float = 0.0) -> None:
    for step in range(model.at + 1, until + 1):
        time.sleep(pause)  # this is the work of a step
        model.at = step
        ckpt.step(step)

"""Processes compute what one process computes, as threads do in `test_transparency`.

All pairs of choices but for models, of which each has some of the schedules; with all of them under `chaos`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest

pytest.importorskip("torch")

from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.schedules.table import NAMES
from everstep.pipeline.transport.gloo import ProcessGroups
from everstep.pipeline.transport.grid import make_grid
from tests.checkpoint.ranks import run
from tests.pipeline.covering import pairwise
from tests.pipeline.models import CASES
from tests.pipeline.training import Setting, Trained, alone, apart, merged, setting_of, train

pytestmark = pytest.mark.torch

SHAPES = ((2, 1), (3, 1), (4, 1), (2, 2))  # ranks, replicas
CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": NAMES,
    "shape": SHAPES,
    "batch": ("divisible", "uneven", "small"),
    "recompute": (False, True),
    "sharded": (False, True),
    "clip": (None, 0.1),
    "bucket": (EngineOptions.bucket, 1),
}
SOME = [{**row, "case": case} for row, case in zip(pairwise(CHOICES), cycle(CASES), strict=False)]
ALL = pairwise({"case": tuple(CASES), **CHOICES})


def settings(rows: Sequence[dict[str, Any]], shape: tuple[int, int]) -> list[Setting]:
    ranks, replicas = shape
    return [setting_of({**row, "ranks": ranks, "replicas": replicas}) for row in rows if row["shape"] == shape]


def _train(rank: int, settings: Sequence[Setting]) -> list[Trained]:
    first = settings[0]
    transport = ProcessGroups(make_grid(first.ranks * first.replicas, first.ranks), timeout=60)
    return [train(setting, transport) for setting in settings]


def check(settings: Sequence[Setting], timeout: float) -> None:
    """The same processes train one setting after the other."""
    ranks = run(settings[0].ranks * settings[0].replicas, _train, settings, timeout=timeout)
    for setting, trained in zip(settings, zip(*ranks, strict=True), strict=True):
        assert apart(merged(trained), alone(setting)) < 1e-10, setting


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_processes_train_as_one_process_does(shape: tuple[int, int]) -> None:
    check(settings(SOME, shape), 60)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_processes_train_every_model_by_every_schedule(shape: tuple[int, int]) -> None:
    check(settings(ALL, shape), 500)

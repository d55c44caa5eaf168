"""A rank that dies or stands still is named on all others in time, wherever it is and whatever they wait for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from everstep.coordination.errors import RankLost
from everstep.coordination.heartbeat import Heartbeat
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.transport.gloo import ProcessGroups
from everstep.pipeline.transport.grid import make_grid
from tests.checkpoint.ranks import run
from tests.pipeline.by_hand import Part, cut, recipe
from tests.pipeline.models import CASES, Batch
from tests.pipeline.training import Setting, batch_of, schedule_of, share

pytestmark = pytest.mark.torch

TIMEOUT = 2.0


@contextlib.contextmanager
def watched(transport: ProcessGroups, progress: Any = lambda: 0) -> Iterator[Heartbeat]:
    heart = Heartbeat(dist.get_rank(), TIMEOUT, progress, lambda lost: transport.abort(str(lost)))
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, heart.address)
    heart.start(addresses, b"of this job")
    try:
        yield heart
    finally:
        heart.stop()


def at_forward(part: Part, number: int, act: Callable[[], None]) -> None:
    """Lets a stage do something in one of its forwards."""
    count = iter(range(10**9))
    step = part.steps[0]

    def run(*given: Any) -> Any:
        if next(count) == number:
            act()
        return step.run(*given)

    part.steps = [replace(step, run=run), *part.steps[1:]]


def _train(rank: int, victim: int, how: str, replicas: int, notes: str) -> tuple[int, str, float]:
    """Trains for ever, with a victim; which rank was named, how, and how long after what happened to it."""
    ranks = dist.get_world_size() // replicas
    setting = Setting("unet", "1f1b", ranks, ranks, replicas=replicas, samples=8 * replicas)
    transport = ProcessGroups(make_grid(ranks * replicas, ranks), timeout=60)
    model = CASES["unet"].build()  # in which every stage gets something of every other
    parts, graph = cut(model, recipe("unet", model), ranks)
    schedule = schedule_of(setting, graph)

    def act() -> None:
        Path(notes).write_text(f"{os.getpid()} {time.time()}")
        os.kill(os.getpid(), signal.SIGKILL if how.startswith("killed") else signal.SIGSTOP)

    if rank == victim and not how.endswith("reducing"):
        at_forward(parts[transport.rank], 6, act)
    engine = Engine({transport.rank: parts[transport.rank]}, schedule, graph, transport, CASES["unet"].loss)
    if rank == victim and how.endswith("reducing"):
        reduce = transport.all_reduce

        def all_reduce(tensor: Any, group: Any) -> Any:
            work = reduce(tensor, group)
            if engine.steps == 2 and group is engine.data:
                act()
            return work

        transport.all_reduce = all_reduce  # type: ignore[method-assign]
    with watched(transport, lambda: engine.progress) as heart:
        engine.watch = heart
        mine = share(setting, transport.replica, batch_of(setting, 0))
        with pytest.raises(RankLost) as caught:
            _for_ever(engine, mine)
        pid, then = Path(notes).read_text().split()
        took = time.time() - float(then)
    if rank == (victim + 1) % dist.get_world_size():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    return caught.value.ranks[0], caught.value.why, took


def _for_ever(engine: Engine, batch: Batch) -> None:
    while True:
        engine.step(batch.inputs, batch.targets)


@pytest.mark.parametrize(
    ("victim", "how", "replicas"),
    [
        (0, "frozen", 1),
        (3, "frozen", 1),
        (2, "frozen", 1),
        (1, "killed", 1),
        (1, "killed while reducing", 2),
        (2, "frozen while reducing", 2),
    ],
)
def test_the_rank_that_is_gone_is_named_on_all_others_in_time(
    victim: int, how: str, replicas: int, tmp_path: Path
) -> None:
    found = run(4, _train, victim, how, replicas, str(tmp_path / "notes"), dies=[victim])
    others = [each for rank, each in enumerate(found) if rank != victim]
    assert {rank for rank, _, _ in others} == {victim}
    assert max(took for _, _, took in others) < TIMEOUT + 1.0
    assert all(("has ended" if how.startswith("killed") else "gave no sign of life") in why for _, why, _ in others)


def _slow(rank: int) -> tuple[float, float, Any]:
    """A step in which the second stage works five times as long as the first, and all longer than the timeout."""
    setting = Setting("mlp", "1f1b", 2, 2)
    transport = ProcessGroups(make_grid(2, 2), timeout=60)
    model = CASES["mlp"].build()
    parts, graph = cut(model, recipe("mlp", model), 2)
    each = TIMEOUT / 4 / (5 if rank == 0 else 1)
    for number in range(setting.microbatches):
        at_forward(parts[rank], number, lambda: work_for(each))
    engine = Engine({rank: parts[rank]}, schedule_of(setting, graph), graph, transport, CASES["mlp"].loss)
    with watched(transport, lambda: engine.progress) as heart:
        engine.watch = heart
        batch, began = batch_of(setting, 0), time.monotonic()
        output = engine.step(batch.inputs, batch.targets)
        return output.loss, time.monotonic() - began, heart.lost()


def work_for(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(64, 64).sum()


def test_a_stage_that_is_five_times_as_slow_is_no_alarm() -> None:
    (loss, took, lost), other = run(2, _slow)
    assert loss == other[0]
    assert took > TIMEOUT
    assert lost is None
    assert other[2] is None

"""Process groups are kept for the life of who opened them, and given back: descriptors and threads do not grow."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def held(at_most: tuple[int, int] | None = None) -> tuple[int, int]:
    """Descriptors and threads of this process, once they are no more than before: ends take a moment."""
    end = time.monotonic() + 5.0
    while True:
        gc.collect()
        found = len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))
        if at_most is None or has_no_more(found, at_most) or time.monotonic() >= end:
            return found
        time.sleep(0.01)


def has_no_more(now: tuple[int, int], then: tuple[int, int]) -> bool:
    """Fewer is as good: what an earlier part of the process had open has been closed meanwhile."""
    return now[0] <= then[0] and now[1] <= then[1]


def test_a_save_of_lightning_leaves_no_group_behind(tmp_path: Path) -> None:
    for before, first, last, after in ranks.run(2, save_often):
        assert has_no_more(last, first), f"each save has left something: {first}, {last}"
        assert has_no_more(after, before), f"the end has left something: {before}, {after}"


def save_often(rank: int) -> list[tuple[int, int]]:
    from everstep.checkpoint.adapters.lightning import Generators
    from everstep.checkpoint.ranks.host_group import open_host_group

    open_host_group(30.0, "a test").close()  # what torch makes once
    generators, trainer, before = Generators(), SimpleNamespace(world_size=2, global_rank=rank), held()
    generators.on_save_checkpoint(trainer, None, {})
    first = held()
    for _ in range(4):
        generators.on_save_checkpoint(trainer, None, {})
    last = held(first)
    generators.teardown(trainer, None, "fit")
    return [before, first, last, held(before)]


@pytest.mark.parametrize("work", ["publish_often", "open_sessions", "init_smp"])
def test_what_is_ended_gives_its_groups_back(work: str, tmp_path: Path) -> None:
    for first, last in ranks.run(2, globals()[work], tmp_path):
        assert has_no_more(last, first), f"it has left something: {first}, {last}"


def publish_often(rank: int, folder: Path) -> list[tuple[int, int]]:
    from everstep.checkpoint.adapters.published import Published

    counts: list[tuple[int, int]] = []
    for _ in range(4):
        published = Published(folder / "store")
        assert published.newest(lambda key: folder / "none") is None
        published.finish()
        counts.append(held(*counts[:1]))
    return [counts[0], counts[-1]]


def open_sessions(rank: int, folder: Path) -> list[tuple[int, int]]:
    import everstep

    counts: list[tuple[int, int]] = []
    for _ in range(4):
        ckpt: Any = everstep.checkpointer(
            folder / "store",
            every_steps=1,
            memory=everstep.MemoryOptions(directory=folder / "memory"),
            times=everstep.TimeOptions(timeout=30.0),
        )
        with ckpt:
            ckpt.restore(state={"value": torch.ones(3)})
        del ckpt
        counts.append(held(*counts[:1]))
    return [counts[0], counts[-1]]


def init_smp(rank: int, folder: Path) -> list[tuple[int, int]]:
    from everstep.compat.smdistributed.modelparallel.torch import state

    counts: list[tuple[int, int]] = []
    for _ in range(4):
        state.init({"pipeline_parallel_degree": 2, "ddp": True})
        torch.distributed.barrier(group=state.current_state().groups["PP"])
        counts.append(held(*counts[:1]))
    return [counts[0], counts[-1]]

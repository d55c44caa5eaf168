"""Process groups are kept for the life of who opened them, and given back: descriptors and threads do not grow."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def test_a_save_of_lightning_leaves_no_group_behind(tmp_path: Path) -> None:
    for before, first, last, after in ranks.run(2, save_often):
        # Fewer: what an earlier part of the process had open has been closed meanwhile.
        assert all(now <= then for now, then in zip(last, first, strict=True)), "each save has left something"
        assert after == before, "the end has left something"


def save_often(rank: int) -> list[tuple[int, int]]:
    from everstep.checkpoint.adapters.lightning import Generators
    from everstep.checkpoint.ranks.host_group import open_host_group

    open_host_group(30.0, "a test").close()  # what torch makes once
    generators, trainer, counts = Generators(), SimpleNamespace(world_size=2, global_rank=rank), [held()]
    for _ in range(5):
        generators.on_save_checkpoint(trainer, None, {})
        counts.append(held())
    generators.teardown(trainer, None, "fit")
    return [counts[0], counts[1], counts[-1], held()]


@pytest.mark.parametrize("work", ["publish_often", "open_sessions", "init_smp"])
def test_what_is_ended_gives_its_groups_back(work: str, tmp_path: Path) -> None:
    for counts in ranks.run(2, globals()[work], tmp_path):
        assert counts[-1] == counts[0], counts


def publish_often(rank: int, folder: Path) -> list[tuple[int, int]]:
    from everstep.checkpoint.adapters.published import Published

    counts = []
    for _ in range(4):
        published = Published(folder / "store")
        assert published.newest(lambda key: folder / "none") is None
        published.finish()
        counts.append(held())
    return counts


def open_sessions(rank: int, folder: Path) -> list[tuple[int, int]]:
    import everstep

    counts = []
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
        counts.append(held())
    return counts


def init_smp(rank: int, folder: Path) -> list[tuple[int, int]]:
    from everstep.compat.smdistributed.modelparallel.torch import state

    counts = []
    for _ in range(4):
        state.init({"pipeline_parallel_degree": 2, "ddp": True})
        torch.distributed.barrier(group=state.current_state().groups["PP"])
        counts.append(held())
    return counts

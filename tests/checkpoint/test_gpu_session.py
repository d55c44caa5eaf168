"""Whole sessions over pretended GPUs: every wait for a commit announces this rank's copy as soon as it is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.restore import loading
from everstep.checkpoint.restore.placing import Memory
from everstep.checkpoint.session.checkpointer import Checkpointer
from everstep.checkpoint.session.options import MemoryOptions, TimeOptions
from everstep.checkpoint.state.rng import Rng
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.pretended_cuda import on_gpu, pretended_cuda
from tests.checkpoint.pretended_runtime import Graph, Runtime, graph
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import session

pytestmark = pytest.mark.torch

LOOKS = 30  # so often a rank has to ask before its GPU begins to copy


class Training:
    """A weight on a GPU; after n steps it is -n everywhere."""

    def __init__(self, device: str = "cuda:0") -> None:
        self.model = torch.nn.Module()
        self.model.register_parameter("weight", torch.nn.Parameter(on_gpu(torch.zeros(1000), device)))
        weight: Any = self.model.weight
        weight.grad = on_gpu(torch.ones(1000), device)
        self.optimizer = torch.optim.SGD([weight], lr=1.0, foreach=False)

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def saved(folder: Path) -> list[int]:
    return sorted(key.step for key in list_candidates(PosixStore(folder / "store")))


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    with pretended_cuda(seed=2) as runtime:
        yield runtime


def slowly(runtime: Runtime) -> None:
    runtime.idle_looks = LOOKS


@pytest.mark.parametrize("policy", ["skip", "wait", "queue"])
def test_a_save_while_a_copy_is_under_way_waits_for_no_commit_that_waits_for_it(
    folder: Path, cuda: Runtime, policy: Any
) -> None:
    training = Training()
    with session(folder, every_steps=1000, keep_last=5, policy=policy, commit_timeout=60.0) as ckpt:
        ckpt.track(**training.objects())
        for step in (1, 2, 3):
            training.optimizer.step()
            slowly(cuda)
            assert ckpt.save(step).saves
            assert ckpt.metrics()["saved"] == step - 1, "the copy before was announced, and its commit waited for"
        slowly(cuda)
    assert saved(folder) == [1, 2, 3]


@pytest.mark.parametrize("policy", ["wait", "queue"])
def test_each_step_is_saved_although_its_copy_goes_on_beside_the_next(folder: Path, cuda: Runtime, policy: Any) -> None:
    training = Training()
    with session(folder, every_steps=1, keep_last=20, policy=policy, commit_timeout=60.0) as ckpt:
        ckpt.track(**training.objects())
        for step in range(1, 7):
            training.optimizer.step()
            slowly(cuda)
            ckpt.step(step)
        slowly(cuda)
        ckpt.wait()
        assert ckpt.metrics()["failed"] == 0
    if policy == "wait":
        assert len(saved(folder)) >= 3


def test_the_end_of_a_session_announces_its_last_copy(folder: Path, cuda: Runtime) -> None:
    training = Training()
    ckpt = session(folder, commit_timeout=60.0)
    ckpt.track(**training.objects())
    training.optimizer.step()
    slowly(cuda)
    ckpt.save(1)
    slowly(cuda)
    ckpt.close()
    assert saved(folder) == [1]


def test_what_is_restored_is_the_state_of_the_step_although_training_went_on(folder: Path, cuda: Runtime) -> None:
    training = Training()
    with session(folder, keep_last=9, every_steps=1000) as ckpt:
        ckpt.track(**training.objects())
        for step in range(1, 5):
            training.optimizer.step()
            slowly(cuda)
            ckpt.save(step)
        for _ in range(3):
            training.optimizer.step()
    cuda.run_all()
    again = Training()
    with session(folder) as ckpt:
        assert ckpt.restore(**again.objects()).step == 4
        weight: Any = again.model.weight
        assert weight.is_cuda, "the weights stay where they are"
        assert torch.equal(weight.detach().cpu().as_subclass(torch.Tensor), torch.full((1000,), -4.0))


def test_a_restore_page_locks_no_memory_for_the_whole_of_a_large_tensor(
    folder: Path, cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps such memory for the rest of the run, and rounds it up to a power of two."""
    through = 20 << 20
    monkeypatch.setattr(loading, "_THROUGH", through)
    monkeypatch.setattr(loading, "_PIECE", 8 << 20)
    taken: list[int] = []

    def take(size: int, *, pinned: bool = False) -> Memory:
        taken.append(size if pinned else 0)
        return Memory(size, pinned=pinned)

    monkeypatch.setattr(loading, "Memory", take)
    meant = torch.arange(10_000_000, dtype=torch.float32)

    def model(values: torch.Tensor) -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_parameter("weight", torch.nn.Parameter(on_gpu(values)))
        made.register_buffer("small", on_gpu(values[:7].bfloat16()))
        return made

    with session(folder, every_steps=1000, commit_timeout=60.0) as ckpt:
        ckpt.track(model=model(meant))
        ckpt.save(1)
    again: Any = model(torch.zeros_like(meant))
    with session(folder) as ckpt:
        assert ckpt.restore(model=again).step == 1
    assert torch.equal(again.weight.detach().cpu().as_subclass(torch.Tensor), meant)
    assert torch.equal(again.small.cpu().as_subclass(torch.Tensor), meant[:7].bfloat16())
    assert max(taken) == through, "it goes through little memory, all of which is used again"


def test_steps_of_a_graph_that_was_captured_long_before_tear_nothing(folder: Path, cuda: Runtime) -> None:
    training = Training()
    training.optimizer.step()
    captured = Graph()
    with graph(captured):
        training.optimizer.step()
    with session(folder, keep_last=9, every_steps=1000, commit_timeout=60.0) as ckpt:
        ckpt.track(**training.objects())
        for step in range(2, 6):
            captured.replay()
            slowly(cuda)
            ckpt.save(step)
            ckpt.track(**training.objects())  # and with it another staging
            slowly(cuda)
        for _ in range(9):
            captured.replay()
    cuda.run_all()
    again = Training()
    with session(folder) as ckpt:
        assert ckpt.restore(**again.objects()).step == 5
        weight: Any = again.model.weight
        assert torch.equal(weight.detach().cpu().as_subclass(torch.Tensor), torch.full((1000,), -5.0))


def test_a_gpu_that_fails_during_a_copy_makes_that_save_void(folder: Path, cuda: Runtime) -> None:
    training = Training()
    failed: list[str] = []
    with session(folder, keep_last=9, every_steps=1000, commit_timeout=60.0) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.track(**training.objects())
        training.optimizer.step()
        ckpt.save(1)
        ckpt.wait()
        slowly(cuda)
        cuda.fails["query"] = 3
        ckpt.save(2)
        del cuda.fails["query"]
        for step in (3, 4):
            ckpt.step(step)
        ckpt.save(5)
    assert saved(folder)[-1] == 5


# ---- several ranks


def every_step(rank: int, folder: Path, policy: str, how: str) -> int:
    """Two ranks train in step; the GPU of rank 1 copies slowly. How many saves failed."""
    with pretended_cuda(seed=rank) as runtime:
        training = Training()
        with Checkpointer(
            folder / "store",
            every_steps=1,
            policy=policy,  # type: ignore[arg-type]
            keep_last=20,
            memory=MemoryOptions(directory=folder / "memory"),
            times=TimeOptions(timeout=60.0, commit_timeout=45.0, linger=5.0),
        ) as ckpt:
            ckpt.track(**training.objects())
            for step in range(1, 6):
                training.optimizer.step()
                dist.barrier()  # as a reduction of gradients, which this process waits for
                runtime.idle_looks = 10 * rank
                if how == "save":
                    assert ckpt.save(step).saves
                else:
                    ckpt.step(step)
            runtime.idle_looks = 10 * rank
        metrics = ckpt.metrics()
        dist.barrier()
        return int(metrics["failed"] or 0)


@pytest.mark.parametrize(("policy", "how"), [("wait", "step"), ("skip", "save"), ("wait", "save"), ("queue", "step")])
def test_no_rank_waits_for_a_rank_that_trains(folder: Path, policy: str, how: str) -> None:
    assert run(2, every_step, folder, policy, how, timeout=200.0) == [0, 0], "somebody waited until a save was given up"
    if how == "save":
        assert saved(folder) == list(range(1, 6))


class Generators:
    """Stands for the generators of so many GPUs, of which the second is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.every = [torch.Generator().manual_seed(100 + device) for device in range(count)]
        self.current = min(1, count - 1)
        pretended: dict[str, Any] = {
            "is_available": lambda: True,
            "current_device": lambda: self.current,
            "get_rng_state": lambda device="cuda": self.of(device).get_state(),
            "set_rng_state": lambda state, device="cuda": self.of(device).set_state(state),
        }
        for name, value in pretended.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def of(self, device: Any) -> torch.Generator:
        return self.every[self.current if device in ("cuda", None) else int(device)]

    def draw(self) -> list[list[float]]:
        return [torch.rand(2, generator=each).tolist() for each in self.every]


@pytest.mark.parametrize(("devices", "same"), [(3, [0, 1, 2]), (2, [0, 1]), (4, [0, 1, 2])])
def test_generators_of_all_devices_come_back_on_as_many_fewer_or_more(
    devices: int, same: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended_cuda(seed=2, devices=3):
        generators = Generators(monkeypatch, 3)
        generators.draw()
        state = Rng().state_dict()
        expected = generators.draw()
    with pretended_cuda(seed=2, devices=devices):
        generators = Generators(monkeypatch, devices)
        Rng().load_state_dict(state)
        drawn = generators.draw()
        assert [device for device in range(min(devices, 3)) if drawn[device] == expected[device]] == same

"""Saves from GPUs while they train, and restores straight into them, in one process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save.device_staging import choose_staging
from everstep.checkpoint.save.pinning import PinnedMemory
from everstep.checkpoint.state.steps import STEPS
from tests.gpu.trainings import KIND, Training, assert_same, devices, restored, session, slots_folder

pytestmark = pytest.mark.gpu
cuda_only = pytest.mark.cuda_only


@pytest.fixture
def memory() -> Iterator[Path]:
    with slots_folder() as folder:
        yield folder


@pytest.mark.parametrize("device", devices(), ids=str)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["default", "foreach", "fused"])
def test_what_is_saved_while_training_goes_on_is_restored_bit_for_bit(
    tmp_path: Path, memory: Path, device: torch.device, options: dict[str, Any]
) -> None:
    training, meant = Training(device, **options), {}
    with session(tmp_path / "store", memory) as ckpt:
        ckpt.track(**training.objects())
        for step in range(1, 6):
            training.step()
            meant[step] = training.state()
            ckpt.save(step)
            training.step()  # beside the copy
            ckpt.step(step)
    for step in (3, 5):
        assert_same(restored(tmp_path / "store", Training(device, **options), step), meant[step])


@pytest.mark.parametrize("policy", ["wait", "queue", "skip"])
def test_large_states_are_saved_one_after_the_other(tmp_path: Path, memory: Path, policy: Any) -> None:
    training = Training(devices()[0], width=4096 if KIND == "cuda" else 128)
    with session(tmp_path / "store", memory, policy=policy, keep_last=2) as ckpt:
        ckpt.track(**training.objects())
        for step in range(1, 5):
            training.step()
            assert ckpt.save(step).saves
            training.step()
        training.step()
        meant = training.state()
        ckpt.save(5)
        training.step()
    assert_same(restored(tmp_path / "store", Training(devices()[0], width=training.data.shape[1])), meant)


@cuda_only
@pytest.mark.parametrize("capturable", [False, True], ids=["sgd", "capturable adam"])
def test_replays_of_a_captured_step_tear_nothing(tmp_path: Path, memory: Path, capturable: bool) -> None:
    kind: Any = torch.optim.Adam if capturable else torch.optim.SGD
    options: dict[str, Any] = {"capturable": True} if capturable else {"momentum": 0.9}

    def make() -> Training:
        return Training(devices()[0], width=2048, kind=kind, **options)

    training = make()
    with session(tmp_path / "store", memory) as ckpt:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                training.step()
        torch.cuda.current_stream().wait_stream(side)
        ckpt.track(**training.objects())
        ckpt.save(1)  # under way while the capture begins
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            training.step()
            with pytest.raises(CheckpointError):
                choose_staging([training.data]).copy([torch.zeros(1)], [training.data[0, :1]], [True])
        assert STEPS.unannounced
        graph.replay()
        meant = training.state()
        ckpt.save(2)
        for _ in range(20):
            graph.replay()
        ckpt.track(**training.objects())
        graph.replay()
        later = training.state()
        ckpt.save(3)
        for _ in range(20):
            graph.replay()
    assert_same(restored(tmp_path / "store", make(), 2), meant)
    assert_same(restored(tmp_path / "store", make(), 3), later)


@cuda_only
@pytest.mark.parametrize("what", ["model", "step"])
def test_compiled_with_reduce_overhead(tmp_path: Path, memory: Path, what: str) -> None:
    training = Training(devices()[0], width=1024)
    training.step()
    forward = torch.compile(training.model, mode="reduce-overhead") if what == "model" else training.model
    step = torch.compile(training.optimizer.step, mode="reduce-overhead") if what == "step" else training.optimizer.step

    def train() -> None:
        training.optimizer.zero_grad(set_to_none=False)
        torch.compiler.cudagraph_mark_step_begin()
        forward(training.data).square().mean().backward()
        step()

    for _ in range(5):
        train()
    with session(tmp_path / "store", memory) as ckpt:
        ckpt.track(**training.objects())
        meant = {}
        for number in range(1, 4):
            train()
            meant[number] = training.state()
            ckpt.save(number)
            for _ in range(5):
                train()
    for number, state in meant.items():
        assert_same(restored(tmp_path / "store", Training(devices()[0], width=1024), number), state)


def test_several_devices_in_one_process(tmp_path: Path, memory: Path) -> None:
    if KIND == "cuda" and len(devices()) < 2:
        pytest.skip("this machine has one GPU: a state on several of them was not tried")

    def parts() -> dict[str, Training]:
        return {f"part{i}": Training(device) for i, device in enumerate([*devices(), torch.device("cpu")])}

    def objects(trainings: dict[str, Training]) -> dict[str, Any]:
        return {f"{k}{name}": each for name, one in trainings.items() for k, each in one.objects().items()}

    trainings = parts()
    with session(tmp_path / "store", memory) as ckpt:
        ckpt.track(**objects(trainings))
        for one in trainings.values():
            one.step()
        meant = {name: one.state() for name, one in trainings.items()}
        ckpt.save(1)
        for one in trainings.values():
            one.step()
    fresh = parts()
    with slots_folder() as other, session(tmp_path / "store", other) as ckpt:
        ckpt.restore(**objects(fresh))
    for name, one in fresh.items():
        assert_same(one.state(), meant[name])


ODD = {
    "not contiguous": lambda device: torch.randn(300, 200, device=device).t(),
    "expanded": lambda device: torch.randn(3, device=device).expand(50, 3),
    "conjugated": lambda device: torch.randn(999, dtype=torch.complex64, device=device).conj(),
    "negated": lambda device: torch.randn(999, dtype=torch.complex64, device=device).conj().imag,
    "channels last": lambda device: torch.randn(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last),
    "without elements": lambda device: torch.empty(0, 4, device=device),
    "half": lambda device: torch.randn(100_000, device=device).to(torch.bfloat16),
}


@pytest.mark.parametrize("is_steady", [True, False])
@pytest.mark.parametrize("kind", ODD)
def test_every_kind_of_tensor_is_copied_bit_for_bit(kind: str, is_steady: bool) -> None:
    for device in devices():
        source = ODD[kind](device)
        meant = source.cpu().resolve_conj().resolve_neg().contiguous()
        staging, target = choose_staging([source]), torch.zeros(source.shape, dtype=source.dtype)
        staging.copy([target], [source], [is_steady])
        if is_steady:
            staging.wait_for_copy()
        assert staging.wait_until_copied(60)
        assert torch.equal(target, meant)
        staging.close()


@cuda_only
def test_a_dropped_tensor_is_copied_whole() -> None:
    staging, target = choose_staging([torch.ones(1, device="cuda")]), torch.zeros(1 << 26)
    for number in range(5):
        source = torch.full((1 << 26,), float(number), device="cuda")
        staging.copy([target], [source], [True])
        del source
        other = torch.full((1 << 26,), -1.0, device="cuda")  # the allocator would give it that memory
        assert staging.wait_until_copied(60)
        assert bool((target == number).all())
        del other
    staging.close()


@cuda_only
def test_slots_are_page_locked_and_given_back() -> None:
    pages = mmap.mmap(-1, 1 << 20)
    memory, pinned = torch.frombuffer(pages, dtype=torch.uint8), PinnedMemory()
    pinned.register(memory, devices()[0])
    assert memory.is_pinned()
    pinned.release(is_idle=True)
    assert not memory.is_pinned()


@cuda_only
def test_memory_that_cannot_be_page_locked_leaves_no_error_to_training() -> None:
    pages = mmap.mmap(-1, 1 << 20)
    memory, pinned = torch.frombuffer(pages, dtype=torch.uint8), PinnedMemory()
    with torch.cuda.device(devices()[0]):
        assert int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) != 0, "nothing is registered there yet"
    # That left CUDA's last error behind, as a failed registration does: this one forgets it.
    with pytest.raises(RuntimeError):
        torch.full((1,), 1.0, device=devices()[0])
    pinned.register(memory, devices()[0])
    again = PinnedMemory()
    again.register(memory, devices()[0])  # taken for one that somebody left: made anew
    assert torch.full((1,), 2.0, device=devices()[0]).item() == 2.0
    again.release(is_idle=True)
    pinned.release(is_idle=True)  # it is not registered any more: kept, and no error left behind
    assert torch.full((1,), 3.0, device=devices()[0]).item() == 3.0


@cuda_only
def test_a_scripts_own_copy_into_pinned_memory_is_waited_for() -> None:
    source, offloaded = torch.full((1 << 26,), 3.0, device="cuda"), torch.zeros(1 << 26, pin_memory=True)
    staging, target = choose_staging([offloaded]), torch.zeros(1 << 26)
    offloaded.copy_(source, non_blocking=True)
    staging.copy([target], [offloaded])
    assert bool((target == 3.0).all())
    staging.close()

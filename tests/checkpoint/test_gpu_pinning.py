"""Page-locked memory of pretended GPUs: registered once, given back once, and never under a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save import device_staging, pinning
from everstep.checkpoint.save.device_staging import choose_staging
from tests.checkpoint.gpu_states import slot
from tests.checkpoint.pretended_cuda import on_gpu, pretended_cuda
from tests.checkpoint.pretended_runtime import Error, Runtime

pytestmark = pytest.mark.torch


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    with pretended_cuda(seed=1, devices=4) as runtime:
        yield runtime


def test_slots_are_registered_on_a_device_of_the_state_and_given_back(cuda: Runtime) -> None:
    staging, memory = choose_staging([on_gpu(torch.ones(2), "cuda:2")]), slot()
    staging.adopt(memory)
    assert cuda.cudart.registered == {memory.data_ptr(): memory.nbytes}
    staging.close()
    staging.close()
    assert cuda.cudart.calls == ["register on cuda:2", "unregister"], "a context on another device takes memory there"


def test_where_memory_cannot_be_registered_saves_are_right_and_the_next_kernel_does_not_fail(
    cuda: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.cudart.refuses = Error.cudaErrorMemoryAllocation
    source, target = on_gpu(torch.full((2,), 3.0)), torch.zeros(2)
    staging = choose_staging([source])
    staging.adopt(slot())
    assert "could not be page-locked (cudaErrorMemoryAllocation)" in caplog.text
    source.add_(1.0)  # CUDA would report its last error here
    staging.copy([target], [source], [True])
    assert staging.wait_until_copied(60)
    assert torch.equal(target, torch.full((2,), 4.0))
    staging.close()
    assert "unregister" not in cuda.cudart.calls


def test_a_registration_that_somebody_left_at_this_address_is_made_anew(cuda: Runtime) -> None:
    """Otherwise copies would go to the pages that were mapped there before."""
    memory = slot()
    cuda.cudart.registered[memory.data_ptr()] = 1
    staging = choose_staging([on_gpu(torch.ones(2))])
    staging.adopt(memory)
    assert cuda.cudart.registered == {memory.data_ptr(): memory.nbytes}
    on_gpu(torch.ones(2)).add_(1.0)
    staging.close()


def test_an_address_that_stays_registered_for_others_is_refused(cuda: Runtime) -> None:
    cuda.cudart.refuses = Error.cudaErrorHostMemoryAlreadyRegistered
    staging = choose_staging([on_gpu(torch.ones(2))])
    with pytest.raises(CheckpointError, match="registered with CUDA by other code"):
        staging.adopt(slot())
    staging.close()


def test_an_empty_part_needs_no_registration(cuda: Runtime) -> None:
    staging = choose_staging([on_gpu(torch.ones(2))])
    staging.adopt(slot(0))
    assert not cuda.cudart.registered
    staging.close()


def test_memory_is_given_back_only_after_the_last_copy(cuda: Runtime) -> None:
    """The runtime's unregister asserts that no copy runs."""
    source = on_gpu(torch.ones(2))
    staging, memory = choose_staging([source]), slot()
    staging.adopt(memory)
    staging.copy([memory[:8].view(torch.float32)], [source], [True])
    staging.close()
    assert torch.equal(memory[:8].view(torch.float32), torch.ones(2))


def test_memory_into_which_a_gpu_may_still_write_stays_mapped_for_ever(
    cuda: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(device_staging, "CLOSE_TIMEOUT", 0.05)
    monkeypatch.setattr(pinning, "_kept_for_ever", kept)
    source = on_gpu(torch.ones(2))
    staging, memory = choose_staging([source]), slot()
    staging.adopt(memory)
    staging.copy([memory[:8].view(torch.float32)], [source], [True])
    cuda.idle_looks = 10**9
    staging.close()
    assert kept == [memory]
    assert "unregister" not in cuda.cudart.calls

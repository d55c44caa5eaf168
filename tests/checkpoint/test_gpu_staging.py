"""Copies from pretended GPUs: what may go wrong around them, one thing after the other."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.save.device_staging import CudaStaging, choose_staging, sort_pairs
from everstep.checkpoint.state import steps
from everstep.checkpoint.state.flat import of_optimizers
from everstep.checkpoint.state.staging import Host
from tests.checkpoint.gpu_states import slot, trained
from tests.checkpoint.pretended_cuda import on_gpu, own_steps, pinned, pretended_cuda
from tests.checkpoint.pretended_runtime import CudaFailure, Graph, Runtime, Stream, graph

pytestmark = pytest.mark.torch


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    with pretended_cuda(seed=1, devices=4) as runtime:
        yield runtime


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# ---- how copies are made


def test_each_tensor_is_copied_in_the_way_of_its_device_and_of_who_changes_it(cuda: Runtime) -> None:
    sources = [on_gpu(torch.ones(2)), on_gpu(torch.ones(2)), torch.ones(2), torch.ones(2, device="meta")]
    targets = [torch.zeros(2) for _ in sources]
    pairs = sort_pairs(targets, sources, [True, False, True, True])
    assert [[id(pair.target) for pair in each] for each in pairs] == [[id(targets[i])] for i in (1, 0, 2, 3)]
    assert [len(each) for each in sort_pairs(targets, sources)] == [2, 0, 1, 1], (
        "unless somebody says so, nothing is steady"
    )


def test_a_state_without_a_gpu_is_copied_by_this_process(cuda: Runtime) -> None:
    assert isinstance(choose_staging([torch.ones(2)]), Host)
    assert isinstance(choose_staging([torch.ones(2), on_gpu(torch.ones(2))]), CudaStaging)
    assert isinstance(choose_staging([pinned(torch.ones(2))]), CudaStaging), "a GPU may write there"


def test_parameters_that_fsdp_offloads_are_copied_as_what_they_are(
    cuda: Runtime, one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 cannot tell whether a DTensor is page-locked, and every save of such a model failed."""

    def is_pinned(self: DTensor) -> bool:
        raise NotImplementedError("Operator aten.is_pinned.default does not have a sharding strategy registered.")

    monkeypatch.setattr(DTensor, "is_pinned", is_pinned)
    offloaded = [DTensor.from_local(each, one_rank, [Shard(0)]) for each in (torch.ones(2), pinned(torch.ones(2)))]
    assert isinstance(choose_staging(offloaded[:1]), Host)
    assert isinstance(choose_staging(offloaded), CudaStaging)


ODD: dict[str, Any] = {
    "not contiguous": lambda: on_gpu(torch.arange(12.0).reshape(3, 4).t()),
    "expanded": lambda: on_gpu(torch.arange(3.0).expand(2, 3)),
    "conjugated": lambda: on_gpu(torch.tensor([1 + 2j, 3 - 1j])).conj(),
    "negated": lambda: on_gpu(torch.tensor([1 + 2j, 3 - 1j]).conj().imag),
    "without elements": lambda: on_gpu(torch.ones(0, 3)),
    "one number": lambda: on_gpu(torch.tensor(3.5, dtype=torch.bfloat16)),
    "one that requires a gradient": lambda: on_gpu(torch.ones(2)).requires_grad_(),
    "on another device than the current": lambda: on_gpu(torch.arange(3.0), "cuda:3"),
}


@pytest.mark.parametrize("is_steady", [True, False])
@pytest.mark.parametrize("kind", ODD)
def test_every_kind_of_tensor_is_copied_bit_for_bit(cuda: Runtime, kind: str, is_steady: bool) -> None:
    source = ODD[kind]()
    meant = source.cpu().detach().resolve_conj().resolve_neg().clone()
    staging = choose_staging([source])
    target = torch.full(tuple(source.shape), 7, dtype=source.dtype)
    staging.copy([target], [source], [is_steady])
    assert staging.wait_until_copied(60)
    assert torch.equal(target, torch.Tensor.as_subclass(meant, torch.Tensor))
    staging.close()


def test_a_state_on_several_devices_and_in_main_memory_is_there_when_all_of_it_is(cuda: Runtime) -> None:
    sources = [on_gpu(torch.full((2,), 1.0 + i), f"cuda:{i}") for i in range(4)] + [torch.full((2,), 5.0)]
    targets = [torch.zeros(2) for _ in sources]
    staging = choose_staging(sources)
    staging.copy(targets, sources, [True, False, True, False, True])
    assert staging.wait_until_copied(60)
    assert [target[0].item() for target in targets] == [1.0, 2.0, 3.0, 4.0, 5.0]
    staging.close()


def test_a_state_that_moves_to_another_device_after_the_plan_is_copied(cuda: Runtime) -> None:
    staging = CudaStaging([torch.device("cuda:0")])
    target = torch.zeros(2)
    for source in (on_gpu(torch.ones(2), "cuda:2"), torch.full((2,), 2.0), on_gpu(torch.full((2,), 3.0))):
        staging.copy([target], [source], [True])
        assert staging.wait_until_copied(60)
        assert torch.equal(target, source.cpu().as_subclass(torch.Tensor))
    staging.close()


def test_a_step_on_a_side_stream_waits_on_that_stream(cuda: Runtime) -> None:
    param, optimizer = trained()
    staging, target = choose_staging([param]), torch.zeros(4)
    staging.copy([target], [param.detach()], [True])
    side = Stream("cuda:0")
    side.wait_stream(cuda.stream_of("cuda:0"))
    with cuda.on_stream(side):
        optimizer.step()
    waits = [work for work in side.queue if work.after]
    assert len(waits) == 2, "one for the script's own wait, one for the copy's"
    assert staging.wait_until_copied(60)
    assert torch.equal(target, torch.full((4,), -1.0))
    staging.close()


def test_a_step_on_another_thread_waits_too(cuda: Runtime) -> None:
    """As of an optimizer that steps within the backward pass."""
    import threading

    param, optimizer = trained()
    staging, target = choose_staging([param]), torch.zeros(4)
    staging.copy([target], [param.detach()], [True])
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert staging.wait_until_copied(60)
    assert torch.equal(target, torch.full((4,), -1.0))
    staging.close()


def test_memory_of_the_script_that_a_gpu_fills_is_waited_for(cuda: Runtime) -> None:
    source, weights = on_gpu(torch.full((2,), 4.0), "cuda:0"), pinned(torch.zeros(2))
    weights.copy_(source, non_blocking=True)
    staging, target = choose_staging([weights]), torch.zeros(2)
    staging.copy([target], [weights])
    assert torch.equal(target, torch.full((2,), 4.0))
    staging.close()


# ---- who may be copied beside training


def known(optimizer: torch.optim.Optimizer) -> bool:
    return steps.STEPS.are_announced([optimizer])


def test_an_optimizer_is_waited_for_by_its_steps_only_once_one_was_seen(cuda: Runtime) -> None:
    with own_steps():
        param, optimizer = trained()
        assert known(optimizer)
        assert not known(torch.optim.SGD([param], lr=1.0)), "it may have been captured before anybody looked"


def test_after_one_captured_step_nothing_is_copied_beside_training_in_this_process(cuda: Runtime) -> None:
    _, optimizer = trained()
    with graph(Graph()):
        optimizer.step()
    assert not known(optimizer)
    assert not known(trained()[1]), "which graphs hold which steps is not known"


def test_the_capture_of_a_forward_pass_changes_nothing(cuda: Runtime) -> None:
    _, optimizer = trained()
    statistics = on_gpu(torch.zeros(2))
    with graph(Graph()):
        statistics.add_(1.0)
    assert known(optimizer)


def test_what_is_known_outlives_the_staging_that_learned_it(cuda: Runtime) -> None:
    param, optimizer = trained()
    first = choose_staging([param])
    with graph(Graph()):
        optimizer.step()
    first.close()
    choose_staging([param]).close()
    assert not known(optimizer)


def test_an_optimizer_that_is_made_for_graphs_is_never_trusted(cuda: Runtime) -> None:
    _, optimizer = trained()
    optimizer.param_groups[0]["capturable"] = True
    assert not known(optimizer)


class Swaps(torch.optim.SGD):  # type: ignore[misc,unused-ignore]
    """Changes weights beside its steps, as schedule-free optimizers and weight averaging do."""


class Foreign(torch.optim.Optimizer):  # type: ignore[misc,unused-ignore]
    """Wraps another one and calls no hook of its own, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override,unused-ignore]
        self.inner.step()


@pytest.mark.parametrize("other", [lambda inner, param: Swaps([param], lr=1.0), lambda inner, param: Foreign(inner)])
def test_only_torchs_own_optimizers_are_copied_beside_training(cuda: Runtime, other: Any) -> None:
    param, optimizer = trained()
    module = torch.nn.Module()
    module.register_parameter("weight", param)
    objects: dict[str, object] = {"model": module, "optimizer": optimizer}
    assert "model.weight" in of_optimizers(objects, rank=0)
    assert not of_optimizers({**objects, "optimizer": other(optimizer, param)}, rank=0)
    both = {**objects, "second": other(optimizer, param)}
    assert "model.weight" not in of_optimizers(both, rank=0), "the other one changes it too"


def test_a_compiled_step_runs_without_hooks_and_is_not_trusted() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    with own_steps() as knowledge:
        optimizer = torch.optim.SGD([param], lr=0.1)
        optimizer.step()
        assert knowledge.are_announced([optimizer])
        heard: list[str] = []
        knowledge.call_before_each(lambda: heard.append("before"))
        compiled = torch.compile(optimizer.step, backend="eager")
        compiled()
        assert heard, "a copy that is under way is waited for before the first compiled step"
        count = len(heard)
        compiled()
        assert len(heard) == count, "compiled steps have begun to call hooks: copies may go beside them"
        assert not knowledge.are_announced([optimizer])
    torch._dynamo.reset()


def test_the_hook_is_no_break_in_a_compiled_function() -> None:
    def traced(x: torch.Tensor) -> torch.Tensor:
        steps._note_compilation()
        return x + 1

    with own_steps() as knowledge:
        assert torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1.0
        assert knowledge.unannounced
    torch._dynamo.reset()


# ---- captures around a save


def test_a_save_within_a_capture_is_refused_and_harms_it_not(cuda: Runtime) -> None:
    param, _ = trained()
    staging = choose_staging([param])
    captured = Graph()
    with graph(captured):
        with pytest.raises(CheckpointError, match="while a CUDA graph is captured"):
            staging.copy([torch.zeros(4)], [param.detach()], [True])
        param.detach().add_(1.0)
    assert len(captured.works) == 1
    staging.close()


def test_whether_a_copy_is_done_is_not_asked_within_a_capture(cuda: Runtime) -> None:
    param, _ = trained()
    staging, target = choose_staging([param]), torch.zeros(4)
    staging.copy([target], [param.detach()], [True])
    with cuda.on_stream(Stream("cuda:0")):
        captured = Graph()
        captured.capture_begin()
        assert not staging.is_copied()
        captured.capture_end()
    assert staging.wait_until_copied(60)
    staging.close()


def test_a_change_within_a_capture_puts_no_wait_into_the_graph(cuda: Runtime) -> None:
    param, optimizer = trained()
    staging = choose_staging([param])
    staging.copy([torch.zeros(4)], [param.detach()], [True])
    with cuda.on_stream(Stream("cuda:0")):
        captured = Graph()
        captured.capture_begin()
        staging.wait_for_copy()
        captured.capture_end()
    assert not captured.works
    assert not known(optimizer)
    staging.close()


def test_a_skipped_step_of_a_scaler_is_no_change(cuda: Runtime) -> None:
    """GradScaler calls no step then: nothing waits, and nothing has to."""
    param, _ = trained()
    staging, target = choose_staging([param]), torch.zeros(4)
    staging.copy([target], [param.detach()], [True])
    assert param.grad is not None
    param.grad.mul_(float("nan"))
    assert staging.wait_until_copied(60)
    assert torch.equal(target, torch.full((4,), -1.0))
    staging.close()


# ---- failures


def test_what_was_begun_before_an_error_is_still_waited_for(cuda: Runtime) -> None:
    sources = [on_gpu(torch.full((2,), 1.0 + i)) for i in range(3)]
    targets = [torch.zeros(2) for _ in sources]
    staging = choose_staging(sources)
    cuda.fails["copy"] = 2
    with pytest.raises(CudaFailure):
        staging.copy(targets, sources, [True, False, True])
    assert staging.wait_until_copied(60)
    assert [target[0].item() for target in targets] == [1.0, 2.0, 0.0]
    staging.close()


def test_a_gpu_that_fails_during_the_copy_is_an_error_and_never_a_whole_copy(cuda: Runtime) -> None:
    source = on_gpu(torch.ones(2))
    staging = choose_staging([source])
    staging.copy([torch.zeros(2)], [source], [True])
    cuda.fails["query"] = 0
    with pytest.raises(CheckpointError, match="a GPU failed while the state was copied"):
        staging.is_copied()


def test_a_copy_that_does_not_end_is_waited_for_within_a_bound(cuda: Runtime) -> None:
    source = on_gpu(torch.ones(2))
    staging = choose_staging([source])
    staging.copy([torch.zeros(2)], [source], [True])
    cuda.idle_looks = 10**9
    assert not staging.wait_until_copied(0.05)
    assert not staging.is_copied()


# ---- pinned memory


# ---- the end


def test_after_close_steps_are_not_container_wait(cuda: Runtime) -> None:
    param, optimizer = trained()
    staging = choose_staging([param])
    staging.copy([torch.zeros(4)], [param.detach()], [True])
    staging.close()
    before = len(cuda.stream_of("cuda:0").queue)
    optimizer.step()
    waits = [work for work in list(cuda.stream_of("cuda:0").queue)[before:] if work.after]
    assert not waits


def test_a_forked_child_asks_nothing_of_its_parents_gpu(cuda: Runtime) -> None:
    """CUDA cannot be used there: loaders fork, and step nothing but may end in any way."""
    param, _ = trained()
    staging, memory = choose_staging([param]), slot()
    staging.adopt(memory)
    staging.copy([torch.zeros(4)], [param.detach()], [True])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            cuda.fails = {"query": 0, "copy": 0}
            calls = len(cuda.cudart.calls)
            staging.wait_for_copy()
            staging.close()
            code = 0 if len(cuda.cudart.calls) == calls else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    staging.close()
    assert not cuda.cudart.registered


def test_a_state_that_is_dropped_during_its_copy_is_copied_whole(cuda: Runtime) -> None:
    source, target = on_gpu(torch.full((4,), 6.0)), torch.zeros(4)
    staging = choose_staging([source])
    staging.copy([target], [source], [True])
    del source
    gc.collect()
    for _ in range(20):
        cuda.run_one()
    assert staging.wait_until_copied(60)
    assert torch.equal(target, torch.full((4,), 6.0))
    staging.close()

"""Each Horovod call that docs/how-to/mpi.md recommends, as one rank of several runs them; not imported by the tests.

A call that hangs ends this process by an error that names the operation, instead of waiting for ever.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "20", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40"}

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError


def check(condition: object, *seen: object) -> None:
    """Fail with what was seen; `assert` would be gone under ``python -O``."""
    if not condition:
        raise SystemExit(f"rank {hvd.rank()}: {seen}")


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    rows = hvd.allgather(tensor.detach().float().reshape(1, -1))
    return bool((rows == rows[0]).all())


def model_and_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.nn.Module, Any]:
    """Return a model that no two ranks have alike yet."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    ours = {name: options.pop(name) for name in ("compression", "backward_passes_per_step") if name in options}
    optimizer = kind(model.parameters(), **options)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **ours)


def step(model: torch.nn.Module, optimizer: Any, backward_passes: int = 1) -> None:
    optimizer.zero_grad()
    for _ in range(backward_passes):
        model(torch.randn(2, 4)).pow(2).sum().backward()
    optimizer.step()


def collectives(rank: int, size: int) -> None:
    tensor = torch.arange(float(size)) + rank
    total = torch.arange(float(size)) * size + sum(range(size))
    check(torch.equal(hvd.allreduce(tensor, op=hvd.Sum), total))
    check(torch.allclose(hvd.allreduce(tensor), total / size))
    check(all(torch.equal(each, total) for each in hvd.grouped_allreduce([tensor, tensor], op=hvd.Sum)))
    rows = hvd.allgather(torch.full((rank, 2), float(rank)))
    check(rows.tolist() == [[float(of)] * 2 for of in range(size) for _ in range(of)], rows)
    check(torch.equal(hvd.broadcast(tensor, root_rank=1), torch.arange(float(size)) + 1))
    check(hvd.alltoall(tensor).tolist() == [float(rank + of) for of in range(size)])
    check(hvd.reducescatter(tensor, op=hvd.Sum).tolist() == [total[rank].item()])
    hvd.barrier()


def gradients(rank: int, size: int) -> None:
    """Collectives are differentiable; gradients of allgather and broadcast are averages over the ranks, not sums."""
    for call, expected in (
        (lambda each: hvd.allreduce(each, op=hvd.Sum), float(size)),
        (hvd.allgather, 1.0),
        (hvd.alltoall, 1.0),
        (lambda each: hvd.broadcast(each, root_rank=0), 1.0 if rank == 0 else 0.0),
    ):
        tensor = torch.ones(size, requires_grad=True)
        # Not a bare sum: its gradient is one element shown many times, which Horovod rejects as not contiguous.
        (call(tensor) * 1.0).sum().backward()
        check(tensor.grad is not None and tensor.grad.tolist() == [expected] * size, call, tensor.grad)


def objects(rank: int, size: int) -> None:
    check(hvd.broadcast_object({"step": 3} if rank == 0 else None, root_rank=0) == {"step": 3})
    check(hvd.allgather_object(None if rank == 0 else rank) == [None, *range(1, size)])


def optimizers() -> None:
    """All of torch's that Horovod can wrap, with the options and the calls around them."""
    kinds = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"}
    for kind in (getattr(torch.optim, name) for name in sorted(kinds | {"Rprop", "SGD"})):
        # Options are the root's too.
        model, optimizer = model_and_optimizer(kind, lr=0.1 / (1 + hvd.rank()))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        check(optimizer.param_groups[0]["lr"] == 0.1, kind)
        step(model, optimizer)
        check(equal_on_all_ranks(model[0].weight), kind)
    for options in ({"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}):
        model, optimizer = model_and_optimizer(torch.optim.SGD, lr=0.1, **options)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        step(model, optimizer, options.get("backward_passes_per_step", 1))
        check(equal_on_all_ranks(model[0].weight), options)


def clipped() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD, lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(torch.randn(2, 4)).pow(2).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    check(equal_on_all_ranks(model[0].weight))


def resumed(rank: int) -> None:
    """The root has loaded a checkpoint, the others have a new optimizer: all go on from the root's state."""
    for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1})):
        saved = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        writer = kind(saved.parameters(), lr=0.1, **options)
        step(saved, writer)
        model, optimizer = model_and_optimizer(kind, lr=0.1, **options)
        if rank == 0:
            model.load_state_dict(saved.state_dict())
            optimizer.load_state_dict(writer.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        check(equal_on_all_ranks(model[0].weight), kind, "parameters")
        for state in optimizer.state_dict()["state"].values():
            check(all(equal_on_all_ranks(each) for each in state.values() if torch.is_tensor(each)), kind, state)
        step(model, optimizer)
        check(equal_on_all_ranks(model[0].weight), kind, "parameters after a step")


def joined(rank: int, size: int) -> None:
    """Ranks with unequal numbers of steps; what follows works without names as before."""
    model, optimizer = model_and_optimizer(torch.optim.SGD, lr=0.1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(2):
        for _ in range(1 + rank):
            step(model, optimizer)
        check(hvd.join() == size - 1)
        check(hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [float(size)] * 3)
        check(hvd.allgather(torch.ones(1)).tolist() == [1.0] * size)
    # The others' parameters are behind those of the rank with most steps.
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    check(equal_on_all_ranks(model[0].weight))


def rejected(rank: int) -> None:
    """Check that what the page says does not work is an error on all ranks that call it, and that nobody hangs."""
    # Not allgather, which the page warns of: it spoils the memory of rank 0.
    if rank > 0:
        try:
            hvd.broadcast(torch.ones(3), root_rank=1)
        except HorovodInternalError as error:
            check("not supported with Join" in str(error), error)
        else:
            check(False, "a broadcast beside a rank that has joined")
    hvd.join()
    for dtype in (torch.bfloat16, torch.bool):
        try:
            hvd.broadcast(torch.ones(2, dtype=dtype), root_rank=0)
        except ValueError as error:
            check("is not supported" in str(error), error)
        else:
            check(False, dtype)


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    check((size, hvd.local_size()) == (4, 2) and hvd.local_rank() in (0, 1), size, hvd.local_size())
    collectives(rank, size)
    gradients(rank, size)
    objects(rank, size)
    optimizers()
    clipped()
    resumed(rank)
    joined(rank, size)
    rejected(rank)
    # Unnamed operations are in step after the errors too.
    check(hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size)
    print("EACH-CALL-WORKS", rank, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""Handwritten digits with Horovod: the same model, data and loop as `train.py`."""

from __future__ import annotations

import os

import digits
import horovod.torch as hvd
import torch
import torch.distributed as dist


def main() -> None:
    options = digits.options()
    hvd.init()
    world = digits.World(hvd.rank(), hvd.size(), digits.device(hvd.local_rank()))

    model = digits.build_model(options.seed).to(world.device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Averages the gradients in step().
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9), named_parameters=model.named_parameters()
    )
    saved = {}
    if "MASTER_ADDR" in os.environ:  # a job's ranks; they agree on checkpoints through a process group of torch
        dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
        saved = {"model": model, "optimizer": optimizer}
    digits.train(model, options, world, optimizer.zero_grad, optimizer.step, saved)
    digits.finish(model, world)
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()

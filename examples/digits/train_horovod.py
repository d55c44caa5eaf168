"""Handwritten digits with Horovod: the same model, data and loop as `train.py`."""

from __future__ import annotations

import digits
import horovod.torch as hvd
import torch


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
    digits.train(model, options, world, optimizer.zero_grad, optimizer.step)
    digits.finish(model, world)
    hvd.shutdown()


if __name__ == "__main__":
    main()

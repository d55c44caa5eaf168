"""Handwritten digits with torch's DistributedDataParallel: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os

import digits
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = digits.options()
    device = digits.device(int(os.environ.get("LOCAL_RANK", "0")))
    # Rank, world size and the rendezvous come from the environment.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = digits.World(dist.get_rank(), dist.get_world_size(), device)

    model = digits.build_model(options.seed).to(device)
    parallel = DistributedDataParallel(model)  # averages the gradients during backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    saved = {"model": model, "optimizer": optimizer}
    digits.train(parallel, options, world, optimizer.zero_grad, optimizer.step, saved)
    digits.finish(model, world)
    dist.barrier()  # gloo aborts a rank that leaves while another still ends its last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A script that is started by torchrun everywhere else, unchanged: it fits y = 3x + 1."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
    print(f"rank {rank}: world size {dist.get_world_size()}", flush=True)

    torch.manual_seed(rank)
    x = torch.randn(256, 1)
    y = 3 * x + 1
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"y = {model.module.weight.item():.2f} x + {model.module.bias.item():.2f}", flush=True)
    dist.barrier()  # gloo aborts a rank that leaves while another still ends its last step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

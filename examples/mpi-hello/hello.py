"""Says hello from every rank, then proves that the ranks talk to each other: the sum over all of them must be right."""

from __future__ import annotations

import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()

total = world.allreduce(rank + 1, op=MPI.SUM)
expected = size * (size + 1) // 2
print(f"hello from rank {rank} of {size} on {MPI.Get_processor_name()}: sum {total}, expected {expected}", flush=True)
sys.exit(0 if total == expected else 1)

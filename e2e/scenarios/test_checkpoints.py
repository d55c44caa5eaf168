"""A rank that crashes costs no read of the store: the copies in its pod's memory outlive it."""

from __future__ import annotations

import re

import pytest

from e2e.harness import Cluster, python, training_job

# Two ranks; one of them exits after the fifth save of the first generation, without a word to anybody.
SAVES = """
import os, torch, torch.distributed as dist, everstep
dist.init_process_group('gloo')
first, rank = os.environ['EVERSTEP_GENERATION'] == '1', dist.get_rank()
weight = torch.nn.Parameter(torch.zeros(1 << 20))
with everstep.checkpointer('/opt/ml/checkpoints', every_steps=1, policy='wait') as checkpoints:
    start = checkpoints.restore(weight=weight.data)
    weight_now = f'{weight.data[-1].item():g}'
    print('rank', rank, 'begins at', start.step, 'from', start.tier or 'nothing', 'with', weight_now, flush=True)
    for step in range(start.step + 1, 9):
        weight.data += 1
        checkpoints.step(step)
        if first and step == 5:
            checkpoints.wait()
            if rank == 1:
                os._exit(3)
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_ranks_that_are_started_again_in_place_restore_from_memory(cluster: Cluster, namespace: str) -> None:
    job = training_job(
        "crash",
        python(SAVES),
        image="everstep/trainer:0.1.0",
        numNodes=1,
        numProcPerNode=2,
        restart={"maxBackoff": "0s"},
        resources={"requests": {"cpu": "100m", "memory": "1Gi"}},
    )
    cluster.apply(job, namespace=namespace)
    ended = cluster.wait_phase(namespace, "crash", "Succeeded", timeout=120)
    assert ended["status"]["restarts"]["application"] == 1
    begins = re.findall(r"rank (\d) begins at (\d+) from (\w+) with (\d+)", cluster.all_logs(namespace, "crash"))
    assert sorted(begins) == [(r, s, t, s) for r in "01" for s, t in (("0", "nothing"), ("5", "memory"))]

"""A pipeline as a TrainingJob is the same training: as with DDP, and with other stages after a restart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from e2e.harness import Cluster, Object, python

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline-lm" / "trainingjob.yaml"
STEPS = 2000  # nobody waits for them all: however fast a machine is, the job is suspended before its end

# The data, the model and the loss of the example, on as many replicas as there are ranks.
REFERENCE = f"""
import sys
sys.path.insert(0, '/opt/everstep/examples/pipeline-lm')
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train import CharTransformer, batch, corpus, loss
torch.set_num_threads(1)
dist.init_process_group('gloo')
rank, world = dist.get_rank(), dist.get_world_size()
learn, _ = corpus()
torch.manual_seed(0)
model = DistributedDataParallel(CharTransformer(64, width=128, depth=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.003, total_steps={STEPS})
mine = slice(rank * 16 // world, (rank + 1) * 16 // world)
for step in range(1, int(sys.argv[1]) + 1):
    text, following = batch(learn, 16, 64, (0, step))
    total, count = loss(model(text[mine]), following[mine])
    optimizer.zero_grad()
    (total / count).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    mean = total.detach() / count
    dist.all_reduce(mean)
    if rank == 0 and step % 10 == 0:
        print(f'step {{step}}/{STEPS} loss {{mean.item() / world:.4f}}', flush=True)
"""


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(rf"step (\d+)/{STEPS} loss (\d+\.\d+)", output)}


def begins(output: str) -> set[int]:
    """From where ranks have gone on: one step, if they agree."""
    return {int(step) for step in re.findall(r"begins at step (\d+)", output)}


def step_of(job: Object) -> int:
    return int(job.get("status", {}).get("progress", {}).get("step", 0))


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_four_stages_on_two_replicas_lose_as_ddp_does_and_go_on_as_two_on_four(
    cluster: Cluster, namespace: str, volume: Object
) -> None:
    job: Object = yaml.safe_load(EXAMPLE.read_text())
    spec, name = job["spec"], job["metadata"]["name"]
    spec["hyperparameters"] |= {"steps": str(STEPS), "save-every": "10", "checkpoints": "/checkpoints"}
    spec["podTemplate"] = {"spec": volume}
    cluster.apply(job, namespace=namespace)
    cluster.wait_job(namespace, name, lambda found: step_of(found) >= 20, 240, "steps in four stages")
    before = losses(cluster.all_logs(namespace, name))
    spec["suspend"] = True
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, name, "Suspended", timeout=90)

    spec["suspend"], spec["distribution"] = False, {"pipeline": {"stages": 2}}
    cluster.apply(job, namespace=namespace)
    cluster.wait_phase(namespace, name, "Running", timeout=240)
    cluster.wait_job(namespace, name, lambda _: begins(cluster.all_logs(namespace, name)), 120, "a start")
    (start,) = begins(cluster.all_logs(namespace, name))
    assert start >= 10, "from a checkpoint that four stages saved"
    last = start - start % 10 + 30  # told every ten steps; a suspended job saves at any step
    cluster.wait_job(
        namespace, name, lambda _: last in losses(cluster.all_logs(namespace, name)), 240, "steps in two stages"
    )
    after = losses(cluster.all_logs(namespace, name))

    reference = {key: spec[key] for key in ("image", "numNodes", "numProcPerNode", "resources")}
    reference |= {"command": [*python(REFERENCE), str(last)], "distribution": {"torch": {}}}
    ddp = {"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": {"name": "ddp"}, "spec": reference}
    cluster.apply(ddp, namespace=namespace)
    cluster.wait_phase(namespace, "ddp", "Succeeded", timeout=180)
    expected = losses(cluster.all_logs(namespace, "ddp"))
    assert set(expected) == set(range(10, last + 1, 10))
    assert len(before) >= 2
    # What a pod wrote between the reading of its logs and the suspension is gone with it.
    found = {step: loss for step, loss in {**before, **after}.items() if step <= last}
    assert len(found.keys() - before.keys()) >= 2
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-3)

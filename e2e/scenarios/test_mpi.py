"""Under mpirun a rank is as visible as without it, on whichever pod it runs; and Horovod computes what torch does."""

from __future__ import annotations

import base64
from array import array

import pytest

from e2e.harness import Cluster, Object, training_job

TRAINER = {"image": "docker.io/everstep/trainer:0.1.0", "numNodes": 2, "numProcPerNode": 2}
HOROVOD = {**TRAINER, "image": "docker.io/everstep/trainer-horovod:0.1.0"}
DIGITS = "/opt/everstep/examples/digits"
# As in training: the others are in a collective when it happens, and fail with it.
ENDS = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.Get_rank() == 2:
    {how}
world.Barrier()
"""
# Rank 0 trains as it always does, then tells the gradients that it has dumped: its pod keeps no file when it has ended.
TELL = """
import base64, os, runpy, sys
script, dump = sys.argv[1], f'/tmp/gradients-{os.getpid()}'
sys.argv = [script, '--epochs', '1', '--dump-gradients', dump]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name='__main__')
if os.path.exists(dump):
    import torch
    for step, gradients in enumerate(torch.load(dump)):
        for name, value in gradients.items():
            told = base64.b64encode(value.numpy().tobytes()).decode()
            print('GRADIENT', f'{step}.{name}', told, flush=True)
"""
STEPS, TENSORS, WEIGHTS = 5, 4, 64 * 128 + 128 + 128 * 10 + 10
TOLERANCE = 1e-5


def ends(name: str, how: str) -> Object:
    command = ["python3", "-c", ENDS.format(how=how)]
    return training_job(name, command, distribution={"mpi": {}}, restart={"application": 0}, **TRAINER)


@pytest.mark.timeout(180)
def test_a_rank_of_the_other_pod_is_named_with_its_own_end(cluster: Cluster, namespace: str) -> None:
    cluster.apply(
        ends("killed", "os.kill(os.getpid(), 9)"),
        # Not sys.exit: MPI_Finalize, which mpi4py calls then, waits for the others.
        ends("exits", "os._exit(7)"),
        namespace=namespace,
    )
    for name, code in (("killed", 128 + 9), ("exits", 7)):
        failed = cluster.wait_phase(namespace, name, "Failed", timeout=150)
        last = failed["status"]["lastFailure"]
        assert (last["rank"], last["exitCode"]) == (2, code), last
        assert last["reason"] == "ApplicationError", last
        assert "mpirun" not in last["message"], last
        leaders, others = cluster.pods(namespace, name)
        assert last["node"] == others["spec"]["nodeName"] != leaders["spec"]["nodeName"]
    killed = cluster.job(namespace, "killed")
    assert killed is not None
    assert "SIGKILL" in killed["status"]["lastFailure"]["message"]


WAITS = """
import os
from mpi4py import MPI
for _ in range(1000):
    MPI.COMM_WORLD.Barrier()
print('GIVES-WAY', os.environ.get('OMPI_MCA_mpi_yield_when_idle'), flush=True)
"""


@pytest.mark.timeout(180)
def test_ranks_that_share_a_processor_give_way_while_they_wait_unless_an_option_says_otherwise(
    cluster: Cluster, namespace: str
) -> None:
    shared = {"image": TRAINER["image"], "numNodes": 1, "numProcPerNode": 2}
    one_cpu = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"cpu": "1"}}
    options = {"shares": [], "spins": ["--mca", "mpi_yield_when_idle", "0"]}
    for name, said in options.items():
        distribution = {"mpi": {"options": said} if said else {}}
        job = training_job(name, ["python3", "-c", WAITS], distribution=distribution, resources=one_cpu, **shared)
        cluster.apply(job, namespace=namespace)
    for name, expected in (("shares", "1"), ("spins", "0")):
        cluster.wait_phase(namespace, name, "Succeeded", timeout=150)
        assert cluster.all_logs(namespace, name).count(f"GIVES-WAY {expected}") == 2


def gradients(output: str) -> dict[str, array[float]]:
    """Return what a job told: averaged gradients by step and parameter."""
    told = [line.partition("GRADIENT ")[2].split() for line in output.splitlines() if "GRADIENT " in line]
    return {name: array("f", base64.b64decode(data)) for name, data in told}


@pytest.mark.timeout(240)
def test_horovod_averages_the_gradients_that_torch_does(cluster: Cluster, namespace: str) -> None:
    """The same samples in the same order on two pods of two ranks, averaged by MPI and by gloo."""
    scripts = {"torch": "train.py", "horovod": "train_horovod.py"}
    for name, script in scripts.items():
        command = ["python", "-c", TELL, f"{DIGITS}/{script}"]
        cluster.apply(training_job(name, command, distribution={name: {}}, **HOROVOD), namespace=namespace)
    found = {}
    for name in scripts:
        cluster.wait_phase(namespace, name, "Succeeded", timeout=200)
        found[name] = gradients(cluster.all_logs(namespace, name))
    ours, theirs = found["torch"], found["horovod"]
    assert len(ours) == STEPS * TENSORS
    assert ours.keys() == theirs.keys()
    assert sum(len(values) for values in ours.values()) == STEPS * WEIGHTS
    assert all(any(values) for values in ours.values()), "gradients of zeros would agree too"
    furthest = max(abs(a - b) for name in ours for a, b in zip(ours[name], theirs[name], strict=True))
    assert furthest <= TOLERANCE

"""The examples' scripts do what their READMEs say, as plain processes and without a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, Trainer, free_port, torchrun

# Seconds on an idle machine; on a busy one, four ranks that import torch at once take their time.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Gradients of the same batches, averaged by gloo and by MPI in another order of the sums.
TOLERANCE = 1e-5
COMPARE = """
import sys, torch
ours, theirs = (torch.load(path) for path in sys.argv[1:])
assert len(ours) == len(theirs) == 5
assert all(one.keys() == other.keys() for one, other in zip(ours, theirs))
assert all(weight.abs().max() > 0 for weight in ours[0].values())
print(max((one[name] - other[name]).abs().max().item() for one, other in zip(ours, theirs) for name in one))
"""


def accuracy(output: str) -> float:
    found = re.findall(r"^accuracy (\d\.\d\d)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return float(found[0])


def test_four_ranks_learn_the_digits(trainer: Trainer) -> None:
    output = trainer.run(*torchrun(4), f"{trainer.examples}/digits/train.py")
    assert accuracy(output) >= 0.95
    assert {f"rank {rank} of 4" for rank in range(4)} <= set(re.findall(r"rank \d of 4", output))
    assert (trainer.folder / "model.pt").stat().st_size > 10_000


@pytest.mark.parametrize("trainer", [("horovod", "mpi4py")], indirect=True, ids=["horovod"])
def test_horovod_averages_the_same_gradients(trainer: Trainer) -> None:
    digits = f"{trainer.examples}/digits"
    ours, theirs = f"{trainer.output}/torch.pt", f"{trainer.output}/horovod.pt"
    trainer.run(*torchrun(2), f"{digits}/train.py", "--epochs", "1", "--dump-gradients", ours)
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
    output = trainer.run(*mpirun, "python", f"{digits}/train_horovod.py", "--dump-gradients", theirs)
    assert accuracy(output) >= 0.95
    assert float(trainer.run("python", "-c", COMPARE, ours, theirs)) <= TOLERANCE


def test_the_language_model_learns(trainer: Trainer) -> None:
    output = trainer.run(*torchrun(2), f"{trainer.examples}/char-lm/train.py", "--steps", "30", "--batch-size", "8")
    bits = re.findall(r"^bits per character (\d+\.\d+)$", output, re.MULTILINE)
    assert len(bits) == 1
    assert float(bits[0]) < 5.0, "an untrained model needs 7"
    assert "--- sample\ndef " in output


def test_a_torchrun_in_each_of_two_pods_forms_one_world(trainer: Trainer) -> None:
    node = (
        "PET_NNODES=2 PET_NPROC_PER_NODE=2 PET_MASTER_ADDR=127.0.0.1 "
        f"PET_MASTER_PORT={free_port()} PET_NODE_RANK={{}} python -m torch.distributed.run "
        f"{trainer.examples}/torchrun/train.py"
    )
    output = trainer.run("sh", "-c", f"{node.format(0)} & {node.format(1)}; status=$?; wait; exit $status")
    assert set(re.findall(r"rank (\d): world size 4", output)) == set("0123")
    assert "y = 3.00 x + 1.00" in output


@pytest.mark.parametrize("trainer", [("mpi4py",)], indirect=True, ids=["mpi4py"])
@pytest.mark.parametrize("program", ["python {}/mpi-hello/hello.py", "{}/mpi-hello/hello"], ids=["python", "c"])
def test_mpi_ranks_agree_on_the_sum(trainer: Trainer, program: str) -> None:
    if trainer.image is None and "python" not in program:
        pytest.skip("the C program is compiled in the trainer image")
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3")
    output = trainer.run(*mpirun, *program.format(trainer.examples).split())
    hello = re.findall(r"hello from rank (\d) of 3 on \S+: sum 6, expected 6", output)
    assert sorted(hello) == ["0", "1", "2"]


def test_bare_sockets_add_up_and_report_progress(tmp_path: Path) -> None:
    """Three ranks, started in the order that is hardest on them: rank 0 last."""
    fifo = tmp_path / "progress"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)  # both ends, as the agent does: no writer waits for a reader
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-I", str(EXAMPLES / "byo" / "sum.py")],
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "EVERSTEP_PROGRESS": str(fifo),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (2, 1, 0)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        progress = os.read(reader, 4096).decode()
    finally:
        os.close(reader)
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert "the sum is 6" in outputs[-1]
    assert progress.splitlines() == ["step=1 total=2", "step=2 total=2"]


def test_bare_sockets_need_no_progress_pipe() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = [sys.executable, "-I", str(EXAMPLES / "byo" / "sum.py")]
    result = subprocess.run(script, env=alone, capture_output=True, text=True, timeout=60, check=True)
    assert "the sum is 1" in result.stdout

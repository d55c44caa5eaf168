"""Measures the time from `apply` until MPI_Init is done on every rank."""

from __future__ import annotations

from benchmarks.arms import Bare, Everstep, Site
from benchmarks.measure import Row, alternate
from benchmarks.start import WORLD, next_tag, start

IMAGE = "docker.io/everstep/trainer:0.1.0"
# MPI_Init is what the import does. Until it is told to go, a rank stays: the next arm must not overlap with its end.
RANK = """
import os, socket
env = os.environ
ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); ear.connect((env['EAR'], int(env['EAR_PORT'])))
from mpi4py import MPI
ear.send(f"{env['TAG']} {MPI.COMM_WORLD.rank} passed".encode())
ear.recv(64)
"""
COMMAND = ["python3", "-c", RANK]
# The shell itself tells that it has started: a Python that did would be part of what is measured.
LOCAL = (
    'echo -n "$TAG 0 started" >/dev/udp/$EAR/$EAR_PORT; '
    f'exec mpirun -n {WORLD} --oversubscribe --bind-to none python3 -c "$PROGRAM"'
)


def ours() -> Everstep:
    """Two nodes with two ranks each."""
    return Everstep(COMMAND, IMAGE, numNodes=2, numProcPerNode=WORLD // 2, distribution={"mpi": {}})


def local_mpirun(site: Site) -> float:
    """Return the seconds of the same mpirun and the same ranks as processes of one pod, from the pod's own start."""
    tag = next_tag("mpirun")
    arm = Bare(["bash", "-c", LOCAL], IMAGE)
    # As the agent has it: in a container, one rank may not read another's memory.
    arm.create(site, tag, 1, PROGRAM=RANK, OMPI_MCA_btl_vader_single_copy_mechanism="none")
    try:
        end = site.ear.listen(tag, WORLD)
        return end - site.ear.heard(tag).started[0][0]
    finally:
        site.ear.dismiss(tag)
        arm.delete(site, tag)


def startup_mpi_4(site: Site) -> Row:
    """Over a start of as many plain ranks and the mpirun that no MPI job can do without."""
    row = Row("startup-mpi-4", "s", 1.2)

    def floor() -> float:
        plain, local = start(site, Everstep()), local_mpirun(site)
        row.samples.setdefault("plain start", []).append(plain)
        row.samples.setdefault("local mpirun", []).append(local)
        return plain + local

    return alternate(row, lambda: start(site, ours()), floor)

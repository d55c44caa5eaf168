from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.agent.laptop import interpreter

from .node import build_agent


@pytest.fixture(params=["3.9", "this", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    """Every Python that the agent must run on, as far as this machine has it."""
    if request.param == "this":
        return sys.executable
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} here")
    return found


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="session")
def mpi_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C program that every rank runs; see mpi_program.c."""
    import subprocess

    if shutil.which("mpicc") is None or shutil.which("mpirun") is None:
        pytest.skip("no MPI here")
    target = tmp_path_factory.mktemp("mpi") / "program"
    source = Path(__file__).with_name("mpi_program.c")
    subprocess.run(["mpicc", "-o", str(target), str(source)], check=True)
    return target

"""Stores for the tests: a folder, memory, and a real S3 server which is started once, when a test asks for it.

When the last test has ended, no process that any of them started is left, and nothing in shared memory.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.writer import control
from tests.checkpoint import leftovers
from tests.checkpoint.crash import in_memory
from tests.checkpoint.faults import FaultProxy, fault_proxy
from tests.checkpoint.s3_server import ENVIRONMENT, S3Server, s3_server
from tests.checkpoint.writers import Site


@pytest.fixture(scope="session")
def mark() -> Iterator[str]:
    """Return the mark in the environment of these tests' processes, and check that none of them is left in the end."""
    mark = uuid.uuid4().hex
    with leftovers.shared_memory():
        yield mark
        leftovers.check(mark)


@pytest.fixture(autouse=True)
def nothing_is_left(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark the processes that a test starts; those of other tests, such as a shared API server, have no mark."""
    monkeypatch.setenv(leftovers.MARK, mark)


@pytest.fixture(scope="session")
def s3_server_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(s3_server_of_all: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and the environment in which clients find their credentials."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return s3_server_of_all


@pytest.fixture
def s3_url(s3: S3Server) -> str:
    """A place of this test's own on the server."""
    return s3.url(uuid.uuid4().hex)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    """Before the S3 server; spoils nothing until it is told."""
    with fault_proxy(s3.port) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder for stores and memory of a session, and end the writers that still run there afterwards."""
    yield tmp_path
    for directory in tmp_path.glob("*memory*"):
        with suppress(OSError):
            link = control.WriterLink.connect(directory)
            os.kill(link.pid, signal.SIGKILL)
            link.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A store and the writers of its nodes, which are ended."""
    made = Site(tmp_path)
    yield made
    made.end()


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder where an fsync costs nothing, if the machine has one: what it is for, the power loss tests show."""
    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture(params=["posix", "memory", pytest.param("s3", marks=pytest.mark.integration)])
def store_url(request: pytest.FixtureRequest) -> str:
    """A new place in each kind of store; `pytest -m "not integration"` leaves out those that need a server."""
    match request.param:
        case "posix":
            return str(request.getfixturevalue("quick_path") / "store")
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
        case _:
            return str(request.getfixturevalue("s3_url"))


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)

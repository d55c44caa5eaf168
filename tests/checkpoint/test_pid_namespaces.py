"""Containers that share a memory: a writer sees the processes of the others as process 0, all of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.checkpoint.writers import Site

_UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
_RANK = """
import sys
from pathlib import Path
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.writer import control
directory, store, attempt = sys.argv[1:]
if not attempt:  # a run was here, and has left its writer
    control.ensure_writer(Path(directory), 60.0)
print("occupied" if control.is_occupied(Path(directory)) else "free", flush=True)
config = control.WriterConfig(store, {}, attempt or "0000000000.0000000001", 0, 1, 1, (0,))
for _ in range(2 if attempt else 0):  # the second time as a session that begins anew in its process
    try:
        link = control.join_writer(Path(directory), config, 0, 30.0)
    except CheckpointError as error:
        print(error, flush=True)
        break
    print("joined", flush=True)
sys.stdin.read()
"""


class Container:
    """A rank in a pid namespace of its own."""

    def __init__(self, stack: ExitStack, site: Site, directory: Path, attempt: str) -> None:
        command = [*_UNSHARE, sys.executable, "-c", _RANK, str(directory), site.store.url, attempt]
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._process.kill)

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    if shutil.which("unshare") is None or subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("no pid namespace may be made here")
    with ExitStack() as found:
        yield found


def test_runs_in_two_containers_are_not_taken_for_one_process(site: Site, stack: ExitStack) -> None:
    """Before, a run in a second container took the slots of a live one in the first, and readers did not see that."""
    memory = site.folder / "memory"
    assert Container(stack, site, memory, "").read_line() == "free"
    first = Container(stack, site, memory, "0000000000.0000000002")
    assert [first.read_line() for _ in range(3)] == ["free", "joined", "joined"]
    second = Container(stack, site, memory, "0000000000.0000000003")
    assert second.read_line() == "occupied"
    assert "is alive: process one of another container" in second.read_line()

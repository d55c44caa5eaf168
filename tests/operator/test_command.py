"""The command `everstep-operator`: what its process is made of."""

from __future__ import annotations

import subprocess
import sys

LOOK = """
import sys
from everstep_operator.__main__ import leave_out_synchronous_client
leave_out_synchronous_client()
import everstep_operator.app, kubernetes.aio.config
print(*sorted(name for name in sys.modules if name.startswith("kubernetes.") and not name.startswith("kubernetes.aio")))
"""


def run_python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def test_the_clients_half_that_nothing_uses_is_not_in_the_process() -> None:
    """It is two fifths of the memory of an operator without jobs."""
    assert run_python("-c", LOOK).split() == ["kubernetes.client"]  # None, in the place of the module


def test_the_command_tells_of_its_options() -> None:
    assert "--watch-namespaces" in run_python("-m", "everstep_operator", "--help")

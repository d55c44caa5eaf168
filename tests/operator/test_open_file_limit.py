"""Open files: each leader that is polled is one."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
soft, hard, wished = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from everstep_operator.open_file_limit import raise_open_file_limit
print("result", raise_open_file_limit(wished), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wished", "at_once"),
    [(256, 4096, 1000, 1000), (256, 1024, 1000, 384), (1024, 1024, 100, 100), (128, 128, 1000, 1)],
)
def test_the_limit_is_raised_and_what_it_cannot_hold_is_said(soft: int, hard: int, wished: int, at_once: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer open files")
    command = [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, wished))]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert f"result {at_once} {hard} {hard}" in output
    assert ("too few open files" in output) == (at_once < wished)
    assert at_once == wished or f"{wished + 640}" in output, "how many are needed"

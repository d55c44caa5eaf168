"""The command as a user runs it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Everstep = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def everstep(tmp_path: Path) -> Everstep:
    """Runs `everstep …` in an empty folder."""

    def call(*arguments: str, stdin: str = "", timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "everstep.cli", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        )

    return call

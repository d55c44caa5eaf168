"""`everstep …` as a user runs it: what it prints, and how it ends."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from everstep.cli import main

PLAIN = {"COLUMNS": "200", "NO_COLOR": "1"}
Done = subprocess.CompletedProcess[str]


def in_process(folder: Path, *arguments: str, stdin: str = "") -> Done:
    """From the same `main` as the entry point, but here: a process would import for half a second."""
    command = ["everstep", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", command)
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code or 0
    assert isinstance(code, int), "a traceback, or a sentence as the exit code"
    return Done(command, code, out.getvalue(), err.getvalue())


def as_process(folder: Path, *arguments: str) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=folder,
        env={**os.environ, **PLAIN},
    )

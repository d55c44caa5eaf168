"""A complete Python that is too old for the agent, taken from this machine: no package registry carries one.

Debian's own releases jump from 3.7 (no longer on its mirrors) to 3.9, which the agent runs on.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

STAGE = Path(__file__).parents[2] / "build" / "python38"
_UNNEEDED = ("test", "tests", "__pycache__", "site-packages", "idlelib", "tkinter", "ensurepip", "*.a", "config-3.8*")


@cache
def available() -> bool:
    """Copy an installed Python 3.8 to where the Dockerfile finds it; False if there is none."""
    prefix = _prefix()
    if prefix is None:
        return False
    if not STAGE.exists():
        unfinished = STAGE.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(prefix / "bin", unfinished / "bin", ignore=lambda _, names: {*names} - {"python3.8"})
        ignore = shutil.ignore_patterns(*_UNNEEDED)
        shutil.copytree(prefix / "lib", unfinished / "lib", ignore=ignore, symlinks=True)
        unfinished.rename(STAGE)
    return True


def _prefix() -> Path | None:
    for command in ("python3.8", *Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")):
        asked = [str(command), "-c", "import sys; print(sys.base_prefix)"]
        try:
            told = subprocess.run(asked, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return Path(told.stdout.strip())
    return None

"""Running the programs that build images."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from e2e.images.errors import ImageError


def need(program: str) -> None:
    """Make sure that ``program`` can be run, from the Debian package of the same name."""
    if shutil.which(program):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ImageError(f"images are built with {program}, which is missing: install it, or start a Docker engine")
    run("apt-get", "update", "--quiet")
    run("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", program)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run ``command`` and return what it printed; its output becomes the error's message if it fails."""
    result = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        output = (result.stdout + result.stderr)[-4000:]
        raise ImageError(f"{' '.join(str(word) for word in command[:4])} … exited with {result.returncode}:\n{output}")
    return result.stdout
